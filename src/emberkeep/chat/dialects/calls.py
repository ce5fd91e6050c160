"""What a reader finds: calls, in pieces, as soon as they are certain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from emberkeep.types import Json, Tool


class NoCall(Exception):
    """What is being read is not a call. `quoted_until`: and neither is anything up to there."""

    def __init__(self, quoted_until: str = "") -> None:
        self.quoted_until = quoted_until


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call begins with its name, goes on with pieces of its arguments, and ends with `is_end`."""

    name: str | None = None
    arguments: str = ""
    is_end: bool = False


class Calls:
    """The calls of one block, while they are read."""

    def __init__(self, tools: Mapping[str, Tool], *, any_name: bool, is_first: bool) -> None:
        """`any_name`: its markers leave no doubt, so an unknown name is the caller's to answer. `is_first`: the
        answer begins with it."""
        self._tools = tools
        self.any_name = any_name
        self.is_first = is_first
        self._pieces: list[CallPiece] = []
        self.name: str | None = None
        """Of the call that is being read, once it is known."""
        self.is_open = False
        self.begun = 0

    @property
    def tool(self) -> Tool:
        assert self.name is not None
        return self._tools.get(self.name) or Tool(self.name)

    def knows(self, name: str) -> bool:
        return name in self._tools

    def named(self, name: str) -> None:
        """Raises NoCall where there is no such tool and there has to be one, or where it is no name at all."""
        if not name.isprintable() or not name or (name not in self._tools and not self.any_name):
            raise NoCall
        self.name = name

    def open(self) -> None:
        """It is a call for certain."""
        self._pieces.append(CallPiece(self.name))
        self.begun += 1
        self.is_open = True

    def add(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallPiece(arguments=arguments))

    def end(self) -> None:
        self._pieces.append(CallPiece(is_end=True))
        self.is_open, self.name = False, None

    def whole(self, name: str, arguments: str) -> None:
        self.named(name)
        self.open()
        self.add(arguments)
        self.end()

    def taken(self) -> tuple[CallPiece, ...]:
        pieces, self._pieces = tuple(self._pieces), []
        return pieces


# ── values ──


def as_json(value: Json) -> str:
    """As it may be sent. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    """Half of a character (a lone surrogate), which JSON can name, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def typed_json(tool: Tool, key: str, text: str) -> str:
    """`text` as the JSON value that the tool's schema wants for `key`."""
    schema = tool.parameters.get("properties", {}).get(key, {})
    if not _takes_text(schema):
        try:
            json.loads(text, parse_constant=_refuse)
            return text.strip()
        except (ValueError, RecursionError):
            if text.strip() in _PYTHONS:
                return _PYTHONS[text.strip()]
    return as_json(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def _takes_text(schema: Json) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    either = schema.get("anyOf") or schema.get("oneOf") or ()
    return schema.get("type") == "string" or any(_takes_text(option) for option in either)
