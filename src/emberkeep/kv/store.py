"""The KV store: the one door to the ledger, the RAM tier and the disk tier.

Lookups and inserts are tree work under one short lock; no lock is ever held over I/O. Reads and writes run on
the store's own threads. Failing disks make the store smaller, never a request fail.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from emberkeep import garbage
from emberkeep.kv.catalogue import Catalogue
from emberkeep.kv.corpus import TokenCorpus
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.tier import DiskSettings, DiskTier
from emberkeep.kv.disk.transfers import Fetch, FetchState
from emberkeep.kv.entries import Entry
from emberkeep.kv.expiry import Expiry, next_expiry
from emberkeep.kv.forgetting import Forgetter, Holders, Whose, of_user
from emberkeep.kv.ledger import Ledger, tail_inside
from emberkeep.kv.lookups import Arrival, SharedTier, StoreLookups
from emberkeep.kv.policy import CostModel, Keeping, Saved, StoreCounters, WriteBudget
from emberkeep.kv.text_walk import chunks_along
from emberkeep.kv.tree import (
    Chunk,
    ChunkKey,
    Cursor,
    Made,
    Span,
    chunks_at,
    clear_lineage_caches,
    new_chunk,
)
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import Label
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_PATIENCE_S = 60.0

_NO_TOKENS = np.empty(0, np.int32)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budgets:
    ram: int
    disk: int = 0
    """What all stores under the same root may hold together."""


class KvStore(StoreLookups):
    """Without `files` everything lives in RAM only. Safe to use from any thread."""

    def __init__(
        self,
        fingerprint: bytes,
        budgets: Budgets,
        files: ChunkFiles | None = None,
        *,
        shared: Callable[[KvStore, int, Path | None], SharedTier] | None = None,
        keeping: Keeping | None = None,
        about: Mapping[str, Any] | None = None,
        holders: Holders | None = None,
    ) -> None:
        """`about` is written into the store's folder, for people and tools that come without the model.
        `shared` opens the tier that other hosts share, for this store, of so many bytes a prompt, with notes
        in that folder; the tier belongs to the store. `holders`: who else holds what its users sent."""
        self.fingerprint = fingerprint
        self.costs = CostModel()
        self.counters = StoreCounters()
        self.keeping = keeping or Keeping()
        self.chunk_tokens = self.keeping.chunk_tokens
        self._budgets = budgets
        self.beside: Callable[[], None] = lambda: None
        """What else a sweep does."""
        self._lock = threading.Lock()
        self._ledger = Ledger(self.keeping, budgets.ram, self.counters)
        self._fits_engine = True
        self._forgetter = Forgetter((files.forgotten, files.index) if files else None, self.transact)
        self.corpus = TokenCorpus(self.transact)
        self._ledger.on_delete = self.corpus.forget
        self.holders = holders or Holders()
        self._forgetter.on_forget = self._tell_holders
        self._disk: DiskTier | None = None
        if files is not None:
            try:
                self._disk = self._open(files, {"fingerprint": fingerprint, **(about or {})})
            except BaseException:
                files.close()
                raise
        self._expiry = Expiry(self.transact, self._disk) if self.keeping.expire else None
        if self._expiry:
            self._expiry.sweep()  # before anything is served
        folder = self._disk.files.folder if self._disk else None
        self.shared = shared(self, budgets.ram // 2, folder) if shared else SharedTier()
        remove_files = self._disk.remove_files if self._disk else set[ChunkKey]
        self.catalogue = Catalogue(self.transact, remove_files, self.shared.remove, self._forget)
        self.holders.join_lasting(self, self.catalogue.forget_user)

    def read_into(self, allocate: Callable[[int], memoryview | None]) -> None:
        """Payloads are read from now on from disk into memory that `allocate` gives, where it gives any."""
        if self._disk is not None:
            self._disk.files.buffers.allocate = allocate

    def _open(self, files: ChunkFiles, about: Mapping[str, Any]) -> DiskTier:
        ledger = self._ledger
        with garbage.kept():  # a hundred thousand new objects would be looked at again and again
            rows, damaged = files.open_rows()
            notes = files.index.notes()
            if "clock" in notes.meta:
                ledger.clock = self.keeping.clock(Saved(notes.meta["clock"], notes.meta["wall"]))
            ledger.adopt(rows)
        day, written = notes.meta.get("write_day", 0), notes.meta.get("written", 0)
        ledger.writes = WriteBudget(self.keeping.writes_per_day, day, written)
        if ledger.entries.tells_ghosts:
            ledger.entries.ghosts.add(notes.ghosts)
        ledger.entries.restore(notes.entries)
        self.counters.damaged_chunks += damaged
        settings = DiskSettings(self._budgets.disk, self._budgets.ram // 16, about, self.keeping.expire)
        largest = max((row.bytes for row in rows), default=0)
        return DiskTier(files, self.transact, self._forgetter, self.counters, self.costs, settings, largest)

    def follow(self, fingerprint: bytes) -> None:
        """The engine computes with `fingerprint` from now on, and holds nothing that it computed before.

        While that is not the store's own, nothing is found in it for the engine and nothing is taken from it.
        """
        with self._lock:
            self._fits_engine = fingerprint == self.fingerprint

    @property
    def loading(self) -> int:
        """How many chunks are being read from disk."""
        return len(self._disk.reader) if self._disk else 0

    def transact(self, change: Callable[[Ledger], T]) -> T:
        """Run `change` with the store's lock held. It must be short, and must not block."""
        with self._lock:
            return change(self._ledger)

    # ── lookup ──

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
        return self._disk.files.other_model(sources) if self._disk else None

    def refresh(self) -> None:
        """Learn what other processes stored, and which users they forgot. Reads the index: call it outside the
        engine's thread."""
        self._forgetter.refresh()

    def notice_forgotten(self) -> None:
        """Drop the state of users that another process has forgotten. One system call if there are none."""
        try:
            self._forgetter.notice()
        except OSError as error:
            log.warning("cannot read who was forgotten: %s", error)

    def _tell_holders(self, owners: Container[str]) -> None:
        """Owners were forgotten, here or by another process."""
        self.holders.drop(owners)
        self.corpus.forget(owners)  # last: until the holders are told, their turns may still add to it
        clear_lineage_caches()

    def readahead(self, lineage: Lineage, text: bytes, pieces: Sequence[bytes]) -> set[ChunkKey]:
        """Begin to read from disk what is probably stored for `text`; returns what it began to read.

        Never blocks: it runs while the prompt is still being tokenised.
        """
        if self._disk is None:
            return set()
        reader = self._disk.reader
        with self._lock:
            roots = {lineage.owner, SHARED}
            origins = [Cursor(self._tree.root(root), 0, lineage) for root in roots]
            likely = [chunk for origin in origins for chunk in chunks_along(origin, text, pieces)]
            missing = [chunk for chunk in likely if chunk.payload is None and chunk.key not in reader]
            for chunk in missing:
                reader.begin(chunk)
            return {chunk.key for chunk in missing}

    def bring_in(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Arrival | None:
        """Fetch what other hosts have computed of a prompt, if that is cheaper than to evaluate it: a lookup finds
        it when it has arrived. None where nothing is to be had. Never blocks."""
        return self.shared.bring_in(lineage, tokens, snapshots=snapshots) if self._fits_engine else None

    def fetch(self, chunk: Chunk, notify: Callable[[], None]) -> Fetch:
        """Bring a pinned chunk's payload into RAM; `notify` is called once, from any thread, when it is there.

        When the state is not PENDING on return, `notify` is not called.
        """
        with self._lock:
            if chunk.payload is not None:
                return Fetch(chunk, FetchState.READY)
            if chunk not in self._tree:
                return Fetch(chunk, FetchState.GONE)
            assert self._disk is not None  # without one everything in the tree is in RAM
            fetch = self._disk.reader.begin(chunk)
            fetch.waiting.append(notify)
            return fetch

    def was_imported(self, count: int, seconds: float) -> None:
        """So many bytes of payload went into the engine. Belongs to the engine's thread."""
        self.costs.import_.measure(count, seconds)
        self.counters.import_seconds += seconds

    def reject(self, chunk: Chunk) -> None:
        """The engine refused this chunk's bytes: treat its file as damaged."""
        is_there = chunk.on_disk and self._disk is not None and not self._disk.files.quarantine(chunk.key)
        with self._lock:
            self.counters.damaged_chunks += 1
            self._ledger.lose(chunk, is_there=is_there)

    # ── storing ──

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
        chunk = new_chunk(self.fingerprint, cursor, tokens, len(payload), made)
        chunk.sampled, chunk.is_fork = tuple(sampled), fork
        entered = self._enter(cursor, chunk, payload)
        return cursor.at(entered, len(tokens)) if entered else self.origin(cursor.lineage)

    def insert_snapshot(self, cursor: Cursor, payload: memoryview, made: Made = Made.UNKNOWN) -> Chunk | None:
        """Add the state at exactly `cursor`; None, where there is one, or no room for it."""
        chunk = new_chunk(self.fingerprint, cursor, _NO_TOKENS, len(payload), made)
        return chunk if self._enter(cursor, chunk, payload) is chunk else None

    def _enter(self, cursor: Cursor, chunk: Chunk, payload: memoryview) -> Chunk | None:
        """The chunk that is at its place then, this one or another; None where there is no place or no room."""
        with self._lock:
            if not self._fits_engine or cursor.chunk not in self._tree:
                return None
            chunk.parent = self._tree.anchor(cursor.chunk)
            if known := self._tree.get(chunk.key):
                known.is_fork |= chunk.is_fork
                return known
            self._ledger.insert(chunk, payload)
            replaced = None if chunk.is_snapshot else tail_inside(chunk)
            self._ledger.shrink_ram()
            if chunk not in self._tree:
                return None
            if replaced and self._disk is None:
                self._ledger.supersede(replaced)
        if self._disk:
            self._disk.writer.put(chunk, replaced)
        self.shared.offer([chunk])
        return chunk

    def share(
        self, cursor: Cursor, tokens: TokenArray, payload: memoryview, sampled: Iterable[Span], made: Made
    ) -> None:
        """Let other hosts have a chunk that is not kept here as it is: the block around a place where
        conversations part."""
        if not (self.shared.is_shared and self._fits_engine):
            return
        chunk = new_chunk(self.fingerprint, cursor, np.array(tokens, np.int32), len(payload), made)
        chunk.sampled, chunk.payload = tuple(sampled), payload
        chunk.expires = self.transact(lambda ledger: ledger.wanted_until(Ttl.LONG))
        self.shared.offer_loose(chunk)

    def turn_ended(self, label: Label, cursor: Cursor) -> Entry | None:
        """A request has left its state at `cursor`. None when there is nothing there any more."""
        with self._lock:
            if cursor.chunk.is_root or cursor.chunk not in self._tree:
                return None
            entry = self._ledger.turn_ended(label, cursor)
            held = list(chunks_at(cursor)) if self.shared.is_shared else []
        if self._disk:
            self._disk.writer.wake()
        self.shared.offer(held)
        return entry

    def sweep(self) -> int:
        """Give back the RAM of what no request has wanted for its TTL, or delete it (`Keeping.expire`); returns
        how many chunks left RAM only. Blocks on disk for a moment."""
        self.notice_forgotten()
        if self._expiry:
            self._expiry.sweep()
        self.beside()
        with self._lock:
            idle = self._ledger.ram.free_expired(self._ledger.clock.now())
            self.counters.cooled_when_idle += idle
        if idle:
            log.debug("warm: %d chunks that nothing has wanted for their TTL leave RAM", idle)
        if self._disk:
            self._disk.writer.wake()
        return idle

    # ── life ──

    def flush(self) -> None:
        """Block until everything inserted so far is on disk (or the disk has refused it), and where other hosts
        find it."""
        if self._disk:
            self._disk.writer.flush()
        self.shared.flush()

    def close(self) -> None:
        """Write what is left and let go of the folder. Nothing may be called afterwards."""
        self.holders.leave(self)
        self.corpus.close()
        self.shared.close()
        if self._disk:
            self._disk.close()

    def resize_ram(self, budget: int) -> None:
        """Hold so many bytes of RAM at most from now on. What is only in RAM and does not fit is lost."""
        with self._lock:
            self._budgets = replace(self._budgets, ram=budget)
            self._ledger.ram.budget = budget
            self._ledger.shrink_ram()

    def held_bytes(self) -> tuple[int, int]:
        """Returns those in RAM and those on disk."""
        with self._lock:
            return self._ledger.ram.tally.bytes, self._ledger.disk.bytes

    def ram_room(self) -> int:
        """Bytes of RAM by which the store can still grow."""
        with self._lock:
            return max(self._budgets.ram - self._ledger.ram.tally.bytes, 0)

    def stats(self) -> dict[str, object]:
        """Cheap: nothing is walked."""
        files = self._disk.files if self._disk else None
        with self._lock:
            figures = self._ledger.stats(files.side_bytes if files else 0)
        warm = {**figures.pop("warm"), "budget": self._budgets.ram}
        cold = {
            **figures.pop("cold"),
            "budget": self._budgets.disk,
            **(self._disk.writer.stats() if self._disk else {}),
        }
        folder = files.folder.name if files else None
        shared, corpus = self.shared.stats(), self.corpus.stats()
        return {"folder": folder, **figures, "corpus": corpus, "warm": warm, "cold": cold, "remote": shared}

    # ── inside ──

    def _store_late(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were not worth writing have been reused: they are now. Never raises: they are pinned."""
        for chunk in chunks:
            if self._disk:
                with suppress(MemoryError):  # the next lookup that reuses it writes it
                    self._disk.writer.put(chunk, None)

    def forget_here(self, is_one: Callable[[str], bool]) -> None:
        """Another host has forgotten users: leave nothing of them here. Raises OSError."""
        whose, failures = Whose(is_one), []
        users = {one.user for one in self.transact(Ledger.lineages) if one.owner in whose}
        self._forgetter.let_go(whose)  # also of those who have only requests that run
        for user in users:
            try:
                self._forget_here(user, of_user(user))
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _forget(self, user: str, whose: Whose) -> int:
        """Leave nothing of `user`, here, in any file and on the server that others share; returns the bytes of
        files. Raises OSError."""
        # The server first: what comes from there meanwhile goes with the rest.
        try:
            self.shared.forget(user)
        finally:
            swept = self._forget_here(user, whose)
        return swept

    def _forget_here(self, user: str, whose: Whose) -> int:
        if self._disk is not None:
            return self._disk.forget(user, whose)
        self._forgetter.let_go(whose)
        return 0


def expire_closed(root: Path, fingerprint: bytes, keeping: Keeping) -> float:
    """Open a store without its model, which deletes what has outlived its TTL; returns after how many seconds
    something else will have. Raises OSError."""
    budgets = Budgets(ram=0, disk=sys.maxsize)
    store = KvStore(fingerprint, budgets, ChunkFiles(root, fingerprint), keeping=keeping)
    try:
        return store.transact(next_expiry)
    finally:
        store.close()
