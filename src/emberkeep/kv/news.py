"""What the store knows and its index does not yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from emberkeep.kv.entries import Entry, EntryId
from emberkeep.kv.ghosts import LIMIT, Ghost
from emberkeep.kv.index import Uses
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.tree import Chunk
from emberkeep.types import Lineage


class News:
    """What the index does not know yet. Bounded, also where there is no index, or one that takes nothing: of what
    is left out, the next opening finds that its chunks are gone."""

    def __init__(self) -> None:
        self.used: dict[ChunkKey, Chunk] = {}
        """Of chunks that are in the store."""
        self.entries: dict[EntryId, Entry] = {}
        """That are in the store."""
        self.forgotten: deque[EntryId] = deque(maxlen=LIMIT)
        self.ghosts: deque[Ghost] = deque(maxlen=LIMIT)

    @property
    def is_empty(self) -> bool:
        return not (self.used or self.entries or self.forgotten or self.ghosts)

    @property
    def is_pressing(self) -> bool:
        """Something that people would miss after a crash."""
        return bool(self.entries or self.forgotten or self.ghosts)

    def forget_entry(self, id_: EntryId) -> None:
        self.entries.pop(id_, None)
        self.forgotten.append(id_)

    def forget_ghosts(self, lineages: Container[Lineage]) -> None:
        self.ghosts = deque((ghost for ghost in self.ghosts if ghost.lineage not in lineages), LIMIT)

    def put_back(self, unsaved: News, entries: Container[EntryId], chunks: Container[ChunkKey]) -> None:
        """It could not be written down: what came since wins, and of what has gone meanwhile nothing is needed.

        `entries` and `chunks`: that are in the store.
        """
        self.used = {**{key: chunk for key, chunk in unsaved.used.items() if key in chunks}, **self.used}
        known = {id_: entry for id_, entry in unsaved.entries.items() if id_ in entries}
        self.entries = {**known, **self.entries}
        self.forgotten = deque([*unsaved.forgotten, *self.forgotten], LIMIT)
        self.ghosts = deque([*unsaved.ghosts, *self.ghosts], LIMIT)

    def uses(self) -> list[tuple[ChunkKey, Uses]]:
        chunks = [chunk for chunk in self.used.values() if chunk.on_disk]
        return [(c.key, Uses(c.last_used, c.hits, c.expires)) for c in chunks]
