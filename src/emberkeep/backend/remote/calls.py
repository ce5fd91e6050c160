"""Tool calls as vendors stream them: whole or in pieces, with ids and indices or without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

from emberkeep.types import ToolCallDelta


@dataclass(slots=True)
class _Call:
    index: int
    id: str
    name: str = ""
    waiting: str = ""
    """Arguments that came before the name."""


class Calls:
    """The calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_key: dict[int, _Call] = {}

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self._calls]

    def piece(self, key: int | None, id: str | None, name: str | None, arguments: str) -> Iterator[ToolCallDelta]:
        """`key` is the vendor's index; without one, a name begins a new call."""
        call = self._find(key, id, name)
        if call.name:
            if arguments:
                yield ToolCallDelta(0, call.index, None, None, arguments)
            return
        call.waiting += arguments
        if name:
            call.name = name
            yield ToolCallDelta(0, call.index, call.id, name, call.waiting)

    def id_of(self, key: int | None) -> str:
        """Of the call that `key` names, or the latest."""
        return (self._calls[-1] if key is None else self._by_key[key]).id

    def _find(self, key: int | None, id: str | None, name: str | None) -> _Call:
        known = self._by_key.get(key) if key is not None else None
        # Some servers give every call the same index, and only the ids differ.
        if known is not None and (not id or id == known.id):
            return known
        if key is None and not name and self._calls:
            return self._calls[-1]
        call = _Call(len(self._calls), id or f"call_{uuid4().hex[:24]}")
        self._calls.append(call)
        if key is not None:
            self._by_key[key] = call
        return call
