"""`$NAME` in a server's settings, and keeping what it stands for out of logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from emberkeep.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_MASK = "***"
_SECRET_CHARS = 8
"""Shorter values are too common in ordinary text to be masked there, and no keys."""


def expanded(values: Mapping[str, str]) -> dict[str, str]:
    """With variables replaced by what they hold now. Raises ConfigError for one that is not set."""
    return {key: _VARIABLE.sub(_value, value) for key, value in values.items()}


def masked(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted((s for s in secrets if len(s) >= _SECRET_CHARS), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _value(match: re.Match[str]) -> str:
    name = match["name"] or match["braced"]
    try:
        return os.environ[name]
    except KeyError as error:
        raise ConfigError(f"The variable {name} is not set: set it, or remove it from the settings.") from error
