"""The RAM tier: payloads in memory under a byte budget."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

from emberkeep.kv.disk.index import ChunkRow
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.policy import LOW_WATER
from emberkeep.kv.tree import Chunk
from emberkeep.values import dataclass

T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, chunk: Chunk, size: int) -> None:
        self.chunks += 1
        self.tokens += len(chunk.tokens)
        self.bytes += size

    def take(self, chunk: Chunk, size: int) -> None:
        self.chunks -= 1
        self.tokens -= len(chunk.tokens)
        self.bytes -= size


class RamTier:
    """Which chunks have their payload in RAM. No locks and no I/O: `KvStore` calls it with its lock held."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tally = Tally()
        self._chunks: dict[ChunkKey, Chunk] = {}

    def put(self, chunk: Chunk, payload: memoryview) -> None:
        chunk.payload = payload
        self._chunks[chunk.key] = chunk
        self.tally.add(chunk, len(payload))

    def free(self, chunk: Chunk) -> None:
        """Give back the RAM of a chunk, if it takes any."""
        if self._chunks.pop(chunk.key, None) is not None and chunk.payload is not None:
            self.tally.take(chunk, len(chunk.payload))
        chunk.payload = None

    def shrink(self, worth: Callable[[Chunk], float], drop: Callable[[Chunk], object]) -> int:
        """Come under the budget, down to the low-water mark; returns how many chunks left RAM.

        What is also on disk goes first, and of what exists nowhere else only leaves go, through `drop`, which
        takes them out of the store. A parent that becomes a leaf is weighed with the rest.
        """
        if self.tally.bytes <= self.budget:
            return 0

        def ranked(chunk: Chunk) -> tuple[bool, float, ChunkKey, Chunk]:
            return not chunk.on_disk, worth(chunk), chunk.key, chunk

        heap = [ranked(chunk) for chunk in self._chunks.values() if _may_leave(chunk)]
        heapify(heap)
        count = 0
        while heap and self.tally.bytes > self.budget * LOW_WATER:
            chunk = heappop(heap)[-1]
            count += 1
            if chunk.on_disk:
                self.free(chunk)
                continue
            drop(chunk)
            parent = chunk.parent
            if parent and parent.key in self._chunks and not parent.on_disk and _may_leave(parent):
                heappush(heap, ranked(parent))
        return count

    def free_expired(self, now: float) -> int:
        """Give back the RAM of what is on disk and not wanted any more; returns how many chunks left it."""
        idle = [
            chunk for chunk in self._chunks.values() if chunk.on_disk and chunk.expires <= now and not chunk.pins
        ]
        for chunk in idle:
            self.free(chunk)
        return len(idle)

    def free_branch(self, end: Chunk | None, tick: int) -> int:
        """Give back the RAM of the branch that ends in `end`, as far as no lookup has used it since `tick`;
        returns how many chunks left it."""
        count = 0
        chunk = end
        while chunk and not chunk.is_root and chunk.last_used <= tick and not chunk.pins:
            if chunk.on_disk and chunk.payload is not None:
                self.free(chunk)
                count += 1
            chunk = chunk.parent
        return count


def _may_leave(chunk: Chunk) -> bool:
    """RAM, without anything that only it leads to being lost."""
    # Said here and not asked of the chunk: every chunk in RAM is looked at whenever room is made.
    return not chunk.pins and (chunk.on_disk or not (chunk.branches or chunk.is_pinned))


# ── files that no lookup can reach ──


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
        """Returns those whose parent is among `chunks`."""
        return [row for parent, rows in self._below.items() if parent in chunks for row in rows.values()]

    def parents(self, chunks: Container[ChunkKey], *, lost_ones_too: bool) -> list[ChunkKey]:
        """Returns parents of orphans. Without `lost_ones_too` only those neither in `chunks` nor lost."""
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
        """Returns one that waited for its parent, if it did."""
        rows = self._below.get(parent, {})
        row = rows.pop(key, None)
        if row is not None:
            self.bytes -= row.bytes
            if not rows:
                self._forget(parent)
        return row

    def take_all(self, parent: ChunkKey) -> list[ChunkRow]:
        """Returns those that waited for it, which wait no longer."""
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
