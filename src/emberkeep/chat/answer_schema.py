"""JSON schemas of answers and of arguments, before they are compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping

from emberkeep.errors import InvalidField
from emberkeep.types.request import Json, exceeds_depth

MAX_SCHEMA_CHARS = 256 << 10
MAX_SCHEMA_DEPTH = 64

_COMBINED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "unevaluatedProperties"))
"""Beside one of these an object may have keys that another schema declares."""
_DECLARING = _COMBINED | {"properties", "patternProperties", "additionalProperties", "enum", "const"}
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "oneOf", "prefixItems"))
_SINGLE = frozenset(("items", "additionalProperties"))


def checked(schema: Mapping[str, Json], param: str) -> Mapping[str, Json]:
    """Raises InvalidField for what is too large."""
    if exceeds_depth(schema, MAX_SCHEMA_DEPTH):
        raise InvalidField(param, f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it.")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise InvalidField(param, f"the schema is longer than {MAX_SCHEMA_CHARS} characters: shorten it.")
    return schema


def closed(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same, without keys that no schema declares, unless it says that there may be others.

    Small models make such keys up. Where schemas are combined it is left as it is: what one of them does not
    declare another one may.
    """
    return _closed(schema) if "allOf" not in json.dumps(schema) else dict(schema)


def arguments_schema(parameters: Mapping[str, Json]) -> dict[str, Json]:
    """Of a tool. What declares nothing takes nothing."""
    if _DECLARING.isdisjoint(parameters):
        return {**parameters, "properties": {}, "additionalProperties": False}
    return closed(parameters)


def _closed(schema: Mapping[str, Json]) -> dict[str, Json]:
    made = {key: _within(key, value, schema) for key, value in schema.items()}
    declared = schema.get("properties")
    if not isinstance(declared, dict) or "additionalProperties" in schema or not _COMBINED.isdisjoint(schema):
        return made
    required = schema.get("required", ())
    is_whole = isinstance(required, list | tuple) and all(name in declared for name in required)
    return {**made, "additionalProperties": False} if is_whole else made


def _within(key: str, value: Json, schema: Mapping[str, Json]) -> Json:
    if key in _NAMED and isinstance(value, dict):
        return {name: _each(one) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list) and (key == "prefixItems" or "properties" not in schema):
        return [_each(one) for one in value]
    return _each(value) if key in _SINGLE else value


def _each(value: Json) -> Json:
    return _closed(value) if isinstance(value, dict) else value
