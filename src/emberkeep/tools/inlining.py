"""Schemas as models like them: without the titles that pydantic makes of names, and without references.

Small models do not follow references, and titles are tokens that tell nothing. What refers to itself stays one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from emberkeep.types import Json

_VALUES = ("default", "const", "enum", "examples", "required")
"""What is in them is no schema."""
_DEFS = "#/$defs/"
_REFERENCE = re.compile(rf'"\$ref": "{re.escape(_DEFS)}([^"]+)"')


def inlined(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Of a schema that pydantic made; it is left as it is."""
    return _Inliner(schema.get("$defs", {})).whole(_without(schema, "$defs"))


class _Inliner:
    def __init__(self, shared: Mapping[str, Json]) -> None:
        self._shared = shared
        self._left: dict[str, Json] = {}

    def whole(self, schema: Mapping[str, Json]) -> dict[str, Json]:
        found = self._object(schema)
        return {**found, "$defs": self._left} if self._left else found

    def _any(self, part: Json) -> Json:
        if isinstance(part, list):
            return [self._any(item) for item in part]
        return self._object(part) if isinstance(part, dict) else part

    def _object(self, part: Mapping[str, Json]) -> dict[str, Json]:
        if "$ref" in part:
            name = part["$ref"].removeprefix(_DEFS)
            return {**self._referred(name), **self._object(_without(part, "$ref"))}
        # OpenAPI's `discriminator` tells which reference is which.
        kept = _without(part, "title", "discriminator")
        return {key: self._inner(key, value) for key, value in kept.items()}

    def _inner(self, key: str, value: Json) -> Json:
        if key in _VALUES:
            return value
        if key == "properties":  # its keys are names, which may be any word
            return {name: self._any(one) for name, one in value.items()}
        return self._any(value)

    def _referred(self, name: str) -> dict[str, Json]:
        if not self._is_recursive(name):
            return self._object(self._shared[name])
        if name not in self._left:
            self._left[name] = {}
            self._left[name] = self._object(self._shared[name])
        return {"$ref": f"{_DEFS}{name}"}

    def _is_recursive(self, name: str) -> bool:
        seen: set[str] = set()
        todo = [name]
        while todo:
            refers_to = set(_REFERENCE.findall(json.dumps(self._shared[todo.pop()])))
            todo += refers_to - seen
            seen |= refers_to
        return name in seen


def _without(part: Mapping[str, Json], *keys: str) -> dict[str, Json]:
    return cast(dict[str, Json], {name: value for name, value in part.items() if name not in keys})
