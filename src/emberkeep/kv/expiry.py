"""Deleting what has outlived its TTL, for whom a TTL is a promise (`Keeping.expire`).

entry     goes, with its name, when no request has used it for its TTL; a pinned one stays
chunk     goes with the last of the entries that it is a part of: what they share lives as long as the longest
traces    go in the same sweep: what SQLite keeps of deleted rows, and files that do not say when they expire
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from emberkeep.files import is_unused, remove_if_unused
from emberkeep.kv.disk.index import (
    INDEX,
    LaterUses,
    Unreadable,
    is_of_this_version,
    last_change,
    read_meta,
    stores_under,
)
from emberkeep.kv.disk.tier import DiskTier
from emberkeep.kv.entries import Entry, EntryId, latest_tail
from emberkeep.kv.ledger import Ledger, Transact
from emberkeep.kv.policy import Keeping, StoreClock, steady_wall
from emberkeep.kv.tree import Chunk, ChunkKey, chunks_at, store_name
from emberkeep.types.events import MissReason
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_AT_ONCE = 256
"""Chunks that are dropped under the store's lock: a lookup waits for it."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What the ledger holds, to be looked at without the store's lock."""

    now: float
    longest: float
    """The longest TTL."""
    chunks: Sequence[Chunk]
    entries: Sequence[Entry]

    @classmethod
    def copied(cls, ledger: Ledger) -> _Held:
        longest = max(ledger.keeping.ttl.values())
        return cls(ledger.clock.now(), longest, list(ledger.tree), list(ledger.entries))


class Expiry:
    """Safe to use from any thread."""

    def __init__(self, transact: Transact, disk: DiskTier | None) -> None:
        self._transact = transact
        self._disk = disk
        self._lock = threading.Lock()
        self._erased_at = -1
        """How many deletions files have no trace of. None at first: a process that died may have left some."""

    def sweep(self) -> None:
        """Delete what has expired. Blocks on disk. Never raises: what could not be deleted is not served, and is
        tried again by the next sweep."""
        with self._lock:
            try:
                self._drop()
                self._erase()
            except OSError as error:
                log.warning("state that has expired is still on disk, and the next sweep tries again: %s", error)

    def _drop(self) -> None:
        held = self._transact(_Held.copied)
        last = held.now + held.longest
        if too_long := [chunk for chunk in held.chunks if chunk.expires > last]:
            self._transact(partial(_bring_forward, chunks=too_long, expires=last))
        chunks = [chunk for chunk in held.chunks if chunk.expires <= held.now and not chunk.is_pinned]
        entries = self._transact(lambda ledger: [entry for entry in held.entries if has_expired(ledger, entry)])
        pinned, theirs = self._used_elsewhere(chunks, entries)
        entries = [entry for entry in entries if entry.id not in theirs]
        self._transact(lambda ledger: _forget_expired(ledger, entries))

        def drop_some(ledger: Ledger, at: int) -> None:
            gone = drop_expired(ledger, chunks[at : at + _AT_ONCE], pinned)
            ledger.counters.expired_evictions += len(gone)
            ledger.entries.forget_empty()

        for at in range(0, len(chunks), _AT_ONCE):
            self._transact(partial(drop_some, at=at))

    def _used_elsewhere(
        self, chunks: Sequence[Chunk], entries: Sequence[Entry]
    ) -> tuple[set[ChunkKey], set[EntryId]]:
        """Learn how long other processes want these; returns what they have pinned, with its entries. Where the
        index does not say, they are deleted all the same."""
        if self._disk is None or not (chunks or entries):
            return set(), set()
        try:
            self._disk.save_notes()  # else it might still say what was pinned here
            index = self._disk.files.index
            later = index.later_uses([chunk.key for chunk in chunks], [entry.id for entry in entries])
        except OSError as error:
            log.warning("it is not known what other processes still want: %s", error)
            return set(), set()

        def learn(ledger: Ledger) -> set[ChunkKey]:
            _put_off(ledger, later)
            tails = [latest_tail(entry, ledger.tree.by_key) for entry in later.pinned]
            return {chunk.key for tail in tails if tail for chunk in chunks_at(tail)}

        return self._transact(learn), {entry.id for entry in later.pinned}

    def _erase(self) -> None:
        """Raises OSError."""
        if self._disk is None:
            return
        deletions = self._transact(lambda ledger: ledger.deletions)
        if deletions != self._erased_at or self._disk.files.has_undated:
            self._disk.erase()
            self._erased_at = deletions


def _forget_expired(ledger: Ledger, entries: Iterable[Entry]) -> None:
    """Forget what those of `entries` are called that have expired, and files out of reach that have; what others
    want stays, without these names."""
    gone = [entry for entry in entries if ledger.entries.get(entry.id) is entry and has_expired(ledger, entry)]
    for entry in gone:
        ledger.entries.forget(entry)
        ledger.on_delete({entry.lineage.owner})
    now = ledger.clock.now()
    ledger.deletions += len(gone) + ledger.give_up_orphans(lambda row: row.expires <= now)


def _put_off(ledger: Ledger, later: LaterUses) -> None:
    """Other processes on the folder have used chunks and entries, too."""
    for key, expires in later.expires.items():
        if chunk := ledger.tree.get(key):
            chunk.expires = max(chunk.expires, expires)
    for id_, used_at in later.used_at.items():
        if entry := ledger.entries.get(id_):
            entry.used_at = max(entry.used_at, used_at)


def _bring_forward(ledger: Ledger, chunks: Iterable[Chunk], expires: float) -> None:
    """No chunk is wanted for longer than the longest TTL that there is now."""
    for chunk in chunks:
        chunk.expires = min(chunk.expires, expires)
        ledger.entries.changes.used[chunk.key] = chunk


def drop_expired(ledger: Ledger, chunks: Iterable[Chunk], but: Container[ChunkKey] = ()) -> list[Chunk]:
    """Drop those of `chunks` that are not wanted any more, and what they grow from, leaves first. Returns what
    was dropped."""
    now = ledger.clock.now()
    victims: list[Chunk] = []
    for end in chunks:
        chunk: Chunk | None = end
        while chunk and not chunk.is_root and chunk in ledger.tree and chunk.expires <= now and chunk.may_go:
            if chunk.key in but:
                break
            victims += ledger.drop(chunk, MissReason.EXPIRED)
            chunk = chunk.parent
    return victims


def has_expired(ledger: Ledger, entry: Entry) -> bool:
    """No request has wanted it for its TTL, and it is not pinned."""
    return not entry.is_pinned and entry.used_at + ledger.keeping.ttl[entry.ttl] <= ledger.clock.now()


ExpireStore = Callable[[Path, bytes, Keeping], float]
"""Opens the store of a fingerprint under a root, which deletes what has outlived its TTL. Returns after how many
seconds something else will have. Raises OSError."""


class UnusedStores:
    """Looks after those of one root. Safe to use from any thread; blocks on disk. Never raises."""

    def __init__(
        self, root: Path, keeping: Keeping, expire: ExpireStore, wall: Callable[[], float] | None = None
    ) -> None:
        self._root = root
        self._keeping = keeping
        self._expire_store = expire
        self._wall = wall or steady_wall()
        self._lock = threading.Lock()
        self._seen: dict[Path, tuple[float, float]] = {}
        """When a store was last changed, and when something of it expires, in seconds since 1970."""

    def sweep(self) -> None:
        """Delete what has outlived its TTL. Opens those stores only in which something may have."""
        with self._lock:
            try:
                for path in stores_under(self._root):
                    changed, due = self._seen.get(path, (None, 0.0))
                    if (changed != last_change(path) or self._wall() >= due) and is_unused(path, "in-use"):
                        self._expire(path)
            except OSError as error:
                log.warning("cannot look for state that has expired: %s", error)

    def _expire(self, path: Path) -> None:
        try:
            fingerprint = _fingerprint(path)
            if fingerprint is None:
                self._give_up(path)
                return
            last_used = (path / INDEX).stat()
            keeping = replace(self._keeping, clock=lambda saved: StoreClock(saved, wall=self._wall))
            due = self._wall() + self._expire_store(path.parent, fingerprint, keeping)
            os.utime(path / INDEX, ns=(last_used.st_atime_ns, last_used.st_mtime_ns))  # looking is not using
            self._seen[path] = last_change(path), due
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            log.warning("the index of %s cannot be understood: %r", path, error)
            self._give_up(path)
        except OSError as error:
            log.warning("cannot look for state that has expired in %s: %s", path, error)

    def _give_up(self, path: Path) -> None:
        """It cannot be told when what is in it expires: it goes when all of it has."""
        if self._wall() - last_change(path) > max(self._keeping.ttl.values()) and remove_if_unused(path, "in-use"):
            log.info("removed a store that has expired, and that cannot be read: %s", path)


def next_expiry(ledger: Ledger) -> float:
    """Seconds until something has outlived its TTL that has not yet; infinite where nothing does."""
    ttl, now = ledger.keeping.ttl, ledger.clock.now()
    ends = [entry.used_at + ttl[entry.ttl] for entry in ledger.entries]
    ends += [chunk.expires for chunk in ledger.tree]
    return min((end - now for end in ends if end > now), default=inf)


def _fingerprint(path: Path) -> bytes | None:
    """Whose store it is; None where its index does not say. Raises OSError for what may pass."""
    index = path / INDEX
    if not index.exists() or not index.stat().st_size:
        return None
    try:
        found = read_meta(index)["fingerprint"]
        return found if store_name(found) == path.name and is_of_this_version(index) else None
    except (Unreadable, LookupError, TypeError):
        return None
