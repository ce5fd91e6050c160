"""What the store holds, as people ask for it: list, show, pin, remove, and why something is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from emberkeep.errors import StoreFailed
from emberkeep.kv.books import Books
from emberkeep.kv.entries import Entry, EntryId
from emberkeep.kv.forgotten import Forgetter
from emberkeep.kv.policy import StoreCounters
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, path_to
from emberkeep.token_arrays import TokenArray
from emberkeep.types import (
    SHARED,
    CacheEntry,
    EntryKind,
    Label,
    Lineage,
    MissReason,
    Removed,
    Ttl,
)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The longest stored prefix of a prompt that belongs to somebody else."""

    user: str
    tokens: int


class Catalogue:
    """Safe to use from any thread. Removing blocks on disk, and raises StoreFailed when files are still there
    afterwards; the rest is tree work under the store's lock."""

    def __init__(
        self,
        books: Books,
        lock: threading.Lock,
        now: Callable[[], float],
        ttl: Mapping[Ttl, float],
        counters: StoreCounters,
        *,
        forgetter: Forgetter,
    ) -> None:
        self._books = books
        self._lock = lock
        self._forgetter = forgetter
        self._now = now
        self._ttl = ttl
        self._counters = counters

    # ── looking ──

    def entries(self) -> list[CacheEntry]:
        """Everything that is stored, the latest used first."""
        with self._lock:
            found = [(entry, self._books.tail_of(entry)) for entry in self._books.entries.values()]
            listed = [self._view(entry, tail) for entry, tail in found if tail is not None]
            listed += [self._view(entry, tail) for entry, tail in self._unnamed()]
        return sorted(listed, key=lambda entry: entry.idle_s)

    def entry(self, entry_id: EntryId) -> CacheEntry | None:
        with self._lock:
            found = self._find(entry_id)
            return self._view(*found) if found else None

    def tail(self, entry_id: EntryId) -> Cursor | None:
        """Where an entry's latest state ends, or None where there is no such entry."""
        with self._lock:
            found = self._find(entry_id)
            return found[1] if found else None

    def elsewhere(self, owner: str, tokens: TokenArray) -> Elsewhere | None:
        """Who else has the longest beginning of `tokens`: for operators, never for a user."""
        with self._lock:
            others = [one for one in self._books.lineages() if one.owner not in (owner, SHARED)]
            places = [self._books.deepest(self._books.origin(other), tokens) for other in others]
        best = max(places, key=lambda place: place.position, default=None)
        return Elsewhere(best.lineage.user, best.position) if best and best.position else None

    def lineages(self) -> list[Lineage]:
        with self._lock:
            return self._books.lineages()

    def expired(self, ids: Iterable[EntryId]) -> list[EntryId]:
        """Those of `ids` that nobody has wanted for their TTL."""
        with self._lock:
            now = self._now()
            found = [self._books.entries.get(entry_id) for entry_id in ids]
            return [e.id for e in found if e and not e.is_pinned and e.used_at + self._ttl[e.ttl] <= now]

    # ── changing ──

    def pin(self, entry_id: EntryId, pinned: bool) -> bool:
        """False where there is no such entry, or it has no name to be pinned by."""
        with self._lock:
            entry = self._books.entries.get(entry_id)
            if entry is not None:
                self._books.pin(entry, pinned)
            return entry is not None

    def remove(self, entry_id: EntryId) -> Removed | None:
        """Remove an entry and what only it uses, pinned or not; None where there is no such entry."""
        with self._lock:
            entry = self._books.entries.get(entry_id)
            if entry is not None:
                gone = self._books.remove_entry(entry)
            elif found := self._find(entry_id):
                gone = self._books.drop(found[1].chunk, MissReason.REMOVED)
            else:
                return None
        return self._removed(gone, entries=1)

    def forget_user(self, user: str) -> Removed:
        """Leave nothing of one user, under any salt, in any file or process."""
        return self._forgetter.forget(user)

    def gc(self) -> Removed:
        """Remove everything that has outlived its TTL and is not pinned."""
        with self._lock:
            before = len(self._books.entries)
            gone = self._books.drop_expired(self._now())
            self._books.forget_empty_entries()
            entries = before - len(self._books.entries)
        return self._removed(gone, entries=entries)

    # ── inside ──

    def _removed(self, gone: list[Chunk], entries: int) -> Removed:
        self._counters.removed_chunks += len(gone)
        self._forgetter.remove_leaving()
        with self._lock:
            left = sum(chunk.key in self._books.leaving for chunk in gone)
        if left:
            raise StoreFailed(f"{left} files could not be removed from the disk: they are tried again, and count.")
        return Removed(
            entries=entries, tokens=sum(len(c.tokens) for c in gone), bytes=sum(chunk.bytes for chunk in gone)
        )

    def _find(self, entry_id: EntryId) -> tuple[Entry, Cursor] | None:
        entry = self._books.entries.get(entry_id)
        if entry is None:
            return next((found for found in self._unnamed() if found[0].id == entry_id), None)
        tail = self._books.tail_of(entry)
        return (entry, tail) if tail else None

    def _unnamed(self) -> list[tuple[Entry, Cursor]]:
        """Ends of stored text that no entry leads to: the index was lost, or a turn was cut off by a crash."""
        named: set[ChunkKey] = set()
        for entry in self._books.entries.values():
            for tail in entry.tails:
                chunk = self._books.get(tail.chunk)
                while chunk and not chunk.is_root and chunk.key not in named:
                    named.add(chunk.key)
                    chunk = chunk.parent
        ends = [c for c in self._books if c.key not in named and not c.is_snapshot and _ends_here(c)]
        return [(_nameless(chunk), Cursor(chunk, len(chunk.tokens), chunk.lineage)) for chunk in ends]

    def _view(self, entry: Entry, tail: Cursor) -> CacheEntry:
        segments = path_to(tail)
        now = self._now()
        last = tail.chunk
        ttl_s = self._ttl[entry.ttl]
        used_at = entry.used_at if entry.turns else last.expires - ttl_s
        return CacheEntry(
            id=entry.id,
            kind=entry.label.kind,
            name=entry.label.name,
            head=entry.label.head,
            user=tail.lineage.user,
            is_shared=tail.lineage.owner == SHARED,
            tokens=tail.position,
            bytes=sum(segment.chunk.bytes for segment in segments),
            warm_tokens=sum(s.end - s.start for s in segments if s.chunk.payload is not None),
            cold_tokens=sum(s.end - s.start for s in segments if s.chunk.on_disk),
            idle_s=max(now - used_at, 0.0),
            hits=last.hits,
            turns=entry.turns,
            branches=max(sum(self._books.get(t.chunk) is not None for t in entry.tails), 1),
            ttl=entry.ttl,
            expires_in_s=used_at + ttl_s - now,
            is_pinned=entry.is_pinned,
            kv_bits=tail.lineage.bits,
            repair=tail.lineage.repair,
        )


def spelled(tail: Cursor) -> TokenArray:
    """All tokens up to `tail`. Chunks do not change, so no lock is needed."""
    parts = [s.chunk.tokens[: s.end - s.start] for s in path_to(tail)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _ends_here(chunk: Chunk) -> bool:
    return all(child.is_snapshot for child in chunk.children())


def _nameless(chunk: Chunk) -> Entry:
    label = Label(EntryKind.PREFIX, f"chunk:{chunk.key.hex()}", "", Ttl.EXTENDED)
    return Entry.new(label, chunk.lineage)
