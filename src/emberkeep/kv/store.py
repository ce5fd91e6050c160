"""The KV store: the tree, the warm and the cold tier behind it, and the threads that move bytes.

Lookups and inserts are tree work under one short lock; no lock is ever held over I/O. Reads and writes run on
the store's own threads. Failing disks make the store smaller, never a request fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from emberkeep.kv.books import LOW_WATER, Books
from emberkeep.kv.cold import ColdTier
from emberkeep.kv.cost import CostModel
from emberkeep.kv.fetch import Fetch, Fetched, FetchState, Reader
from emberkeep.kv.keys import ChunkKey, TokenArray, chunk_key
from emberkeep.kv.replay import Replayed, spelled_chunks, stored_spelling
from emberkeep.kv.tree import Chunk, Cursor, Segment, Span, common_prefix, descend, path_to
from emberkeep.kv.writer import Writer

log = logging.getLogger("emberkeep.kv")

CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt. Its chunks are pinned until `KvStore.release`."""

    cursor: Cursor
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return self.cursor.position


@dataclass(slots=True)
class StoreCounters:
    lookups: int = 0
    inserted_chunks: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged_chunks: int = 0
    vanished_chunks: int = 0
    warm_evictions: int = 0
    cold_evictions: int = 0


class KvStore:
    """`cold` may be None: then everything lives in RAM only. Safe to use from any thread."""

    def __init__(self, fingerprint: bytes, *, warm_budget: int, cold: ColdTier | None, cold_budget: int) -> None:
        self.fingerprint = fingerprint
        self.costs = CostModel()
        self.counters = StoreCounters()
        self._cold = cold
        self._warm_budget = warm_budget
        self._cold_budget = cold_budget
        self._other_stores: int | None = None
        """Bytes of other fingerprints' stores; None until looked at."""
        self._lock = threading.Lock()
        self._books = Books()
        self._fetches: dict[ChunkKey, Fetch] = {}
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        if cold is not None:
            rows, damaged = cold.open_rows()
            self._books.adopt(rows)
            self.counters.damaged_chunks += damaged
            self._reader = Reader(
                cold,
                fingerprint,
                typical_size=max((row.bytes for row in rows), default=0),
                ready_bytes=warm_budget // 16,
                on_done=self._fetched,
            )
            self._writer = Writer(cold, fingerprint, on_durable=self._became_durable, on_idle=self._tend_disk)

    # ── lookup ──

    def match(self, namespace: str, tokens: TokenArray) -> Match:
        """The longest verified prefix of `tokens`. Never blocks on disk."""
        with self._lock:
            self._books.clock += 1
            self.counters.lookups += 1
            cursor = descend(Cursor(self._books.root(namespace), 0), tokens)
            segments = path_to(cursor)
            for segment in segments:
                segment.chunk.pins += 1
                segment.chunk.hits += 1
                segment.chunk.last_used = self._books.clock
            return Match(cursor, segments)

    def release(self, match: Match) -> None:
        """Unpin. Must be called exactly once per match."""
        with self._lock:
            for segment in match.segments:
                segment.chunk.pins -= 1

    def stored_after(self, cursor: Cursor) -> TokenArray:
        """Up to a chunk of what the store holds after `cursor`, to explain where a prompt diverged."""
        with self._lock:
            rest = cursor.chunk.tokens[cursor.used :]
            if len(rest):
                return rest
            latest = max(cursor.chunk.children(), key=lambda child: child.last_used, default=None)
            return rest if latest is None else latest.tokens

    def replay(
        self,
        cursor: Cursor,
        text: bytes,
        start: int,
        borders: Set[int],
        pieces: Sequence[bytes],
        specials: Set[int] = frozenset(),
    ) -> Replayed:
        """The ids stored after `cursor` for `text[start:end]`, and that end, one of `borders`."""
        with self._lock:
            return stored_spelling(cursor, text, start, borders, pieces, specials)

    def refresh(self) -> None:
        """Learn what other processes stored. Reads the index: call it outside the engine's thread."""
        if self._cold is None:
            return
        try:
            rows = self._cold.news()
        except OSError as error:
            log.warning("cannot read the store's index: %s", error)
            return
        with self._lock:
            self._books.adopt(rows)

    def readahead(self, namespace: str, text: bytes, pieces: Sequence[bytes]) -> set[ChunkKey]:
        """Begin to read from disk what is probably stored for `text`; returns what it began to read.

        Never blocks: it runs while the prompt is still being tokenised.
        """
        with self._lock:
            likely = spelled_chunks(self._books.root(namespace), text, pieces)
            cold = [chunk for chunk in likely if chunk.payload is None and chunk.key not in self._fetches]
            for chunk in cold:
                self._start_fetch(chunk)
            return {chunk.key for chunk in cold}

    def fetch(self, chunk: Chunk, notify: Callable[[], None]) -> Fetch:
        """Bring a pinned chunk's payload into RAM; `notify` is called once, from any thread, when it is there.

        When the state is not PENDING on return, `notify` is not called.
        """
        with self._lock:
            if chunk.payload is not None:
                return Fetch(chunk, FetchState.READY)
            if chunk not in self._books:
                return Fetch(chunk, FetchState.GONE)
            fetch = self._start_fetch(chunk)
            fetch.waiting.append(notify)
            return fetch

    def reject(self, chunk: Chunk) -> None:
        """The engine refused this chunk's bytes: treat its file as damaged."""
        with self._lock:
            self.counters.damaged_chunks += 1
            if chunk in self._books:
                self._books.drop(chunk)
        if self._cold:
            self._cold.quarantine(chunk.key)

    # ── storing ──

    def origin(self, namespace: str) -> Cursor:
        with self._lock:
            return Cursor(self._books.root(namespace), 0)

    def advance(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """Move `cursor` along everything already stored for `tokens`."""
        with self._lock:
            if cursor.chunk not in self._books:
                cursor = Cursor(self._books.root(cursor.chunk.namespace), 0)
            return descend(cursor, tokens)

    def growth_point(self, cursor: Cursor) -> Cursor:
        """Where the next chunk should begin: at `cursor`, or earlier if it ends an unshared tail.

        A tail is replaced by a chunk that contains it, so that long conversations stay in few files.
        """
        chunk = cursor.chunk
        with self._lock:
            at_end = cursor.used == len(chunk.tokens)
            if at_end and chunk.is_leaf and not chunk.is_fork and len(chunk.tokens) < CHUNK_TOKENS:
                assert chunk.parent is not None
                return Cursor(chunk.parent, chunk.take)
            return cursor

    def insert(
        self,
        cursor: Cursor,
        tokens: TokenArray,
        payload: memoryview,
        sampled: Iterable[Span],
        *,
        fork: bool,
        given: bool = False,
    ) -> Cursor:
        """Add a chunk of `tokens` at `cursor`; returns the place at its end. The bytes go to disk later.

        `sampled` are spans relative to the chunk; `given` as in `Chunk`. A tail that the chunk contains is retired
        once it is safe. When the parent has been evicted meanwhile, or there is no room, nothing is added, and the
        result is the tree's beginning.
        """
        parent = cursor.chunk
        tokens = np.ascontiguousarray(tokens, np.int32)
        key = chunk_key(self.fingerprint, parent.namespace, parent.key, cursor.used, tokens)
        with self._lock:
            if parent not in self._books:
                return Cursor(self._books.root(parent.namespace), 0)
            if known := self._books.get(key):
                known.is_fork |= fork
                return Cursor(known, len(tokens))
            chunk = Chunk(
                key=key,
                parent=parent,
                take=cursor.used,
                tokens=tokens,
                sampled=tuple(sampled),
                given=given,
                size=len(payload),
            )
            chunk.is_fork = fork
            self._books.add(chunk, payload)
            self.counters.inserted_chunks += 1
            replaced = _tail_inside(chunk)
            self._make_room()
            if chunk not in self._books:
                return Cursor(self._books.root(parent.namespace), 0)
        if self._writer:
            self._writer.put(chunk, replaced)
        elif replaced:
            self._retire(replaced)
        return Cursor(chunk, len(tokens))

    def forget(self, namespace: str) -> None:
        """Drop everything of a namespace, in RAM and on disk."""
        with self._lock:
            gone = self._books.forget(namespace)
        if self._cold:
            self._cold.remove(gone)

    # ── life ──

    def flush(self) -> None:
        """Block until everything inserted so far is on disk (or the disk has refused it)."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and let go of the folder. Nothing may be called afterwards."""
        if self._reader and self._writer and self._cold:
            self._reader.close()
            self._writer.close()
            self._save_uses()
            self._cold.close()

    def stats(self) -> dict[str, object]:
        with self._lock:
            warm = [chunk for chunk in self._books if chunk.payload is not None]
            cold = [chunk for chunk in self._books if chunk.on_disk]
            counters = self.counters
            return {
                "lookups": counters.lookups,
                "inserted_chunks": counters.inserted_chunks,
                "warm": {
                    "chunks": len(warm),
                    "tokens": sum(len(chunk.tokens) for chunk in warm),
                    "bytes": self._books.warm_bytes,
                    "budget": self._warm_budget,
                    "evictions": counters.warm_evictions,
                },
                "cold": {
                    "chunks": len(cold),
                    "tokens": sum(len(chunk.tokens) for chunk in cold),
                    "bytes": self._books.cold_bytes,
                    "budget": self._cold_budget,
                    "evictions": counters.cold_evictions,
                    "read_chunks": counters.read_chunks,
                    "read_bytes": counters.read_bytes,
                    "read_seconds": round(counters.read_seconds, 6),
                    "damaged_chunks": counters.damaged_chunks,
                    "vanished_chunks": counters.vanished_chunks,
                    **(self._writer.stats() if self._writer else {}),
                },
            }

    # ── inside, with the lock held ──

    def _start_fetch(self, chunk: Chunk) -> Fetch:
        fetch = self._fetches.get(chunk.key)
        if fetch is None:
            assert self._reader is not None
            fetch = self._fetches[chunk.key] = Fetch(chunk)
            self._reader.start(fetch)
        return fetch

    def _make_room(self) -> None:
        self.counters.warm_evictions += self._books.shrink_warm(self._warm_budget)

    # ── inside, on the store's own threads ──

    def _fetched(self, fetch: Fetch, result: Fetched) -> None:
        chunk, counters = fetch.chunk, self.counters
        with self._lock:
            del self._fetches[chunk.key]
            if result.payload is not None:
                counters.read_chunks += 1
                counters.read_bytes += len(result.payload)
                counters.read_seconds += result.seconds
                self.costs.read.measure(len(result.payload), result.seconds)
                self._books.became_warm(chunk, result.payload)
                self._make_room()
            else:
                counters.damaged_chunks += result.state is FetchState.DAMAGED
                counters.vanished_chunks += result.state is FetchState.GONE
                if chunk in self._books:
                    self._books.drop(chunk)
            fetch.state = result.state
        for notify in fetch.waiting:
            notify()

    def _became_durable(self, sizes: dict[ChunkKey, int], replaced: list[Chunk]) -> None:
        assert self._cold is not None
        unwanted = []
        with self._lock:
            for key, size in sizes.items():
                if chunk := self._books.get(key):
                    self._books.became_cold(chunk, size)
                else:
                    unwanted.append(key)
            self._make_room()
        self._cold.remove(unwanted)
        for tail in replaced:
            self._retire(tail)

    def _retire(self, tail: Chunk) -> None:
        """Remove a tail that a longer chunk now contains, unless somebody builds on it or is reading it."""
        with self._lock:
            if tail.pins or not tail.is_leaf or tail.is_fork or tail not in self._books:
                return
            self._books.drop(tail)
        if tail.on_disk and self._cold:
            self._cold.remove([tail.key])

    def _tend_disk(self) -> None:
        """Bring the disk under its budget. Runs on the writer's thread when it has nothing to write."""
        assert self._cold is not None
        others = self._other_stores
        if others is not None and self._books.cold_bytes + others <= self._cold_budget:
            return
        with self._cold.evicting() as alone:
            if alone:
                with self._lock:
                    lost = self._books.take_orphans()
                self._cold.remove(lost)
                allowed = max(self._cold_budget - self._books.cold_bytes, 0)
                self._other_stores = self._cold.shrink_other_stores(allowed)
                self._evict_cold(self._cold_budget - self._other_stores)

    def _evict_cold(self, budget: int) -> None:
        """Nothing while the budget holds; else down to its low-water mark, deepest first."""
        assert self._cold is not None
        target = budget * LOW_WATER if self._books.cold_bytes > budget else budget
        while True:
            with self._lock:
                victims = self._books.shrink_cold(target)
                self.counters.cold_evictions += len(victims)
            if not victims:
                return
            self._cold.remove(chunk.key for chunk in victims)

    def _save_uses(self) -> None:
        assert self._cold is not None
        try:
            self._cold.touch((c.last_used, c.hits, c.key) for c in self._books if c.on_disk)
        except OSError as error:
            log.warning("cannot save when chunks were last used: %s", error)


def _tail_inside(chunk: Chunk) -> Chunk | None:
    """The longest sibling that `chunk` begins with, goes beyond and can replace.

    The chunk inherits what its siblings know was sampled: a lookup will find only one of them.
    """
    assert chunk.parent is not None
    replaced = None
    for sibling in chunk.parent.branches[chunk.take][int(chunk.tokens[0])]:
        size, shared = len(sibling.tokens), common_prefix(sibling.tokens, chunk.tokens)
        known = ((begin, min(end, shared)) for begin, end in sibling.sampled if begin < shared)
        chunk.sampled = _merged((*chunk.sampled, *known))
        is_inside = shared == size < len(chunk.tokens) and not sibling.is_fork and sibling.is_leaf
        if is_inside and (replaced is None or size > len(replaced.tokens)):
            replaced = sibling
    return replaced


def _merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans in order, touching and overlapping ones joined."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
