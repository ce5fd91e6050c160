"""The store's books: which chunks exist, where their bytes are, and what has to go when room is short.

No locks and no I/O: `KvStore` calls everything here with its lock held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emberkeep.kv import value
from emberkeep.kv.index import Row
from emberkeep.kv.keys import ROOT, ChunkKey
from emberkeep.kv.tree import Chunk, new_root

LOW_WATER = 0.95
"""Eviction goes down to this share of a budget, so that it does not run again for every chunk."""


class Books:
    def __init__(self) -> None:
        self.clock = 0
        """Ticks once per lookup: the order of uses, whatever the machine's clock does."""
        self.warm_bytes = 0
        self.cold_bytes = 0
        self._roots: dict[str, Chunk] = {}
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._orphans: dict[ChunkKey, list[Row]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def __contains__(self, chunk: Chunk) -> bool:
        """By identity: a chunk that was dropped and stored anew is another one under the same key."""
        return chunk.is_root or self._chunks.get(chunk.key) is chunk

    def get(self, key: ChunkKey) -> Chunk | None:
        return self._chunks.get(key)

    def root(self, namespace: str) -> Chunk:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = new_root(namespace)
        return root

    # ── coming ──

    def add(self, chunk: Chunk, payload: memoryview) -> None:
        """Enter a chunk that has just been computed; it is in RAM only."""
        chunk.payload = payload
        chunk.last_used = self.clock
        self.warm_bytes += len(payload)
        self._enter(chunk)

    def adopt(self, rows: Iterable[Row]) -> None:
        """Enter chunks that are on disk; those whose parent is not known yet wait for it."""
        todo = list(rows)
        while todo:
            row = todo.pop()
            d = row.description
            parent = self.root(d.namespace) if d.parent == ROOT else self._chunks.get(d.parent)
            if parent is None:
                self._orphans.setdefault(d.parent, []).append(row)
                continue
            if d.key not in self._chunks and d.take <= len(parent.tokens):
                self._hang(row, parent)
            todo += self._orphans.pop(d.key, ())

    def take_orphans(self) -> list[ChunkKey]:
        """Chunks on disk that no lookup can reach because their parent was lost; they are forgotten here."""
        lost = [row.description.key for rows in self._orphans.values() for row in rows]
        self._orphans.clear()
        return lost

    def became_warm(self, chunk: Chunk, payload: memoryview) -> None:
        if chunk.payload is None:
            chunk.payload = payload
            self.warm_bytes += len(payload) if chunk in self else 0

    def became_cold(self, chunk: Chunk, size: int) -> None:
        if not chunk.on_disk:
            chunk.on_disk = True
            chunk.bytes = size
            self.cold_bytes += size

    # ── going ──

    def drop(self, chunk: Chunk) -> None:
        """Take a chunk and everything below it out of the tree and the books."""
        chunk.detach()
        todo = [chunk]
        while todo:
            gone = todo.pop()
            todo += gone.children()
            if self._chunks.pop(gone.key, None) is None:
                continue
            self._cool(gone)
            if gone.on_disk:
                self.cold_bytes -= gone.bytes

    def forget(self, namespace: str) -> list[ChunkKey]:
        """Drop everything of a namespace; returns what was there."""
        gone = [chunk for chunk in self._chunks.values() if chunk.namespace == namespace]
        for chunk in gone:
            self.drop(chunk)
        # The root stays: sequences that are running build on it.
        lost = [row for rows in self._orphans.values() for row in rows if row.description.namespace == namespace]
        for row in lost:
            self._orphans[row.description.parent].remove(row)
        return [chunk.key for chunk in gone] + [row.description.key for row in lost]

    def shrink_warm(self, budget: int) -> int:
        """Bring RAM under `budget`; returns how many chunks left it. What is also on disk goes first, and of what
        exists nowhere else only leaves go."""
        if self.warm_bytes <= budget:
            return 0
        warm = [c for c in self if c.payload is not None and not c.pins]
        warm.sort(key=lambda c: (not c.on_disk, value.worth(c, self.clock)))
        count = 0
        for chunk in warm:
            if self.warm_bytes <= budget * LOW_WATER:
                break
            if chunk.on_disk:
                self._cool(chunk)
            elif chunk.is_leaf:
                self.drop(chunk)
            else:
                continue
            count += 1
        return count

    def shrink_cold(self, target: float) -> list[Chunk]:
        """Drop unpinned leaves, least worth first, down to `target` bytes or until no leaf is left.

        Returns them; their parents may be leaves now, so call it until it returns nothing.
        """
        victims: list[Chunk] = []
        if self.cold_bytes <= target:
            return victims
        leaves = [c for c in self if c.on_disk and c.is_leaf and not c.pins]
        for chunk in sorted(leaves, key=lambda c: value.worth(c, self.clock)):
            if self.cold_bytes <= target:
                break
            victims.append(chunk)
            self.drop(chunk)
        return victims

    def _enter(self, chunk: Chunk) -> None:
        self._chunks[chunk.key] = chunk
        chunk.attach()

    def _cool(self, chunk: Chunk) -> None:
        if chunk.payload is not None:
            self.warm_bytes -= len(chunk.payload)
            chunk.payload = None

    def _hang(self, row: Row, parent: Chunk) -> None:
        d = row.description
        chunk = Chunk(
            key=d.key,
            parent=parent,
            take=d.take,
            tokens=d.tokens,
            sampled=d.sampled,
            given=d.given,
            size=row.bytes,
        )
        chunk.hits, chunk.last_used = row.hits, row.last_used
        self.clock = max(self.clock, row.last_used)
        self.became_cold(chunk, row.bytes)
        self._enter(chunk)
