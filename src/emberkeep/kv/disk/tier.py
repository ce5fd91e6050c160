"""The disk tier: chunks in files under a byte budget, and the threads that read and write them.

It decides what is worth writing, makes room, removes what the ledger has let go of, and saves what only the index
knows. It reaches the ledger through its store, for a moment each time, and never while it waits for the disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Any

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.chunkfile import most_bytes
from emberkeep.kv.disk.index import description_of
from emberkeep.kv.disk.transfers import FetchState, Reader, Writer
from emberkeep.kv.forgetting import Forgetter, Whose
from emberkeep.kv.ledger import Ledger, Transact
from emberkeep.kv.policy import LOW_WATER, CostModel, StoreCounters, in_turn
from emberkeep.kv.tree import Chunk, ChunkKey
from emberkeep.types.events import MissReason
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")


MOST_FILES = 250_000
"""Chunks on disk, however small they are: each takes 1.5 kB of RAM, and 20 µs when the store is opened."""
_RETRY_S = 10.0
"""How long files that could not be removed or read are left alone."""
_MOST_FAILURES = 16
"""Removals that may fail one after the other: a disk that refuses these refuses the others."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    budget: int
    """Bytes, for all stores under the same root together."""
    ready_bytes: int
    """How much memory may be prepared for reading."""
    about: Mapping[str, Any]
    """Written into the store's folder, for people and tools that come without the model."""
    expire: bool = False
    """What has outlived its TTL is deleted, as in `Keeping`."""


