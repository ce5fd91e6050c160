"""What comes from outside, an HTTP body or a call of the library, is checked here, and refused in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from emberkeep.errors import InvalidField
from emberkeep.types import Json

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
USER_ID = r"^[A-Za-z0-9_-]{0,512}$"
TOKEN_ID = r"^[0-9]{1,9}$"
TEMPLATE_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"

HALF_A_CHARACTER = "a text holds half of a surrogate pair, such as \\ud800: send whole characters."

_SPELLINGS = {
    TOOL_NAME: "use 1 to 128 letters, digits, dots, - and _",
    USER_ID: "use up to 512 letters, digits, - and _",
    TOKEN_ID: "a token id is written with 1 to 9 digits",
    TEMPLATE_NAME: "use 1 to 64 letters, digits and _, and no digit first",
}

_PHRASES = {
    "missing": "is required",
    "string_type": "give a text",
    "string_unicode": "give whole characters, and no half of a surrogate pair such as \\ud800",
    "bool_type": "give true or false",
    "int_type": "give a whole number",
    "int_parsing_size": "give a smaller number",
    "float_type": "give a number",
    "list_type": "give a list",
    "dict_type": "give an object",
    "model_type": "give an object",
    "literal_error": "give {expected}",
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give less than {lt}",
    "less_than_equal": "give {le} or less",
    "string_too_short": "give {min_length} or more characters",
    "string_too_long": "give {max_length} or fewer characters",
    "too_short": "give {min_length} or more entries",
    "too_long": "give {max_length} or fewer entries",
}
"""pydantic's kinds of errors. Its own sentences speak to programmers of pydantic, not to ours."""

_LONGEST_NAME = 64


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; known ones must have exactly their JSON type."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


B = TypeVar("B", bound=Body)


def checked(model: type[B], value: Mapping[str, Json]) -> B:
    """Raises InvalidField with the path of the first bad field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refusal(first["loc"], first["type"], first.get("ctx", {})) from None


def refusal(location: tuple[int | str, ...], kind: str, context: Mapping[str, Any]) -> InvalidField:
    """One of pydantic's errors in our words."""
    return InvalidField(_path(location), f"{_phrase(kind, context)}.")


def _phrase(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "value_error":  # raised by one of our own validators
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return _SPELLINGS[context["pattern"]]
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
    return _PHRASES.get(kind, "has a value that cannot be used").format_map(shown)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    parts = [part for part in location if part != "[key]"]
    shown = [f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in parts]
    return "".join(shown).removeprefix(".")
