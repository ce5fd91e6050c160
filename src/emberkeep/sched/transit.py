"""State on its way between the store and a sequence."""

from __future__ import annotations

from dataclasses import replace

from emberkeep.engine.base import KvExport, Payload
from emberkeep.kv.disk.transfers import Fetch
from emberkeep.kv.tree import Chunk, Cursor, Made, Span
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
