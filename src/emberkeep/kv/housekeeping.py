"""What the writer's thread does besides writing: say what is worth it, make room on the disk, write down uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from emberkeep.kv import value
from emberkeep.kv.books import LOW_WATER, Books
from emberkeep.kv.chunkfile import most_bytes
from emberkeep.kv.clock import StoreClock
from emberkeep.kv.cold import ColdTier
from emberkeep.kv.counters import StoreCounters
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.news import News
from emberkeep.kv.tree import Chunk
from emberkeep.kv.writes import WriteBudget

log = logging.getLogger("emberkeep.kv")


class Housekeeping:
    """Methods block on disk; `lock`, the store's, is never held meanwhile."""

    def __init__(
        self,
        books: Books,
        lock: threading.Lock,
        cold: ColdTier,
        clock: StoreClock,
        counters: StoreCounters,
        writes: WriteBudget,
        *,
        budget: int,
        about: Mapping[str, Any],
    ) -> None:
        """`budget` is for all stores under the same root together."""
        self._books = books
        self._lock = lock
        self._cold = cold
        self._clock = clock
        self._counters = counters
        self._writes = writes
        self._budget = budget
        self._about = about
        self._other_stores: int | None = None
        """Bytes of other fingerprints' stores; None until looked at."""
        self._unwritten: set[ChunkKey] = set()

    @property
    def unwritten(self) -> set[ChunkKey]:
        """In RAM only, because they were not worth writing when their turn came."""
        return self._unwritten

    def is_worth_it(self, chunk: Chunk, batch: Mapping[ChunkKey, int]) -> bool:
        """Whether to write a chunk. `batch`: what is about to be written with it, in bytes."""
        assert chunk.parent is not None
        with self._lock:
            # A chunk is of no use on disk without those before it.
            reachable = chunk.parent.is_root or chunk.parent.on_disk or chunk.parent.key in batch
            spent = self._writes.spent + sum(batch.values())
            worth_it = reachable and value.worth_writing(chunk, spent, self._writes.limit)
        worth_it = worth_it and self._make_room(most_bytes(chunk) + sum(batch.values()), chunk)
        if not worth_it:
            with self._lock:
                if chunk in self._books:
                    self._unwritten.add(chunk.key)
        return worth_it

    def became_durable(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Enter what was written; what nobody wants any more is removed again."""
        unwanted = []
        with self._lock:
            self._writes.spend(sum(sizes.values()))
            for key, size in sizes.items():
                self._unwritten.discard(key)
                if chunk := self._books.get(key):
                    self._books.became_cold(chunk, size)
                    self._books.news.used[key] = chunk
                else:
                    unwanted.append(key)
        self._cold.remove(unwanted)

    def tidy(self) -> None:
        """Whenever there is nothing to write."""
        self._make_room(0)
        # Uses alone wait for company: while a prompt is evaluated there are new ones all the time.
        if self._books.news.is_pressing:
            self.save_notes()

    def _make_room(self, incoming: int, newcomer: Chunk | None = None) -> bool:
        """Evict until so many bytes more fit into the budget; False when they cannot, or not without giving up
        what is worth more than the `newcomer`.

        While another process evicts, this one trusts it to.
        """
        if self._other_stores is not None and self._fits(incoming):
            return True
        with self._cold.evicting() as alone:
            if not alone:
                return True
            with self._lock:
                lost = self._books.take_orphans()
            self._cold.remove(lost)
            allowed = max(self._budget - incoming - self._books.cold.bytes, 0)
            self._other_stores = self._cold.shrink_other_stores(allowed)
            self._evict(self._budget - incoming - self._other_stores, newcomer)
        return self._fits(incoming)

    def _fits(self, incoming: int) -> bool:
        return self._books.cold.bytes + (self._other_stores or 0) + incoming <= self._budget

    def _evict(self, budget: int, newcomer: Chunk | None) -> None:
        """Nothing while the budget holds; else down to its low-water mark, deepest first."""
        target = budget * LOW_WATER if self._books.cold.bytes > budget else budget
        while True:
            with self._lock:
                now = self._clock.now()
                victims = self._books.shrink_cold(target, now, newcomer)
                self._unwritten.difference_update(chunk.key for chunk in victims)
                expired = sum(chunk.expires <= now for chunk in victims)
                self._counters.expired_evictions += expired
                self._counters.cold_evictions += len(victims) - expired
            if not victims:
                return
            self._cold.remove(chunk.key for chunk in victims)

    def save_notes(self) -> None:
        with self._lock:
            self._books.forget_empty_entries()
            if self._books.news.is_empty:
                return
            news, self._books.news = self._books.news, News()
            uses, clock, (day, written) = news.uses(), self._clock.saved(), self._writes.saved()
        meta = {"clock": clock.seconds, "wall": clock.wall, "write_day": day, "written": written, **self._about}
        try:
            self._cold.save_notes(uses, news.entries.values(), news.forgotten, news.ghosts, meta)
        except OSError as error:
            log.warning("cannot save when chunks were last used: %s", error)
            with self._lock:
                self._books.news.put_back(news)