class DiskTier:
    """Safe to use from any thread. Methods block on disk unless they say otherwise."""

    def __init__(
        self,
        files: ChunkFiles,
        transact: Transact,
        forgetter: Forgetter,
        counters: StoreCounters,
        costs: CostModel,
        settings: DiskSettings,
        typical_size: int,
    ) -> None:
        """`typical_size` is that of the files there."""
        self.files = files
        self._transact = transact
        self._forgetter = forgetter
        self._counters = counters
        self._settings = settings
        self._other_stores: int | None = None
        """Bytes of other fingerprints' stores; None until looked at."""
        self._removing = threading.Lock()
        self._telling = threading.Lock()
        """Held so that the index is not told of an entry after it was told that it is forgotten."""
        self._look_again_at = 0.0
        self._unreadable: set[ChunkKey] = set()
        """Orphans that could not be read, until `_look_again_at`."""
        ready = settings.ready_bytes
        self.reader = Reader(files, transact, counters, costs, typical_size=typical_size, ready_bytes=ready)
        self.writer = Writer(files, self, tells_expiry=settings.expire)

    # ── for the store ──

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self._try_to_save_notes()
        self.remove_files()
        self.files.close()

    def forget(self, user: str, whose: Whose) -> int:
        """Leave no byte of a user in any file, of any process; returns the bytes that went.

        Raises OSError when something may be left: it is tried again, and the ledger has let go of it.
        """
        try:
            return self._forget(user, whose)
        except OSError:
            self._forgetter.let_go(whose)
            raise

    def _forget(self, user: str, whose: Whose) -> int:
        swept = 0
        forgotten = self.files.forgotten
        try:
            forgetting = forgotten.begin(user)
        except OSError:
            # A full disk: what goes first makes the room to say so.
            self._forgetter.let_go(whose)
            swept = self.files.sweep(whose)
            forgetting = forgotten.begin(user)
        try:
            self._forgetter.notice()
            self.writer.settle()
            try:
                swept += self.files.sweep(whose)
            finally:
                self.remove_files()  # most of it is gone by now
            forgotten.done(forgetting)
        except OSError:
            forgotten.owe(forgetting, whose)
            raise
        return swept

    def erase(self) -> None:
        """Leave nothing in any file of what the ledger has let go of, nor what says nothing of when it expires.

        Raises OSError when something may be left.
        """
        self.writer.settle()
        left = self.remove_files()
        self.save_notes()
        self.files.erase_traces()
        if left:
            raise OSError(f"{len(left)} files cannot be removed")

    def save_notes(self) -> None:
        """Tell the index what only it will know. Raises OSError."""
        with self.files.forgotten.held(), self._telling:  # no process can begin to forget meanwhile
            self._forgetter.notice()
            unsaved = self._transact(Ledger.take_unsaved)
            if unsaved is None:
                return
            try:
                self.files.index.save_notes(unsaved, self._settings.about)
            except BaseException:
                self._transact(lambda ledger: ledger.entries.put_back(unsaved.changes))
                raise

    def remove_files(self) -> set[ChunkKey]:
        """Remove the files that the ledger has let go of; returns which could not be. They count, and are tried
        again."""
        if not self._transact(lambda ledger: bool(ledger.to_remove)):
            return set()
        with self._removing:  # a key may come back between two who remove it
            keys = self._transact(lambda ledger: list(ledger.to_remove))
            left = set(keys)
            failures = 0
            for begin in range(0, len(keys), _MOST_FAILURES):
                some = keys[begin : begin + _MOST_FAILURES]
                gone, error = self.files.remove(some)
                self._transact(partial(Ledger.forget_files, keys=gone))
                left -= gone
                if error is not None:
                    log.warning("a file of the store cannot be removed: %s", error)
                    failures += len(some) - len(gone)
                if failures >= _MOST_FAILURES:
                    break
            return left

    # ── for the writer, on its thread ──

    def is_worth_writing(self, chunk: Chunk, batch: Mapping[ChunkKey, int]) -> bool:
        """Whether to write a chunk. `batch`: what is about to be written with it, in bytes."""
        is_worth_it = (
            self._transact(lambda ledger: ledger.may_write(chunk, batch))
            and self._is_free(chunk.key)
            and self._make_room(most_bytes(chunk) + sum(batch.values()), chunk)
        )
        if not is_worth_it:
            self._transact(lambda ledger: ledger.skip_write(chunk))
        return is_worth_it

    def is_wanted(self, key: ChunkKey) -> bool:
        """Whether a file that is written should come into its place, while no user can be forgotten.

        Raises OSError.
        """
        self._forgetter.notice()
        return self._transact(lambda ledger: ledger.admit_file(key))

    def complete_store(self, sizes: Mapping[ChunkKey, int], replaced: list[Chunk]) -> None:
        """Enter what was written; what is not wanted any more is removed again, and so are tails inside it."""
        self._transact(lambda ledger: ledger.enter_files(sizes))
        self.remove_files()
        self._transact(Ledger.shrink_ram)
        for tail in replaced:
            self._transact(partial(Ledger.supersede, tail=tail))
            self.remove_files()
        self._forgetter.refresh()  # else the next request would have to read past these rows

    def tidy(self) -> None:
        """Whenever there is nothing to write. Raises OSError."""
        self._forgetter.notice()
        self.remove_files()
        self._check_orphans()
        self._try_again()
        self._make_room(0)
        # Uses alone wait for company: while a prompt is evaluated there are new ones all the time.
        if self._transact(lambda ledger: ledger.entries.changes.is_pressing):
            self._try_to_save_notes()

    # ── inside ──

    def _is_free(self, key: ChunkKey) -> bool:
        """No old file stands in its place."""
        return self._transact(lambda ledger: key not in ledger.to_remove) or key not in self.remove_files()

    def _check_orphans(self) -> None:
        """Chunks below one that was damaged and computed again: are they any better? Parents come first."""
        while rows := self._transact(lambda ledger: ledger.orphans.below(ledger.tree.by_key)):
            rows = [row for row in rows if row.key not in self._unreadable]
            if not rows:
                return
            for row in rows:
                result = self.reader.check(description_of(row, self.files.fingerprint))
                self._counters.damaged_chunks += result.state is FetchState.DAMAGED
                self._counters.vanished_chunks += result.state is FetchState.GONE
                if result.state is FetchState.UNREADABLE or (result.payload is None and result.is_there):
                    self._unreadable.add(row.key)
                else:
                    is_whole = result.state is FetchState.READY
                    self._transact(partial(Ledger.settle_orphan, row=row, is_whole=is_whole))

    def _try_again(self) -> None:
        """Look again at what could not be read, and for what is left of users who were forgotten."""
        if monotonic() < self._look_again_at:
            return
        self._look_again_at = monotonic() + _RETRY_S
        self._unreadable.clear()
        if owed := self.files.forgotten.owed:
            for _, whose in owed:  # what has come back since goes with the rest
                self._transact(partial(Ledger.forget, whose=whose))
            self.files.finish_forgetting()
            self.remove_files()

    def _make_room(self, incoming: int, newcomer: Chunk | None = None) -> bool:
        """Evict until so many bytes more fit into the budget; False when they cannot, or not without giving up
        what is worth more than the `newcomer`.

        While another process evicts, this one trusts it to.
        """
        if self._other_stores is not None and self._fits(incoming):
            return True
        self._forgetter.refresh()
        with self.files.evicting() as alone:
            if not alone:
                return True
            self.files.clean_up()
            own = self._transact(lambda ledger: ledger.disk_bytes) + self.files.side_bytes
            allowed = max(self._settings.budget - incoming - own, 0)
            self._other_stores = self.files.shrink_other_stores(allowed)
            if not self._fits(incoming):
                self._transact(Ledger.give_up_orphans)
                self.remove_files()
                self.files.drop_strays()
            self._evict(incoming, newcomer)
        return self._fits(incoming)

    def _fits(self, incoming: int) -> bool:
        chunks, size = self._transact(lambda ledger: (ledger.disk.chunks, ledger.disk_bytes))
        return chunks < MOST_FILES and size <= self._room(incoming)

    def _room(self, incoming: int) -> int:
        """Bytes of the budget for files that the ledger knows."""
        return self._settings.budget - incoming - self.files.side_bytes - (self._other_stores or 0)

    def _evict(self, incoming: int, newcomer: Chunk | None) -> None:
        """Nothing while the budget holds; else down to its low-water mark, deepest first."""

        def count_to_remove() -> int:
            return self._transact(lambda ledger: len(ledger.to_remove))

        stuck = count_to_remove()
        while not self._fits(incoming):
            going = partial(evict, room=self._room(incoming), most_files=MOST_FILES, newcomer=newcomer)
            if not self._transact(going):
                return
            self.remove_files()
            if count_to_remove() > stuck:
                return  # a disk that gives nothing back: evicting more would only lose it

    def _try_to_save_notes(self) -> None:
        """Never raises."""
        try:
            self.save_notes()
        except OSError as error:
            log.warning("cannot save when chunks were last used: %s", error)


