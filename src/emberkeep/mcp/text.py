"""What servers write, made harmless to read: it is data, whatever it says."""

from __future__ import annotations

import re

from emberkeep.types import Json

# Control characters drive terminals; invisible ones and tags hide instructions from the person who approves.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ufe00-\ufe0e\ufeff\U000e0000-\U000e01ef]"
)


def cleaned(text: str) -> str:
    """Without characters that nobody sees. Lines and tabs stay."""
    return _HIDDEN.sub("", text.replace("\r\n", "\n"))


def cleaned_json(value: Json) -> Json:
    """The same for every text in it."""
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, list):
        return [cleaned_json(item) for item in value]
    if isinstance(value, dict):
        return {cleaned(str(key)): cleaned_json(item) for key, item in value.items()}
    return value


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
