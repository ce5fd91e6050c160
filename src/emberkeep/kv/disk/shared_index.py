"""The index of a folder that several processes have open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from emberkeep.kv.disk.chunkfile import Description
from emberkeep.kv.disk.index import ChunkRow, Index, LaterUses, Notes, Unreadable
from emberkeep.kv.entries import EntryId, UnsavedChanges, Uses
from emberkeep.kv.keys import ChunkKey

log = logging.getLogger("emberkeep.kv")
T = TypeVar("T")

_MOST_UNTOLD = 4096
"""Changes that it has refused and is told again; of what is left out the files tell at the next opening."""


class SharedIndex:
    """The index of a folder that several processes have open, for all threads of one of them. Blocks on disk.

    Of what other processes have added it is asked on a connection of its own, which never waits for a write. What
    SQLite refuses it is told again with the next change.
    """

    def __init__(self, path: Path, fingerprint: bytes) -> None:
        """Raises OSError."""
        self._path = path
        self._fingerprint = fingerprint
        self._index = Index(path, fingerprint)
        self._lock = threading.Lock()
        self._untold_rows: dict[ChunkKey, tuple[Description, int, float]] = {}
        self._untold_removals: set[ChunkKey] = set()
        self._following = self._index
        self._following_lock = threading.Lock()
        self._seen_seq = 0
        self._seen_version = -1

    def follow(self, rows: Iterable[ChunkRow]) -> None:
        """`rows` are known: from here on `new_rows` tells what is added. Raises OSError."""
        self._following = Index(self._path, self._fingerprint)
        self._seen_seq = max((row.seq for row in rows), default=0)
        self._seen_version = self._following.version()

    def new_rows(self, *, everything: bool = False) -> list[ChunkRow]:
        """What any process added since the last call. Raises OSError."""
        with self._following_lock:
            version = self._following.version()
            if version == self._seen_version and not everything:
                return []
            rows = self._following.rows_after(0 if everything else self._seen_seq)
            self._seen_version = version
            self._seen_seq = max((row.seq for row in rows), default=self._seen_seq)
            return rows

    def rows_after(self, seq: int) -> list[ChunkRow]:
        """Raises Unreadable, OSError."""
        return self._index.rows_after(seq)

    def start_over(self) -> None:
        """Replace the database by an empty one. Raises OSError."""
        self._index.start_over()

    def add(self, added: Iterable[tuple[Description, int]], expires: Mapping[ChunkKey, float]) -> None:
        """Only while no process can begin to forget. Never raises: the index is a cache, and what it refuses now
        it is told with the next change. `expires`: as far as it is known."""
        with self._lock:
            self._untold_rows |= {one.key: (one, size, expires.get(one.key, 0.0)) for one, size in added}
            try:
                self._index.remove(self._untold_removals)
                self._untold_removals.clear()
                self._index.add(self._untold_rows.values())
                self._untold_rows.clear()
            except OSError as error:
                log.warning("the index of the stored state is behind: %s", error)
                self._untold_rows = dict(list(self._untold_rows.items())[-_MOST_UNTOLD:])

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Never raises, as above."""
        with self._lock:
            for key in keys:
                self._untold_rows.pop(key, None)
                self._untold_removals.add(key)
            try:
                self._index.remove(self._untold_removals)
                self._untold_removals.clear()
            except OSError as error:
                log.warning("the index of the stored state is behind: %s", error)
                self._untold_removals = set(list(self._untold_removals)[-_MOST_UNTOLD:])

    def forget_untold(self, whose: Container[str]) -> None:
        """What the index has not been told of them, it never is."""
        with self._lock:
            kept = {key: row for key, row in self._untold_rows.items() if row[0].namespace not in whose}
            self._untold_rows = kept

    def erase(self, whose: Container[str]) -> None:
        """Leave nothing of them, neither here nor in the file. Raises OSError."""
        self.forget_untold(whose)
        with self._lock:
            self._index.erase(whose)

    def erase_traces(self) -> None:
        """Leave nothing in the file of rows that were removed, and no ghost. Raises OSError."""
        with self._lock:
            self._index.remove(self._untold_removals)
            self._untold_removals.clear()
            self._index.erase_traces()

    def later_uses(self, keys: Iterable[ChunkKey], ids: Iterable[EntryId]) -> LaterUses:
        """Looks up these chunks and entries. Raises OSError."""
        with self._lock:
            return self._index.later_uses(keys, ids)

    def notes(self) -> Notes:
        """Raises OSError."""
        try:
            with self._lock:
                return Notes(self._index.entries(), self._index.ghosts(), self._index.meta())
        except Unreadable as reason:
            log.warning("the store's notes about its chunks are lost: %s", reason)
            return Notes([], [], {})

    def save_notes(
        self, changes: UnsavedChanges, uses: Iterable[tuple[ChunkKey, Uses]], meta: Mapping[str, Any]
    ) -> None:
        """Raises OSError."""
        with self._lock:
            self._index.touch(uses)
            self._index.remove_entries(changes.forgotten)
            self._index.save_entries(changes.entries.values(), changes.pins)
            self._index.add_ghosts(changes.ghosts)
            self._index.save_meta(meta)

    def close(self) -> None:
        with self._following_lock, self._lock:
            self._following.close()
            self._index.close()