# ── what goes when room is short: with the store's lock held ──


def evict(ledger: Ledger, room: float, most_files: int = MOST_FILES, newcomer: Chunk | None = None) -> list[Chunk]:
    """Drop chunks on disk until all files that are known fit into `room` bytes, down to the low-water mark;
    likewise for their number. Nothing while they fit; returns what was dropped.

    Only leaves go that no lookup uses and that are not pinned: expired ones first, then by worth. With a
    `newcomer`, only what is worth less than it.
    """
    now = ledger.clock.now()
    allowed = room - ledger.to_remove_bytes - ledger.orphans.bytes
    if ledger.disk.bytes <= allowed and ledger.disk.chunks < most_files:
        return []
    target = allowed * LOW_WATER if ledger.disk.bytes > allowed else allowed
    most = int(most_files * LOW_WATER) if ledger.disk.chunks >= most_files else most_files

    def rank(chunk: Chunk) -> tuple[bool, float]:
        return chunk.expires > now, ledger.worth(chunk)

    limit = (True, ledger.worth(newcomer)) if newcomer else (True, float("inf"))
    victims: list[Chunk] = []
    for chunk in in_turn(ledger.tree, lambda one: one.on_disk and one.may_go, rank):
        if (ledger.disk.bytes <= target and ledger.disk.chunks <= most) or rank(chunk) >= limit:
            break
        victims.append(chunk)
        ledger.drop(chunk, MissReason.EVICTED if chunk.expires > now else MissReason.EXPIRED)
    expired = sum(chunk.expires <= now for chunk in victims)
    ledger.counters.expired_evictions += expired
    ledger.counters.cold_evictions += len(victims) - expired
    if victims and log.isEnabledFor(logging.DEBUG):
        size = sum(chunk.bytes for chunk in victims)
        log.debug("cold: %d chunks are evicted, %d of them expired, %d bytes", len(victims), expired, size)
    return victims
