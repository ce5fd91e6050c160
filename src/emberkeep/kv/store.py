"""The KV store: the tree, the warm and the cold tier behind it, and the threads that move bytes.

Lookups and inserts are tree work under one short lock; no lock is ever held over I/O. Reads and writes run on
the store's own threads. Failing disks make the store smaller, never a request fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

import numpy as np

from emberkeep.kv import value
from emberkeep.kv.chunkfile import Damaged, describe
from emberkeep.kv.cold import ColdTier
from emberkeep.kv.cost import CostModel
from emberkeep.kv.index import Row
from emberkeep.kv.keys import ROOT, ChunkKey, TokenArray, chunk_key
from emberkeep.kv.replay import sampled_spelling, spelled_chunks
from emberkeep.kv.tree import Chunk, Cursor, Segment, Span, descend, new_root, path_to
from emberkeep.kv.writer import Writer

log = logging.getLogger("emberkeep.kv")

CHUNK_TOKENS = 128
_READERS = 3
_LOW_WATER = 0.95
"""Eviction goes down to this share of a budget, so that it does not run again for every chunk."""


class FetchState(Enum):
    PENDING = "pending"
    READY = "ready"  # `chunk.payload` is set, and stays while the chunk is pinned and in the store
    DAMAGED = "damaged"  # failed verification; the chunk has left the store
    GONE = "gone"  # its file disappeared or cannot be read


@dataclass(slots=True)
class Fetch:
    """One read from disk, shared by everybody who waits for it."""

    chunk: Chunk
    state: FetchState = FetchState.PENDING
    waiting: list[Callable[[], None]] = field(default_factory=list)


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
        self._roots: dict[str, Chunk] = {}
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._orphans: dict[ChunkKey, list[Row]] = {}
        self._fetches: dict[ChunkKey, Fetch] = {}
        self._clock = 0
        self._warm_bytes = 0
        self._cold_bytes = 0
        self._readers = ThreadPoolExecutor(_READERS, "kv-read")
        self._writer: Writer | None = None
        if cold is not None:
            rows, damaged = cold.open_rows()
            self._adopt(rows)
            self.counters.damaged_chunks += damaged
            self._writer = Writer(cold, fingerprint, on_durable=self._became_durable, on_idle=self._tend_disk)

    # ── lookup ──

    def match(self, namespace: str, tokens: TokenArray) -> Match:
        """The longest verified prefix of `tokens`. Never blocks on disk."""
        with self._lock:
            self._clock += 1
            self.counters.lookups += 1
            cursor = descend(Cursor(self._root(namespace), 0), tokens)
            segments = path_to(cursor)
            for segment in segments:
                segment.chunk.pins += 1
                segment.chunk.hits += 1
                segment.chunk.last_used = self._clock
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
            children = sorted(cursor.chunk.children(), key=lambda child: child.last_used)
            return children[-1].tokens if children else rest

    def replay(self, cursor: Cursor, fragment: bytes, pieces: Sequence[bytes]) -> tuple[int, ...]:
        """The ids that were sampled after `cursor` and spell exactly `fragment`; () when there are none."""
        with self._lock:
            return sampled_spelling(cursor, fragment, pieces)

    def refresh(self) -> None:
        """Learn what other processes stored. Reads the index: call it outside the engine's thread."""
        if self._cold is None:
            return
        try:
            rows = self._cold.news()
        except OSError as error:
            log.warning("cannot read the store's index: %s", error)
            return
        self._adopt(rows)

    def readahead(self, namespace: str, text: bytes, pieces: Sequence[bytes]) -> set[ChunkKey]:
        """Begin to read from disk what is probably stored for `text`; returns what it began to read.

        Never blocks: it runs while the prompt is still being tokenised.
        """
        with self._lock:
            likely = spelled_chunks(self._root(namespace), text, pieces)
            cold = [chunk for chunk in likely if chunk.payload is None and chunk.key not in self._fetches]
            for chunk in cold:
                self._start_fetch(chunk)
            return {chunk.key for chunk in cold}

    def fetch(self, chunk: Chunk, notify: Callable[[], None]) -> Fetch:
        """Bring a pinned chunk's payload into RAM. `notify` is called once, from any thread, when it is there.

        When the state is not PENDING on return, `notify` is not called.
        """
        with self._lock:
            if chunk.payload is not None:
                return Fetch(chunk, FetchState.READY)
            if chunk.key not in self._chunks:
                return Fetch(chunk, FetchState.GONE)
            fetch = self._start_fetch(chunk)
            fetch.waiting.append(notify)
            return fetch

    def reject(self, chunk: Chunk) -> None:
        """The engine refused this chunk's bytes: treat its file as damaged."""
        with self._lock:
            self.counters.damaged_chunks += 1
            if chunk.key in self._chunks:
                self._drop(chunk)
        if self._cold:
            self._cold.quarantine(chunk.key)

    # ── storing ──

    def origin(self, namespace: str) -> Cursor:
        with self._lock:
            return Cursor(self._root(namespace), 0)

    def advance(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """Move `cursor` along everything already stored for `tokens`."""
        with self._lock:
            if not cursor.chunk.is_root and cursor.chunk.key not in self._chunks:
                cursor = Cursor(self._root(cursor.chunk.namespace), 0)
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
        self, cursor: Cursor, tokens: TokenArray, payload: memoryview, sampled: Iterable[Span], *, fork: bool
    ) -> Cursor:
        """Add a chunk of `tokens` at `cursor`; returns the place at its end. The bytes go to disk later.

        `sampled` are spans relative to the chunk. A tail that the chunk contains is retired once it is safe.
        When the parent has been evicted meanwhile nothing is added, and the result is the tree's beginning.
        """
        parent = cursor.chunk
        tokens = np.ascontiguousarray(tokens, np.int32)
        key = chunk_key(self.fingerprint, parent.namespace, parent.key, cursor.used, tokens)
        with self._lock:
            if not parent.is_root and parent.key not in self._chunks:
                return Cursor(self._root(parent.namespace), 0)
            known = self._chunks.get(key)
            if known is None:
                known = self._new_chunk(key, cursor, tokens, payload, tuple(sampled))
                replaced = self._tail_inside(known)
            else:
                replaced = None
            known.is_fork |= fork
            self._make_room()
        if self._writer and not known.on_disk:
            self._writer.put(known, replaced)
        elif replaced:
            self._retire(replaced)
        return Cursor(known, len(tokens))

    def forget(self, namespace: str) -> None:
        """Drop everything of a namespace, in RAM and on disk."""
        with self._lock:
            gone = [chunk for chunk in self._chunks.values() if chunk.namespace == namespace]
            for chunk in gone:
                self._drop(chunk)
            self._roots.pop(namespace, None)
        if self._cold:
            self._cold.remove(chunk.key for chunk in gone)

    # ── life ──

    def flush(self) -> None:
        """Block until everything inserted so far is on disk (or the disk has refused it)."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and let go of the folder. Nothing may be called afterwards."""
        self._readers.shutdown(wait=True)
        if self._writer and self._cold:
            self._writer.close()
            self._save_uses()
            self._cold.close()

    def stats(self) -> dict[str, object]:
        with self._lock:
            warm = [chunk for chunk in self._chunks.values() if chunk.payload is not None]
            cold = [chunk for chunk in self._chunks.values() if chunk.on_disk]
            counters = self.counters
            return {
                "warm": {
                    "chunks": len(warm),
                    "tokens": sum(len(c.tokens) for c in warm),
                    "bytes": self._warm_bytes,
                    "budget": self._warm_budget,
                    "evictions": counters.warm_evictions,
                },
                "cold": {
                    "chunks": len(cold),
                    "tokens": sum(len(c.tokens) for c in cold),
                    "bytes": self._cold_bytes,
                    "budget": self._cold_budget,
                    "evictions": counters.cold_evictions,
                    "read_chunks": counters.read_chunks,
                    "read_bytes": counters.read_bytes,
                    "read_seconds": round(counters.read_seconds, 6),
                    "damaged_chunks": counters.damaged_chunks,
                    "vanished_chunks": counters.vanished_chunks,
                    **(self._writer.stats() if self._writer else {}),
                },
                "lookups": counters.lookups,
                "inserted_chunks": counters.inserted_chunks,
            }

    # ── inside: everything below that touches the tree expects the lock to be held ──

    def _root(self, namespace: str) -> Chunk:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = new_root(namespace)
        return root

    def _new_chunk(
        self,
        key: ChunkKey,
        cursor: Cursor,
        tokens: TokenArray,
        payload: memoryview,
        sampled: tuple[Span, ...],
    ) -> Chunk:
        chunk = Chunk(
            key=key,
            namespace=cursor.chunk.namespace,
            parent=cursor.chunk,
            take=cursor.used,
            tokens=tokens,
            sampled=sampled,
            size=len(payload),
        )
        chunk.last_used = self._clock
        chunk.payload = payload
        self._warm_bytes += len(payload)
        self._chunks[key] = chunk
        chunk.attach()
        self.counters.inserted_chunks += 1
        return chunk

    def _tail_inside(self, chunk: Chunk) -> Chunk | None:
        """A sibling that `chunk` begins with and goes beyond: it inherits what that one knew."""
        assert chunk.parent is not None
        for sibling in chunk.parent.branches[chunk.take][int(chunk.tokens[0])]:
            size = len(sibling.tokens)
            replaceable = size < len(chunk.tokens) and not sibling.is_fork and sibling.is_leaf
            if replaceable and np.array_equal(sibling.tokens, chunk.tokens[:size]):
                chunk.sampled = _merged(sibling.sampled + chunk.sampled)
                return sibling
        return None

    def _drop(self, chunk: Chunk) -> None:
        """Take a chunk and everything below it out of the tree and the books."""
        todo = [chunk]
        chunk.detach()
        while todo:
            gone = todo.pop()
            todo += gone.children()
            if self._chunks.pop(gone.key, None) is None:
                continue
            if gone.payload is not None:
                self._warm_bytes -= len(gone.payload)
                gone.payload = None
            if gone.on_disk:
                self._cold_bytes -= gone.bytes

    def _start_fetch(self, chunk: Chunk) -> Fetch:
        fetch = self._fetches.get(chunk.key)
        if fetch is None:
            fetch = self._fetches[chunk.key] = Fetch(chunk)
            self._readers.submit(self._read, fetch)
        return fetch

    def _make_room(self) -> None:
        """Bring RAM under its budget: clean chunks first, and of what exists only in RAM only leaves."""
        if self._warm_bytes <= self._warm_budget:
            return
        warm = [c for c in self._chunks.values() if c.payload is not None and not c.pins]
        warm.sort(key=lambda c: (not c.on_disk, value.worth(c, self._clock)))
        for chunk in warm:
            if self._warm_bytes <= self._warm_budget * _LOW_WATER:
                return
            if chunk.on_disk:
                assert chunk.payload is not None
                self._warm_bytes -= len(chunk.payload)
                chunk.payload = None
            elif chunk.is_leaf:
                self._drop(chunk)
            else:
                continue
            self.counters.warm_evictions += 1

    def _adopt(self, rows: Iterable[Row]) -> None:
        """Hang chunks that are on disk into the tree; those whose parent is not known yet wait for it."""
        with self._lock:
            todo = list(rows)
            while todo:
                row = todo.pop()
                d = row.description
                parent = self._root(d.namespace) if d.parent == ROOT else self._chunks.get(d.parent)
                if parent is None:
                    self._orphans.setdefault(d.parent, []).append(row)
                    continue
                if d.key not in self._chunks and d.take <= len(parent.tokens):
                    self._hang(row, parent)
                todo += self._orphans.pop(d.key, ())

    def _hang(self, row: Row, parent: Chunk) -> None:
        d = row.description
        chunk = Chunk(
            key=d.key,
            namespace=d.namespace,
            parent=parent,
            take=d.take,
            tokens=d.tokens,
            sampled=d.sampled,
            size=row.bytes,
        )
        chunk.on_disk = True
        chunk.hits, chunk.last_used = row.hits, row.last_used
        self._clock = max(self._clock, row.last_used)
        self._cold_bytes += row.bytes
        self._chunks[d.key] = chunk
        chunk.attach()

    # ── inside: on the store's own threads, without the lock unless taken ──

    def _read(self, fetch: Fetch) -> None:
        assert self._cold is not None
        chunk, payload = fetch.chunk, None
        begin = perf_counter()
        try:
            payload = self._cold.read(describe(chunk, self.fingerprint))
            state = FetchState.READY
        except Damaged as reason:
            log.warning("quarantined %s.kv: %s", chunk.key.hex(), reason)
            self._cold.quarantine(chunk.key)
            state = FetchState.DAMAGED
        except OSError as error:
            log.info("cannot read %s.kv: %s", chunk.key.hex(), error)
            state = FetchState.GONE
        self._finish_read(fetch, state, payload, perf_counter() - begin)

    def _finish_read(self, fetch: Fetch, state: FetchState, payload: memoryview | None, seconds: float) -> None:
        chunk = fetch.chunk
        with self._lock:
            del self._fetches[chunk.key]
            if payload is not None:
                self.counters.read_chunks += 1
                self.counters.read_bytes += len(payload)
                self.counters.read_seconds += seconds
                self.costs.read.measure(len(payload), seconds)
                self._promote(chunk, payload)
            else:
                self.counters.damaged_chunks += state is FetchState.DAMAGED
                self.counters.vanished_chunks += state is FetchState.GONE
                if chunk.key in self._chunks:
                    self._drop(chunk)
            fetch.state = state
        for notify in fetch.waiting:
            notify()

    def _promote(self, chunk: Chunk, payload: memoryview) -> None:
        if chunk.payload is None:
            chunk.payload = payload
            if chunk.key in self._chunks:
                self._warm_bytes += len(payload)
                self._make_room()

    def _became_durable(self, sizes: dict[ChunkKey, int], replaced: list[Chunk]) -> None:
        assert self._cold is not None
        unwanted = []
        with self._lock:
            for key, size in sizes.items():
                chunk = self._chunks.get(key)
                if chunk is None:
                    unwanted.append(key)
                elif not chunk.on_disk:
                    chunk.on_disk = True
                    chunk.bytes = size
                    self._cold_bytes += size
            self._make_room()
        self._cold.remove(unwanted)
        for tail in replaced:
            self._retire(tail)

    def _retire(self, tail: Chunk) -> None:
        """Remove a tail that a longer chunk now contains, unless somebody builds on it or is reading it."""
        with self._lock:
            if tail.pins or not tail.is_leaf or tail.is_fork or tail.key not in self._chunks:
                return
            self._drop(tail)
        if tail.on_disk and self._cold:
            self._cold.remove([tail.key])

    def _tend_disk(self) -> None:
        """Bring the disk under its budget. Runs on the writer's thread when it has nothing to write."""
        assert self._cold is not None
        if self._other_stores is None or self._cold_bytes + self._other_stores > self._cold_budget:
            with self._cold.evicting() as alone:
                if alone:
                    self._discard_orphans()
                    allowed = max(self._cold_budget - self._cold_bytes, 0)
                    self._other_stores = self._cold.shrink_other_stores(allowed)
                    self._evict_cold(self._cold_budget - self._other_stores)

    def _discard_orphans(self) -> None:
        """Remove files that no lookup can reach: their parent was lost, so they never can be used again."""
        assert self._cold is not None
        with self._lock:
            lost = [row.description.key for rows in self._orphans.values() for row in rows]
            self._orphans.clear()
        self._cold.remove(lost)

    def _evict_cold(self, budget: int) -> None:
        """Nothing while the budget holds; else down to its low-water mark, deepest and least worth first."""
        assert self._cold is not None
        target = budget * _LOW_WATER if self._cold_bytes > budget else budget
        while self._cold_bytes > target:
            with self._lock:
                leaves = [c for c in self._chunks.values() if c.on_disk and c.is_leaf and not c.pins]
                leaves.sort(key=lambda c: value.worth(c, self._clock))
                victims = []
                for chunk in leaves:
                    if self._cold_bytes <= target:
                        break
                    victims.append(chunk)
                    self._drop(chunk)
                self.counters.cold_evictions += len(victims)
            if not victims:
                return
            self._cold.remove(chunk.key for chunk in victims)

    def _save_uses(self) -> None:
        assert self._cold is not None
        try:
            self._cold.touch((c.last_used, c.hits, c.key) for c in self._chunks.values() if c.on_disk)
        except OSError as error:
            log.warning("cannot save when chunks were last used: %s", error)


def _merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans in order, touching and overlapping ones joined."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
