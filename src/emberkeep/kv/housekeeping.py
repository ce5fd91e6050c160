"""What the writer's thread does besides writing: say what is worth it, make room on the disk, write down uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from emberkeep.kv.books import LOW_WATER, Books
from emberkeep.kv.chunk_files import ChunkFiles, Found
from emberkeep.kv.chunkfile import most_bytes
from emberkeep.kv.entries import UnsavedChanges
from emberkeep.kv.index import Row
from emberkeep.kv.policy import StoreClock, StoreCounters, WriteBudget, worth_writing
from emberkeep.kv.tree import Chunk, ChunkKey

log = logging.getLogger("emberkeep.kv")

MOST_FILES = 250_000
"""Chunks on disk, however small they are: each takes 1.5 kB of RAM, and 20 µs when the store is opened."""
_RETRY_S = 10.0
"""How long files that could not be removed or read are left alone."""
_MOST_FAILURES = 16
"""Of removals one after the other: a disk that refuses these refuses the others."""


class Housekeeping:
    """Methods block on disk; `lock`, the store's, is never held meanwhile."""

    def __init__(
        self,
        books: Books,
        lock: threading.Lock,
        cold: ChunkFiles,
        clock: StoreClock,
        counters: StoreCounters,
        writes: WriteBudget,
        *,
        budget: int,
        about: Mapping[str, Any],
        notice: Callable[[], None],
        refresh: Callable[[], None],
        adopt: Callable[[Callable[[], list[Row]]], None],
    ) -> None:
        """`budget` is for all stores under the same root together. `notice`: whom any process has forgotten;
        `refresh`: what others have stored; `adopt` enters the chunks that a function finds on disk."""
        self._books = books
        self._lock = lock
        self._cold = cold
        self._clock = clock
        self._counters = counters
        self._writes = writes
        self._budget = budget
        self._about = about
        self._notice = notice
        self._refresh = refresh
        self._adopt = adopt
        self._other_stores: int | None = None
        """Bytes of other fingerprints' stores; None until looked at."""
        self._removing = threading.Lock()
        self._look_again_at = 0.0
        self._unreadable: set[ChunkKey] = set()
        """Orphans that could not be read, until `_look_again_at`."""

    def is_worth_it(self, chunk: Chunk, batch: Mapping[ChunkKey, int]) -> bool:
        """Whether to write a chunk. `batch`: what is about to be written with it, in bytes."""
        assert chunk.parent is not None
        with self._lock:
            # A chunk is of no use on disk without those before it.
            reachable = chunk.parent.is_root or chunk.parent.on_disk or chunk.parent.key in batch
            spent = self._writes.spent + sum(batch.values())
            worth_it = reachable and worth_writing(chunk, spent, self._writes.limit)
        worth_it = (
            worth_it
            and self._is_free(chunk.key)
            and self._make_room(most_bytes(chunk) + sum(batch.values()), chunk)
        )
        if not worth_it:
            with self._lock:
                if chunk in self._books:
                    self._books.unwritten.add(chunk.key)
        return worth_it

    def is_wanted(self, key: ChunkKey) -> bool:
        """Whether a file that is written should come into its place, where nobody may be forgotten meanwhile.

        Raises OSError.
        """
        self._notice()
        with self._lock:
            return self._books.get(key) is not None and key not in self._books.leaving

    def became_durable(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Enter what was written; what nobody wants any more is removed again."""
        with self._lock:
            self._writes.spend(sum(sizes.values()))
            for key, size in sizes.items():
                self._books.unwritten.discard(key)
                if chunk := self._books.get(key):
                    self._books.became_cold(chunk, size)
                    self._books.news.used[key] = chunk
                else:
                    self._books.leave(key, size)
        self.remove_leaving()

    def tidy(self) -> None:
        """Whenever there is nothing to write."""
        self._notice()
        self.remove_leaving()
        self._look_at_orphans()
        self._look_at_strays()
        self._make_room(0)
        # Uses alone wait for company: while a prompt is evaluated there are new ones all the time.
        if self._books.news.is_pressing:
            self.save_notes()

    def remove_leaving(self) -> None:
        """Remove the files that the books have let go of. What cannot be removed counts, and is tried again."""
        if not self._books.leaving:
            return
        with self._removing:  # a key may come back between two who remove it
            with self._lock:
                keys = list(self._books.leaving)
            failures = 0
            for begin in range(0, len(keys), _MOST_FAILURES):
                some = keys[begin : begin + _MOST_FAILURES]
                gone, error = self._cold.remove(some)
                with self._lock:
                    self._books.left(gone)
                if error is not None:
                    log.warning("a file of the store cannot be removed: %s", error)
                    failures += len(some) - len(gone)
                if failures >= _MOST_FAILURES:
                    return

    def _is_free(self, key: ChunkKey) -> bool:
        """No old file stands in its place."""
        if key in self._books.leaving:
            self.remove_leaving()
        return key not in self._books.leaving

    def _look_at_orphans(self) -> None:
        """Chunks below one that was damaged and computed again: are they any better? Parents come first."""
        while rows := self._orphans_to_look_at():
            for row in rows:
                found = self._cold.look_at(row)
                self._counters.damaged_chunks += found is Found.DAMAGED
                self._counters.vanished_chunks += found is Found.GONE
                if found is Found.UNREADABLE:
                    self._unreadable.add(row.key)
                    continue
                with self._lock:
                    self._books.was_looked_at(row, is_whole=found is Found.WHOLE)

    def _orphans_to_look_at(self) -> list[Row]:
        with self._lock:
            return [row for row in self._books.reachable_orphans() if row.key not in self._unreadable]

    def _look_at_strays(self) -> None:
        """Try again what failed in a way that may pass."""
        if monotonic() < self._look_again_at:
            return
        self._look_again_at = monotonic() + _RETRY_S
        self._unreadable.clear()
        if owed := [whose for _, whose in self._cold.forgotten.owed]:
            with self._lock:
                for whose in owed:
                    self._books.forget(whose)  # what has come back since goes with the rest
            self._cold.finish_forgetting()
            self.remove_leaving()
        self._adopt(self._strays)

    def _strays(self) -> list[Row]:
        rows, damaged = self._cold.adopt_strays()
        self._counters.damaged_chunks += damaged
        return rows

    def _make_room(self, incoming: int, newcomer: Chunk | None = None) -> bool:
        """Evict until so many bytes more fit into the budget; False when they cannot, or not without giving up
        what is worth more than the `newcomer`.

        While another process evicts, this one trusts it to.
        """
        if self._other_stores is not None and self._fits(incoming):
            return True
        self._refresh()
        with self._cold.evicting() as alone:
            if not alone:
                return True
            self._cold.look_around()
            self._remove_orphans(lost_ones_too=False)
            own = self._books.disk_bytes + self._cold.side_bytes
            self._other_stores = self._cold.shrink_other_stores(max(self._budget - incoming - own, 0))
            if not self._fits(incoming):
                self._remove_orphans(lost_ones_too=True)
                self._cold.drop_strays()
            self._evict(incoming, newcomer)
        return self._fits(incoming)

    def _remove_orphans(self, *, lost_ones_too: bool) -> None:
        with self._lock:
            self._books.take_orphans(lost_ones_too=lost_ones_too)
        self.remove_leaving()

    def _fits(self, incoming: int) -> bool:
        has_place = self._books.cold.chunks < MOST_FILES
        return has_place and self._beside + self._books.cold.bytes + incoming <= self._budget

    @property
    def _beside(self) -> int:
        """Bytes that evicting chunks cannot make free."""
        own = self._books.disk_bytes - self._books.cold.bytes + self._cold.side_bytes
        return own + (self._other_stores or 0)

    def _evict(self, incoming: int, newcomer: Chunk | None) -> None:
        """Nothing while the budget holds; else down to its low-water mark, deepest first."""
        stuck = len(self._books.leaving)
        while not self._fits(incoming):
            with self._lock:
                now = self._clock.now()
                budget = self._budget - incoming - self._beside
                target = budget * LOW_WATER if self._books.cold.bytes > budget else budget
                most = int(MOST_FILES * LOW_WATER) if self._books.cold.chunks >= MOST_FILES else MOST_FILES
                victims = self._books.shrink_cold(target, now, newcomer, most_chunks=most)
                expired = sum(chunk.expires <= now for chunk in victims)
                self._counters.expired_evictions += expired
                self._counters.cold_evictions += len(victims) - expired
            if not victims:
                return
            self.remove_leaving()
            if len(self._books.leaving) > stuck:
                return  # a disk that gives nothing back: evicting more would only lose it

    def save_notes(self) -> None:
        """Never raises."""
        try:
            with self._cold.forgotten.held():
                self._notice()
                self._save_notes()
        except OSError as error:
            log.warning("cannot save when chunks were last used: %s", error)

    def _save_notes(self) -> None:
        """Only while nobody can begin to forget."""
        with self._lock:
            self._books.forget_empty_entries()
            if self._books.news.is_empty:
                return
            news, self._books.news = self._books.news, UnsavedChanges()
            uses, clock, (day, written) = news.uses(), self._clock.saved(), self._writes.saved()
        meta = {"clock": clock.seconds, "wall": clock.wall, "write_day": day, "written": written, **self._about}
        try:
            self._cold.index.save_notes(news, uses, meta)
        except BaseException:
            with self._lock:
                self._books.put_back(news)
            raise
