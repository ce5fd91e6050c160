"""What the store remembers of a chunk that is gone: why it went, and how often it had been reused.

A ghost lets a miss be explained ("evicted", "expired"), and lets a chunk that comes back keep its history: one
that is evicted and wanted again and again is worth more than its last stay alone would say.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable

from emberkeep.kv.keys import ChunkKey, chunk_key, token_bytes
from emberkeep.kv.tree import Chunk, Cursor
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass

GHOST_LIMIT = 50_000
"""About 100 bytes each."""


_OPENING = 16
"""Tokens by which a chunk that a prompt does not fill is recognised."""


@dataclass(frozen=True, slots=True)
class Ghost:
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
