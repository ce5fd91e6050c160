"""The RAM tier: payloads in memory under a byte budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emberkeep.kv.policy import LOW_WATER
from emberkeep.kv.tree import Chunk, ChunkKey


@dataclass(slots=True)
class Tally:
    """What one tier holds."""

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
        """Come under the budget; returns how many chunks left RAM. What is also on disk goes first, and of what
        exists nowhere else only leaves go, through `drop`, which takes them out of the store."""
        count = 0
        while self.tally.bytes > self.budget and (left := self._shrink_once(worth, drop)):
            count += left
        return count

    def _shrink_once(self, worth: Callable[[Chunk], float], drop: Callable[[Chunk], object]) -> int:
        """Parents may be leaves after it."""
        target = self.budget * LOW_WATER
        unused = [chunk for chunk in self._chunks.values() if not chunk.pins]
        unused.sort(key=lambda chunk: (not chunk.on_disk, worth(chunk)))
        count = 0
        for chunk in unused:
            if self.tally.bytes <= target:
                break
            if chunk.on_disk:
                self.free(chunk)
            elif chunk.is_leaf and not chunk.is_pinned:
                drop(chunk)
            else:
                continue
            count += 1
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
