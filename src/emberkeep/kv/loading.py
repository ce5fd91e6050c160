"""Chunks on their way from disk into RAM: each is read once, however many requests wait for it."""

from __future__ import annotations

import logging

from emberkeep.kv.disk.tier import DiskTier
from emberkeep.kv.disk.transfers import Fetch, Fetched, FetchState
from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.ledger import Ledger, Transact
from emberkeep.kv.policy import CostModel, StoreCounters
from emberkeep.kv.tree import Chunk

log = logging.getLogger("emberkeep.kv")


class Loading:
    """Reads that were begun and have not ended."""

    def __init__(self, transact: Transact, counters: StoreCounters, costs: CostModel) -> None:
        self.disk: DiskTier | None = None
        """Where chunks are read from; set once, before anything is read."""
        self._transact = transact
        self._counters = counters
        self._costs = costs
        self._fetches: dict[ChunkKey, Fetch] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._fetches

    def begin(self, chunk: Chunk) -> Fetch:
        """The read of a chunk, begun where it was not yet. Called with the store's lock held."""
        fetch = self._fetches.get(chunk.key)
        if fetch is None:
            assert self.disk is not None
            fetch = Fetch(chunk)
            self.disk.load(fetch)
            self._fetches[chunk.key] = fetch  # `complete` waits for the lock
        return fetch

    def complete(self, fetch: Fetch, result: Fetched) -> None:
        """Take in what was read, and tell the requests that wait for it whatever goes wrong: they notice a payload
        that is not there. Called on a reader's thread."""
        try:
            self._take_in(fetch.chunk, result)
        except Exception:
            log.exception("cannot take in %s.kv", fetch.chunk.key.hex())
        fetch.state = result.state
        for notify in fetch.waiting:
            notify()

    def _take_in(self, chunk: Chunk, result: Fetched) -> None:
        below = self._transact(lambda ledger: self._enter(ledger, chunk, result))
        if result.payload is not None:
            size, milliseconds = len(result.payload), 1e3 * result.seconds
            log.debug("cold -> warm: %d tokens, %d bytes in %.1f ms", len(chunk.tokens), size, milliseconds)
        if below and self.disk:
            missing = self.disk.files.missing(below)
            self._transact(lambda ledger: ledger.orphans.drop(missing))

    def _enter(self, ledger: Ledger, chunk: Chunk, result: Fetched) -> list[ChunkKey]:
        """Enter what was read; where it was nothing, returns the chunks below, which are out of reach now."""
        del self._fetches[chunk.key]
        if result.payload is not None:
            self._counters.read(len(result.payload), result.seconds)
            self._costs.read.measure(len(result.payload), result.seconds)
            ledger.enter_payload(chunk, result.payload)
            ledger.shrink_ram()
            return []
        self._counters.damaged_chunks += result.state is FetchState.DAMAGED
        self._counters.vanished_chunks += result.state is FetchState.GONE
        self._counters.unreadable_chunks += result.state is FetchState.UNREADABLE
        return [] if result.state is FetchState.UNREADABLE else ledger.lose(chunk, is_there=result.is_there)
