"""Kinds of fields that every API has."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from emberkeep.types import Json

INT32_MAX = 2**31 - 1

NO_OTHERS: dict[str, Json] = {"additionalProperties": False}
"""For the schema of a mapping: no other keys are allowed, which pydantic does not say."""


def whole(number: Json) -> Json:
    """Some languages have one kind of numbers only, and write 2 as 2.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Whole = Annotated[int, BeforeValidator(whole, json_schema_input_type=int)]
Count = Annotated[Whole, Field(ge=0, le=INT32_MAX)]
