"""Where chunks are besides the tree: in RAM, in files that no lookup can reach, and gone but remembered."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from emberkeep.kv.policy import LOW_WATER
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, Made, Span, chunk_key, token_bytes
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass


class ChunkRow(NamedTuple):
    """A chunk on disk. A tuple, because opening a store makes a hundred thousand."""

    seq: int
    key: ChunkKey
    namespace: str
    parent: ChunkKey
    take: int
    start: int
    tokens: TokenArray
    sampled: tuple[Span, ...]
    made: Made
    bytes: int
    last_used: int
    hits: int
    expires: float


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
    """Files on disk by the parent without which no lookup can reach them. It may well be computed again."""

    def __init__(self) -> None:
        self.bytes = 0
        self._below: dict[ChunkKey, dict[ChunkKey, ChunkRow]] = {}

    def __iter__(self) -> Iterator[ChunkRow]:
        return (row for rows in self._below.values() for row in rows.values())

    def below(self, chunks: Container[ChunkKey]) -> list[ChunkRow]:
        """Returns those whose parent is among `chunks`."""
        return [row for parent, rows in self._below.items() if parent in chunks for row in rows.values()]

    def add(self, row: ChunkRow) -> None:
        rows = self._below.setdefault(row.parent, {})
        if row.key not in rows:
            rows[row.key] = row
            self.bytes += row.bytes

    def take(self, parent: ChunkKey, key: ChunkKey) -> ChunkRow | None:
        """Returns one that waited for its parent, if it did; it waits no longer."""
        rows = self._below.get(parent, {})
        row = rows.pop(key, None)
        if row is not None:
            self.bytes -= row.bytes
            if not rows:
                del self._below[parent]
        return row

    def take_all(self, parent: ChunkKey) -> list[ChunkRow]:
        """Returns those that waited for it, which wait no longer."""
        rows = self._below.pop(parent, {})
        self.bytes -= sum(row.bytes for row in rows.values())
        return list(rows.values())

    def drop(self, missing: Container[ChunkKey]) -> None:
        """Their files are not there either."""
        for row in [row for row in self if row.key in missing]:
            self.take(row.parent, row.key)


# ── what the store remembers of a chunk that is gone ──

GHOST_LIMIT = 50_000
"""About 100 bytes each."""


_OPENING = 16
"""Tokens by which a chunk that a prompt does not fill is recognised."""


class Ghost(NamedTuple):
    """Explains a miss, and lets a chunk that comes back keep its history: one that is evicted and wanted again and
    again is worth more than its last stay alone would say."""

    key: ChunkKey
    lineage: Lineage
    parent: ChunkKey
    take: int
    length: int
    opening: bytes
    """Hash of its first tokens: which they were must not be known any more."""
    reason: MissReason
    hits: int
    last_used: int
    was_written: bool


def ghost_of(chunk: Chunk, reason: MissReason) -> Ghost:
    assert chunk.parent is not None
    return Ghost(
        key=chunk.key,
        lineage=chunk.lineage,
        parent=chunk.parent.key,
        take=chunk.take,
        length=len(chunk.tokens),
        opening=_opening(chunk.tokens),
        reason=reason,
        hits=chunk.hits,
        last_used=chunk.last_used,
        was_written=chunk.on_disk or chunk.was_written,
    )


class Ghosts:
    """The latest `limit` of them. No locks: the store has one."""

    def __init__(self, limit: int = GHOST_LIMIT) -> None:
        self._limit = limit
        self._by_key: OrderedDict[ChunkKey, Ghost] = OrderedDict()
        self._below: dict[tuple[ChunkKey, int], set[ChunkKey]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, ghosts: Iterable[Ghost]) -> None:
        for ghost in ghosts:
            self.take(ghost.key)
            self._by_key[ghost.key] = ghost
            self._below.setdefault(_place(ghost), set()).add(ghost.key)
        while len(self._by_key) > self._limit:
            self.take(next(iter(self._by_key)))

    def take(self, key: ChunkKey) -> Ghost | None:
        """Forget a chunk, because it is back; returns what was known."""
        ghost = self._by_key.pop(key, None)
        if ghost is not None:
            siblings = self._below[_place(ghost)]
            siblings.discard(key)
            if not siblings:
                del self._below[_place(ghost)]
        return ghost

    def forget(self, lineages: Container[Lineage]) -> None:
        for key in [key for key, ghost in self._by_key.items() if ghost.lineage in lineages]:
            self.take(key)

    def lineages(self) -> set[Lineage]:
        return {ghost.lineage for ghost in self._by_key.values()}

    def after(self, fingerprint: bytes, cursor: Cursor, tokens: TokenArray) -> Ghost | None:
        """The longest chunk that went on from `cursor` with what `tokens` (a whole prompt) has there."""
        below = [self._by_key[key] for key in self._below.get((cursor.chunk.key, cursor.used), ())]
        seen = [ghost for ghost in below if cursor.lineage.sees(ghost.lineage)]
        rest = tokens[cursor.position :]
        known = sorted(seen, key=lambda ghost: -ghost.length)
        return next((ghost for ghost in known if _went_on_with(ghost, fingerprint, rest)), None)


def _went_on_with(ghost: Ghost, fingerprint: bytes, rest: TokenArray) -> bool:
    if not 0 < ghost.length <= len(rest):
        # It was longer than the prompt, which therefore cannot be compared with all of it.
        return ghost.length >= _OPENING <= len(rest) and _opening(rest) == ghost.opening
    part = rest[: ghost.length]
    return chunk_key(fingerprint, ghost.lineage, ghost.parent, ghost.take, part) == ghost.key


def _opening(tokens: TokenArray) -> bytes:
    return hashlib.blake2b(token_bytes(tokens[:_OPENING]), digest_size=8).digest()


def _place(ghost: Ghost) -> tuple[ChunkKey, int]:
    return ghost.parent, ghost.take
