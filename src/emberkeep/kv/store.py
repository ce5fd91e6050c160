"""The KV store: the tree, the warm and the cold tier behind it, and the threads that move bytes.

Lookups and inserts are tree work under one short lock; no lock is ever held over I/O. Reads and writes run on
the store's own threads. Failing disks make the store smaller, never a request fail.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from emberkeep.kv.books import Books
from emberkeep.kv.catalogue import Catalogue
from emberkeep.kv.chunk_files import ChunkFiles
from emberkeep.kv.content import Moved, to_pieces
from emberkeep.kv.entries import Entry
from emberkeep.kv.fetch import Fetch, Fetched, FetchState, Reader
from emberkeep.kv.forgotten import Forgetter
from emberkeep.kv.housekeeping import Housekeeping
from emberkeep.kv.index import Row
from emberkeep.kv.policy import (
    CostModel,
    Keeping,
    Saved,
    StoreClock,
    StoreCounters,
    WriteBudget,
)
from emberkeep.kv.replay import Replayed, spelled_chunks, stored_spelling
from emberkeep.kv.tree import (
    Chunk,
    ChunkKey,
    Cursor,
    Made,
    Match,
    Peek,
    Segment,
    Span,
    chunk_key,
    last_snapshot,
    path_to,
    tail_inside,
)
from emberkeep.kv.writer import Writer
from emberkeep.token_arrays import TokenArray
from emberkeep.types import SHARED, Approximation, Label, Lineage, MissReason, Ttl

log = logging.getLogger("emberkeep.kv")

CHUNK_TOKENS = 128
_PATIENCE_S = 60.0

_NO_TOKENS = np.empty(0, np.int32)


class KvStore:
    """`cold` may be None: then everything lives in RAM only. Safe to use from any thread."""

    def __init__(
        self,
        fingerprint: bytes,
        *,
        warm_budget: int,
        cold: ChunkFiles | None,
        cold_budget: int,
        keeping: Keeping | None = None,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[Saved | None], StoreClock] = StoreClock,
    ) -> None:
        """`about` is written into the store's folder, for people and tools that come without the model."""
        self.fingerprint = fingerprint
        self.costs = CostModel()
        self.counters = StoreCounters()
        self.keeping = keeping or Keeping()
        self._cold = cold
        self._warm_budget = warm_budget
        self._cold_budget = cold_budget
        self._lock = threading.Lock()
        self._fits_engine = True
        self._books = Books(self.keeping.worth)
        self._clock = clock(None)
        self._writes = WriteBudget(self.keeping.writes_per_day)
        self._fetches: dict[ChunkKey, Fetch] = {}
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._house: Housekeeping | None = None
        self._forgetter = Forgetter(self._books, self._lock, cold, self.counters)
        if cold is not None:
            try:
                self._open(cold, clock, {"fingerprint": fingerprint, **(about or {})})
            except BaseException:
                cold.close()
                raise
        self.catalogue = Catalogue(
            self._books,
            self._lock,
            lambda: self._clock.now(),
            self.keeping.ttl,
            self.counters,
            forgetter=self._forgetter,
        )

    def _open(
        self, cold: ChunkFiles, clock: Callable[[Saved | None], StoreClock], about: Mapping[str, Any]
    ) -> None:
        with no_garbage_collection():  # it would look at a hundred thousand new objects again and again
            rows, damaged = cold.open_rows()
            notes = cold.index.notes()
            if "clock" in notes.meta:
                self._clock = clock(Saved(notes.meta["clock"], notes.meta["wall"]))
            self._books.adopt(rows, self._wanted_until(Ttl.EXTENDED))
        self._writes = WriteBudget(
            self.keeping.writes_per_day, notes.meta.get("write_day", 0), notes.meta.get("written", 0)
        )
        self._books.ghosts.add(notes.ghosts)
        self._books.restore_entries(notes.entries)
        self.counters.damaged_chunks += damaged
        self._reader = Reader(
            cold,
            self.fingerprint,
            typical_size=max((row.bytes for row in rows), default=0),
            ready_bytes=self._warm_budget // 16,
            on_done=self._fetched,
        )
        self._house = Housekeeping(
            self._books,
            self._lock,
            cold,
            self._clock,
            self.counters,
            self._writes,
            budget=self._cold_budget,
            about=about,
            notice=self._forgetter.notice,
            refresh=self.refresh,
            adopt=self._forgetter.adopt_unless_forgotten,
        )
        self._writer = Writer(
            cold,
            self.fingerprint,
            is_worth_it=self._house.is_worth_it,
            is_wanted=self._house.is_wanted,
            on_durable=self._became_durable,
            on_idle=self._house.tidy,
        )
        self._forgetter.settle = self._writer.settle
        self._forgetter.remove_leaving = self._house.remove_leaving
        self._forgetter.adopt = self._adopt

    def follow(self, fingerprint: bytes) -> None:
        """The engine computes with `fingerprint` from now on, and holds nothing that it computed before.

        While that is not the store's own, nothing is found in it for the engine and nothing is taken from it.
        """
        with self._lock:
            self._fits_engine = fingerprint == self.fingerprint

    @property
    def fits_engine(self) -> bool:
        """Whether what the engine computes now may be stored here."""
        return self._fits_engine

    # ── lookup ──

    def match(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool = False) -> Match:
        """The longest verified prefix of `tokens`; with `snapshots`, its part up to the last of these.

        Never blocks on disk.
        """
        with self._lock:
            self._books.clock += 1
            self.counters.lookups += 1
            cursor = self._deepest(self._books.origin(lineage), tokens)
            snapshot = last_snapshot(cursor, len(tokens)) if snapshots else None
            segments = path_to(cursor)
            if snapshots:
                end = snapshot.start if snapshot else 0
                segments = tuple(Segment(s.chunk, s.start, min(s.end, end)) for s in segments if s.start < end)
            match = Match(cursor, segments, snapshot)
            late = self._take(match.chunks)
        self._write_after_all(late)
        return match

    def match_elsewhere(
        self, lineage: Lineage, tokens: TokenArray, begin: int, approximation: Approximation
    ) -> tuple[Moved, ...]:
        """Passages of `tokens` at or after `begin` that are stored at other places, in order and disjoint.

        Never blocks on disk. The first call looks at everything that is stored.
        """
        with self._lock:
            if not self._fits_engine:
                return ()
            found = self._books.content.find(lineage.owner, tokens, begin, approximation.sinks)
            pieces = to_pieces(found, approximation)
            late = self._take([chunk for piece in pieces for chunk in piece.chunks])
        self._write_after_all(late)
        return pieces

    def peek(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Peek:
        """What `match` would find; nothing is used or pinned by looking."""
        with self._lock:
            cursor = self._deepest(self._books.origin(lineage), tokens)
            segments = path_to(cursor)
            snapshot = last_snapshot(cursor, len(tokens)) if snapshots else None
            end = (snapshot.start if snapshot else 0) if snapshots else cursor.position
            warm = sum(max(min(s.end, end) - s.start, 0) for s in segments if s.chunk.payload is not None)
            return Peek(cursor, end, warm)

    def peek_elsewhere(
        self, lineage: Lineage, tokens: TokenArray, begin: int, approximation: Approximation
    ) -> int:
        """How many tokens `match_elsewhere` would find."""
        with self._lock:
            if not self._fits_engine:
                return 0
            found = self._books.content.find(lineage.owner, tokens, begin, approximation.sinks)
        return sum(piece.end - piece.start for piece in to_pieces(found, approximation))

    def touch(self, label: Label, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> bool:
        """Bring a prefix into RAM and want it for another TTL; False when it is not stored whole.

        Blocks until it is read from disk.
        """
        match = self.match(lineage, tokens, snapshots=snapshots)
        try:
            reached = match.segments[-1].end if match.segments else 0
            if reached < len(tokens) or not all(self._bring_in(chunk) for chunk in match.chunks):
                return False
            self.turn_ended(label, match.cursor)
            return True
        finally:
            self.release(match)

    def _bring_in(self, chunk: Chunk) -> bool:
        done = threading.Event()
        fetch = self.fetch(chunk, done.set)
        if fetch.state is FetchState.PENDING:
            done.wait(_PATIENCE_S)  # a disk may never answer
        return fetch.state is FetchState.READY

    def other_model(self, sources: Sequence[str]) -> str | None:
        """The name of a model whose own store holds something that begins with the same text. Blocks on disk."""
        return self._cold.other_model(sources) if self._cold else None

    def release(self, match: Match | Moved) -> None:
        """Unpin. Must be called exactly once per match; when it raises, nothing was unpinned."""
        chunks = match.chunks
        with self._lock:
            for chunk in chunks:
                chunk.pins -= 1
            try:
                self._make_room()
            except Exception:  # whoever comes next makes room
                log.exception("cannot make room in RAM")

    def why_gone(self, cursor: Cursor, tokens: TokenArray) -> MissReason | None:
        """Why nothing follows `cursor` though it once did, if that is so."""
        with self._lock:
            ghost = self._books.ghosts.after(self.fingerprint, cursor, tokens)
            return ghost.reason if ghost else None

    def stored_after(self, cursor: Cursor) -> TokenArray:
        """Up to a chunk of what the store holds after `cursor`, to explain where a prompt diverged."""
        with self._lock:
            rest = cursor.chunk.tokens[cursor.used :]
            if len(rest):
                return rest
            seen = (child for child in cursor.chunk.children() if cursor.sees(child) and not child.is_snapshot)
            latest = max(seen, key=lambda child: child.last_used, default=None)
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
        """Learn what other processes stored, and whom they forgot. Reads the index: call it outside the engine's
        thread."""
        if self._cold is None:
            return
        try:
            self._forgetter.adopt_unless_forgotten(self._cold.new_rows)
        except OSError as error:
            log.warning("cannot read what others have stored: %s", error)

    def notice_forgotten(self) -> None:
        """Let go of whoever another process on this folder has forgotten. One system call unless there is one."""
        try:
            self._forgetter.notice()
        except OSError as error:
            log.warning("cannot read who was forgotten: %s", error)

    def on_forget(self, listener: Callable[[Container[str]], None]) -> None:
        """`listener` is told the owners of whom everything is forgotten, here or by another process, from any
        thread. It must be quick, and must not call the store."""
        self._forgetter.on_forget = listener

    def readahead(self, lineage: Lineage, text: bytes, pieces: Sequence[bytes]) -> set[ChunkKey]:
        """Begin to read from disk what is probably stored for `text`; returns what it began to read.

        Never blocks: it runs while the prompt is still being tokenised.
        """
        with self._lock:
            roots = {lineage.owner, SHARED}
            origins = [Cursor(self._books.root(root), 0, lineage) for root in roots]
            likely = [chunk for origin in origins for chunk in spelled_chunks(origin, text, pieces)]
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

    def was_imported(self, count: int, seconds: float) -> None:
        """So many bytes of payload went into the engine. Belongs to the engine's thread."""
        self.costs.import_.measure(count, seconds)
        self.counters.import_seconds += seconds

    def reject(self, chunk: Chunk) -> None:
        """The engine refused this chunk's bytes: treat its file as damaged."""
        is_there = chunk.on_disk and self._cold is not None and not self._cold.quarantine(chunk.key)
        with self._lock:
            self.counters.damaged_chunks += 1
            self._books.lose(chunk, is_there=is_there)

    # ── storing ──

    def origin(self, lineage: Lineage) -> Cursor:
        with self._lock:
            return self._books.origin(lineage)

    def advance(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """Move `cursor` along everything already stored for `tokens`."""
        with self._lock:
            return self._deepest(cursor, tokens)

    def growth_point(self, cursor: Cursor) -> Cursor:
        """Where the next chunk should begin: at `cursor`, or earlier if it ends an unshared tail.

        A tail is replaced by a chunk that contains it, so that long conversations stay in few files.
        """
        chunk = cursor.chunk
        with self._lock:
            at_end = cursor.used == len(chunk.tokens)
            is_theirs = chunk.lineage == cursor.lineage
            if at_end and is_theirs and chunk.is_leaf and not chunk.is_fork and len(chunk.tokens) < CHUNK_TOKENS:
                assert chunk.parent is not None
                return cursor.moved(chunk.parent, chunk.take)
            return cursor

    def insert(
        self,
        cursor: Cursor,
        tokens: TokenArray,
        payload: memoryview,
        sampled: Iterable[Span],
        *,
        fork: bool,
        made: Made = Made.UNKNOWN,
    ) -> Cursor:
        """Add a chunk of `tokens` at `cursor`; returns the place at its end. The bytes go to disk later.

        `sampled` are spans relative to the chunk. A tail that the chunk contains is retired once it is safe. When
        the parent has been evicted meanwhile, or there is no room, nothing is added, and the result is the tree's
        beginning.
        """
        tokens = np.array(tokens, np.int32)  # a copy: the caller's may be a view of what it goes on writing
        chunk = self._new_chunk(cursor, tokens, payload, tuple(sampled), made)
        with self._lock:
            if not self._fits_engine or cursor.chunk not in self._books:
                return self._books.origin(cursor.lineage)
            chunk.parent = self._books.anchored(cursor.chunk)
            if known := self._books.get(chunk.key):
                known.is_fork |= fork
                return cursor.moved(known, len(tokens))
            chunk.is_fork = fork
            self._add(chunk, payload)
            replaced = tail_inside(chunk)
            self._make_room()
            if chunk not in self._books:
                return self._books.origin(cursor.lineage)
        if self._writer:
            self._writer.put(chunk, replaced)
        elif replaced:
            self._retire(replaced)
        return cursor.moved(chunk, len(tokens))

    def has_snapshot(self, cursor: Cursor) -> bool:
        with self._lock:
            found = last_snapshot(cursor, cursor.position)
            return found is not None and found.start == cursor.position

    def insert_snapshot(self, cursor: Cursor, payload: memoryview, made: Made = Made.UNKNOWN) -> None:
        """Add the state at exactly `cursor`. Does nothing where there is one, or no room for it."""
        chunk = self._new_chunk(cursor, _NO_TOKENS, payload, (), made)
        with self._lock:
            if not self._fits_engine or cursor.chunk not in self._books or self._books.get(chunk.key):
                return
            chunk.parent = self._books.anchored(cursor.chunk)
            self._add(chunk, payload)
            self._make_room()
            is_kept = chunk in self._books
        if self._writer and is_kept:
            self._writer.put(chunk, None)

    def turn_ended(self, label: Label, cursor: Cursor) -> Entry | None:
        """A request has left its state at `cursor`. None when there is nothing there any more."""
        with self._lock:
            if cursor.chunk.is_root or cursor.chunk not in self._books:
                return None
            entry = self._books.turn_ended(label, cursor, self._clock.now(), self.keeping.ttl)
            self._books.forget_empty_entries()
            stale = entry.stale_tails(self.keeping.cold_after)
            self.counters.cooled_by_turns += sum(self._books.cool_branch(tail) for tail in stale)
        if self._writer:
            self._writer.wake()
        return entry

    def sweep(self) -> int:
        """Give back the RAM of what nobody has wanted for its TTL; returns how many chunks left it. Blocks on disk
        for a moment."""
        self.notice_forgotten()
        with self._lock:
            idle = self._books.cool_expired(self._clock.now())
            self.counters.cooled_when_idle += idle
        if self._writer:
            self._writer.wake()
        return idle

    # ── life ──

    def flush(self) -> None:
        """Block until everything inserted so far is on disk (or the disk has refused it)."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and let go of the folder. Nothing may be called afterwards."""
        if self._reader and self._writer and self._house and self._cold:
            self._reader.close()
            self._writer.close()
            self._house.save_notes()
            self._house.remove_leaving()
            self._cold.close()

    def held_bytes(self) -> tuple[int, int]:
        """In RAM and on disk."""
        with self._lock:
            return self._books.warm.bytes, self._books.cold.bytes

    def stats(self) -> dict[str, object]:
        """Cheap: nothing is walked."""
        with self._lock:
            books, counters = self._books, self.counters
            return {
                "folder": self._cold.folder.name if self._cold else None,
                "lookups": counters.lookups,
                "inserted_chunks": counters.inserted_chunks,
                "entries": len(books.entries),
                "ghosts": len(books.ghosts),
                "evictions": counters.evictions(),
                "warm": {
                    **asdict(books.warm),
                    "budget": self._warm_budget,
                    "read_seconds": round(counters.import_seconds, 6),
                },
                "cold": {
                    **asdict(books.cold),
                    "budget": self._cold_budget,
                    "read_chunks": counters.read_chunks,
                    "read_bytes": counters.read_bytes,
                    "read_seconds": round(counters.read_seconds, 6),
                    "damaged_chunks": counters.damaged_chunks,
                    "vanished_chunks": counters.vanished_chunks,
                    "unreadable_chunks": counters.unreadable_chunks,
                    "other_bytes": books.disk_bytes
                    - books.cold.bytes
                    + (self._cold.side_bytes if self._cold else 0),
                    "written_today_bytes": self._writes.spent,
                    "daily_write_budget": self._writes.limit,
                    "unwritten_chunks": len(books.unwritten),
                    **(self._writer.stats() if self._writer else {}),
                },
            }

    # ── inside, with the lock held ──

    def _deepest(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        return self._books.deepest(cursor, tokens) if self._fits_engine else self._books.origin(cursor.lineage)

    def _take(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Use and pin; returns those that were not worth writing so far."""
        listed = list(chunks)
        for chunk in listed:
            self._books.use(chunk)
        late = [chunk for chunk in listed if chunk.key in self._books.unwritten]
        for chunk in listed:  # last: nobody would ever unpin them if something failed after it
            chunk.pins += 1
        return late

    def _start_fetch(self, chunk: Chunk) -> Fetch:
        fetch = self._fetches.get(chunk.key)
        if fetch is None:
            assert self._reader is not None
            fetch = Fetch(chunk)
            self._reader.start(fetch)
            self._fetches[chunk.key] = fetch  # `_fetched` waits for the lock
        return fetch

    def _make_room(self) -> None:
        self.counters.warm_evictions += self._books.shrink_warm(self._warm_budget)

    def _wanted_until(self, ttl: Ttl) -> float:
        return self._clock.now() + self.keeping.ttl[ttl]

    def _new_chunk(
        self, cursor: Cursor, tokens: TokenArray, payload: memoryview, sampled: tuple[Span, ...], made: Made
    ) -> Chunk:
        parent, lineage = cursor.chunk, cursor.lineage
        return Chunk(
            key=chunk_key(self.fingerprint, lineage, parent.key, cursor.used, tokens),
            parent=parent,
            take=cursor.used,
            tokens=tokens,
            sampled=sampled,
            made=made,
            size=len(payload),
            lineage=lineage,
        )

    def _add(self, chunk: Chunk, payload: memoryview) -> None:
        self._books.add(chunk, payload)
        chunk.expires = self._wanted_until(Ttl.SHORT)  # until somebody says what it is
        self.counters.inserted_chunks += 1

    # ── inside, on the store's own threads ──

    def _fetched(self, fetch: Fetch, result: Fetched) -> None:
        """Whoever waits for it hears of it, whatever goes wrong here: a payload that is not there is noticed."""
        try:
            self._take_in(fetch.chunk, result)
        except Exception:
            log.exception("cannot take in %s.kv", fetch.chunk.key.hex())
        fetch.state = result.state
        for notify in fetch.waiting:
            notify()

    def _take_in(self, chunk: Chunk, result: Fetched) -> None:
        counters = self.counters
        below: list[ChunkKey] = []
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
                counters.unreadable_chunks += result.state is FetchState.UNREADABLE
                if result.state is not FetchState.UNREADABLE:
                    below = self._books.lose(chunk, is_there=result.is_there)
        if below and self._cold:
            missing = self._cold.missing(below)
            with self._lock:
                self._books.lose_orphans(missing)

    def _became_durable(self, sizes: dict[ChunkKey, int], replaced: list[Chunk]) -> None:
        assert self._house is not None
        self._house.became_durable(sizes)
        with self._lock:
            self._make_room()
        for tail in replaced:
            self._retire(tail)

    def _retire(self, tail: Chunk) -> None:
        """Remove a tail that a longer chunk now contains, unless somebody builds on it or is reading it."""
        with self._lock:
            if tail.pins or not tail.is_leaf or tail.is_fork or tail not in self._books:
                return
            self._books.supersede(tail)
        if self._house:
            self._house.remove_leaving()

    def _adopt(self, rows: list[Row]) -> None:
        with self._lock:
            self._books.adopt(rows, self._wanted_until(Ttl.EXTENDED))

    def _write_after_all(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were not worth writing have been reused: they are now. Never raises: they are pinned."""
        for chunk in chunks:
            if self._writer:
                with suppress(MemoryError):  # the next who reuses it writes it
                    self._writer.put(chunk, None)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
