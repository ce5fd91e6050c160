"""OpenAI's custom tools, which take a text: to the model each is a function with one argument."""

from __future__ import annotations

import json
import re

from emberkeep.types.request import Json

_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_ESCAPE = 12
"""A pair of surrogates."""

CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The inverse, also of arguments that were cut; what is no such JSON is the text itself."""
    try:
        given = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return _cut_input(arguments)
    return given if isinstance(given, str) else arguments


def _cut_input(arguments: str) -> str:
    begun = _BEGUN.match(arguments)
    if begun is None:
        return arguments
    text = arguments[begun.end() :]
    for length in range(len(text), max(len(text) - _LONGEST_ESCAPE, -1), -1):
        try:
            return str(json.loads(f'"{text[:length]}"', strict=False))
        except ValueError:  # it ends in the middle of an escape
            continue
    return arguments
