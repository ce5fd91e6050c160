"""What a lookup finds."""

from __future__ import annotations

from dataclasses import dataclass

from emberkeep.kv.tree import Chunk, Cursor, Segment


@dataclass(frozen=True, slots=True)
class Peek:
    """What a lookup would find."""

    cursor: Cursor
    tokens: int
    """How many could be reused."""
    warm_tokens: int
    """How many of these are in RAM."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt. Its chunks are pinned until `KvStore.release`."""

    cursor: Cursor
    segments: tuple[Segment, ...]
    snapshot: Chunk | None = None
    """Asked for snapshots: the one that was taken where `segments` end; without one there are no segments."""

    @property
    def tokens(self) -> int:
        return self.cursor.position

    @property
    def chunks(self) -> list[Chunk]:
        """Everything that it uses."""
        chunks = [segment.chunk for segment in self.segments]
        return [*chunks, self.snapshot] if self.snapshot else chunks
