"""What a model reads of a call: its value as text, or what went wrong in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_json

from emberkeep.errors import EmberkeepError, ToolFailed

log = logging.getLogger("emberkeep.tools")

_CHARS = 2000
"""Of what somebody else says about an error."""


def spelled(value: Any) -> str:
    """A text as it is; anything else as JSON: also pydantic's models, dataclasses, dates, paths and sets.

    Raises ToolFailed.
    """
    if value is None:
        return "Done."
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, Iterator):
        # It may never end, and the event loop would wait for it.
        raise ToolFailed("What it returned cannot be written as JSON: it has to return a list, not an iterator.")
    if not isinstance(value, str):
        try:
            # As words, since JSON has no numbers for them: null would say that there is none.
            value = to_json(value, inf_nan_mode="strings").decode()
        except (ValueError, RecursionError) as error:
            raise ToolFailed(f"What it returned cannot be written as JSON: {_whole(str(error))}.") from error
    return _whole(value)


def explained(error: BaseException, name: str) -> str:
    """One sentence about a call of the tool `name`. What the tool itself did wrong is in the log too."""
    if not isinstance(error, (EmberkeepError, LookupError, ValueError, OSError)):
        log.debug("the tool %s failed", name, exc_info=error)
    return f"Error: {_whole(_said(error))}"


def _said(error: BaseException) -> str:
    try:
        said = str(error).strip()
    except Exception:  # one that cannot even say what it is
        said = ""
    kind = type(error).__name__
    if isinstance(error, (EmberkeepError, ValueError, OSError)) and said:
        return said[:_CHARS]
    # Only with its kind does `'colour'` say that a key is missing.
    return f"{kind}: {said[:_CHARS]}" if said else kind


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which nothing else can encode."""
    return text.encode("utf-8", "replace").decode()
