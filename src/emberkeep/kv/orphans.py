"""Files on disk that no lookup can reach, because the chunk above them is gone."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TypeVar

from emberkeep.kv.disk.index import ChunkRow
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.tree import Chunk

T = TypeVar("T")


class Orphans:
    """Files on disk by the parent without which no lookup can reach them."""

    def __init__(self) -> None:
        self.bytes = 0
        self._below: dict[ChunkKey, dict[ChunkKey, ChunkRow]] = {}
        self._lost: set[ChunkKey] = set()
        """Those parents that were lost since the store was opened, and may well be computed again."""

    def __iter__(self) -> Iterator[ChunkRow]:
        return (row for rows in self._below.values() for row in rows.values())

    def below(self, chunks: Container[ChunkKey]) -> list[ChunkRow]:
        """Those whose parent is among `chunks`."""
        return [row for parent, rows in self._below.items() if parent in chunks for row in rows.values()]

    def parents(self, chunks: Container[ChunkKey], *, lost_ones_too: bool) -> list[ChunkKey]:
        """Parents of orphans. Without `lost_ones_too`, only those that are neither in `chunks` nor lost."""
        if lost_ones_too:
            return list(self._below)
        return [key for key in self._below if key not in self._lost and key not in chunks]

    def add(self, row: ChunkRow, *, is_lost: bool = False) -> None:
        """`is_lost`: its parent may well be computed again."""
        rows = self._below.setdefault(row.parent, {})
        if row.key not in rows:
            rows[row.key] = row
            self.bytes += row.bytes
        if is_lost:
            self._lost.add(row.parent)

    def take(self, parent: ChunkKey, key: ChunkKey) -> ChunkRow | None:
        """One that waited for its parent, if it did."""
        rows = self._below.get(parent, {})
        row = rows.pop(key, None)
        if row is not None:
            self.bytes -= row.bytes
            if not rows:
                self._forget(parent)
        return row

    def take_all(self, parent: ChunkKey) -> list[ChunkRow]:
        """Those that waited for it."""
        rows = self._below.get(parent)
        if rows is None:
            return []
        self.bytes -= sum(row.bytes for row in rows.values())
        self._forget(parent)
        return list(rows.values())

    def drop(self, missing: Container[ChunkKey]) -> None:
        """Their files are not there either."""
        for row in [row for row in self if row.key in missing]:
            self.take(row.parent, row.key)

    def _forget(self, parent: ChunkKey) -> None:
        del self._below[parent]
        self._lost.discard(parent)


def _row_of(chunk: Chunk) -> ChunkRow:
    assert chunk.parent is not None
    place = (chunk.key, str(chunk.lineage), chunk.parent.key, chunk.take, chunk.start)
    uses = (chunk.bytes, chunk.last_used, chunk.hits, chunk.expires)
    return ChunkRow(0, *place, chunk.tokens, chunk.sampled, chunk.made, *uses)
