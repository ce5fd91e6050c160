"""State on its way between the store and a sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import field, replace

from emberkeep.engine.base import KvExport, Payload
from emberkeep.kv.content import Moved
from emberkeep.kv.disk.transfers import Fetch, FetchState
from emberkeep.kv.keys import Span
from emberkeep.kv.lookups import Match
from emberkeep.kv.tree import Chunk, Cursor, Made
from emberkeep.token_arrays import TokenArray
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A stored chunk on its way into the sequence, of which the positions up to `end` are wanted."""

    chunk: Chunk
    end: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class NewChunk:
    """What the store is told about a chunk besides its bytes."""

    tokens: TokenArray
    sampled: tuple[Span, ...]
    made: Made
    is_fork: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Chunks on their way into the store, as they were when they were exported: the sequence may have gone on, and
    even have become another, since then."""

    start: Cursor
    chunks: list[NewChunk]
    exports: list[KvExport]
    around: tuple[NewChunk, KvExport] | None = None
    """The block that the first of them lies in, for other hosts."""

    @property
    def is_done(self) -> bool:
        """`payloads` does not block."""
        around = [self.around[1]] if self.around else []
        return all(export.is_done for export in [*self.exports, *around])

    def payloads(self) -> list[Payload]:
        """One for each chunk. Blocks until they are there. Raises EngineError."""
        return [payload for export in self.exports for payload in export.payloads()]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """State of another place, for [start, end) of the sequence."""

    start: int
    end: int
    chunk: Chunk
    source: int
    """The position in its own sequence that goes to `start`."""
    fetch: Fetch

    def part(self, start: int, end: int) -> StoredPiece:
        return replace(self, start=start, end=end, source=self.source + start - self.start)


@dataclass(slots=True)
class Arrivals:
    """What is on its way into one sequence, and what is pinned for it."""

    match: Match | None = None
    loads: deque[Load] = field(default_factory=deque)
    from_disk: frozenset[bytes] = frozenset()
    """Keys of what was not in RAM."""
    moved: list[Moved] = field(default_factory=list)
    """Pinned for the sake of pieces from other places."""
    one_by_one: bool = False
    """The engine has refused several pieces together."""
    patience_ends: float = float("inf")

    def take_pins(self) -> list[Match | Moved]:
        """Nothing is on its way any more; returns what was pinned."""
        pinned: list[Match | Moved] = [*self.moved]
        pinned += [self.match] if self.match else []
        self.loads.clear()
        self.match, self.moved = None, []
        return pinned


def take_together(loads: deque[Load]) -> list[Load]:
    """The first, and what follows it without a gap and is there too."""
    together = [loads.popleft()]
    while loads and _follows(loads[0], together[-1]):
        together.append(loads.popleft())
    return together


def _follows(load: Load, before: Load) -> bool:
    is_there = load.fetch.state is before.fetch.state is FetchState.READY
    is_range = not load.chunk.is_snapshot and not before.chunk.is_snapshot
    return is_there and is_range and load.chunk.start == before.end == before.chunk.end
