"""Kinds of fields that every API has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from emberkeep.types.request import Json

INT32_MAX = 2**31 - 1

NO_OTHERS: dict[str, Json] = {"additionalProperties": False}
"""For the schema of a mapping: no other keys are allowed, which pydantic does not say."""

NotHere = Annotated[Any, BeforeValidator(lambda given: given, json_schema_input_type=None)]
"""A field that is refused by its name, which its body does; in the schema it can only be null."""


def one_of(*names: str) -> dict[str, Json]:
    """For the schema of a body: one of these is given, and not empty."""
    given = ({"required": [name], "properties": {name: {"not": {"enum": [None, "", []]}}}} for name in names)
    return {"anyOf": list(given)}


def whole(number: Json) -> Json:
    """Some languages have one kind of numbers only, and write 2 as 2.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


WHOLE = BeforeValidator(whole)
"""For an integer, after its bounds: before them, the schema would not have these."""

Count = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
