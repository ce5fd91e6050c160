"""What the store knows and its index does not yet."""

from __future__ import annotations

from emberkeep.kv.entries import Entry, EntryId
from emberkeep.kv.ghosts import Ghost
from emberkeep.kv.index import Uses
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.tree import Chunk


class News:
    """What the index does not know yet."""

    def __init__(self) -> None:
        self.used: dict[ChunkKey, Chunk] = {}
        self.entries: dict[EntryId, Entry] = {}
        self.forgotten: list[EntryId] = []
        self.ghosts: list[Ghost] = []

    @property
    def is_empty(self) -> bool:
        return not (self.used or self.entries or self.forgotten or self.ghosts)

    @property
    def is_pressing(self) -> bool:
        """Something that people would miss after a crash."""
        return bool(self.entries or self.forgotten or self.ghosts)

    def put_back(self, unsaved: News) -> None:
        """It could not be written down: what came since wins."""
        self.used = {**unsaved.used, **self.used}
        self.entries = {**unsaved.entries, **self.entries}
        self.forgotten = [*unsaved.forgotten, *self.forgotten]
        self.ghosts = [*unsaved.ghosts, *self.ghosts]

    def uses(self) -> list[tuple[ChunkKey, Uses]]:
        chunks = [chunk for chunk in self.used.values() if chunk.on_disk]
        return [(c.key, Uses(c.last_used, c.hits, c.expires)) for c in chunks]
