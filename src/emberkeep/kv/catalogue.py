"""What the store holds, as people ask for it: list, show, pin, remove, and why something is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from emberkeep.errors import StoreFailed
from emberkeep.kv.entries import Entry, EntryId, latest_tail, nameless
from emberkeep.kv.expiry import drop_expired, has_expired
from emberkeep.kv.forgetting import Whose, of_user
from emberkeep.kv.ledger import Ledger, Transact
from emberkeep.kv.lookups import StillElsewhere
from emberkeep.kv.outline import Runs, gently, outline
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import CacheEntry, CacheTree, Removed
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The longest stored prefix of a prompt that belongs to another user."""

    user: str
    tokens: int


class Catalogue:
    """Safe to use from any thread. Removing blocks on disk, and raises StoreFailed when files cannot be removed;
    the rest is short work on the ledger."""

    def __init__(
        self,
        transact: Transact,
        remove_files: Callable[[], set[ChunkKey]],
        remove_elsewhere: Callable[[list[Chunk]], None],
        forget: Callable[[str, Whose], int],
    ) -> None:
        """`remove_files` removes those that the ledger has let go of, and returns which it could not.
        `remove_elsewhere` sees to it that other hosts do not find chunks any more. `forget` leaves nothing of a
        user in this process and in any file, returns the bytes of files, and raises OSError when something may be
        left."""
        self._transact = transact
        self._remove_files = remove_files
        self._remove_elsewhere = remove_elsewhere
        self._forget = forget

    # ── looking ──

    def entries(self) -> list[CacheEntry]:
        """Everything that is stored, the latest used first. The store is held up only while references are
        copied."""
        held = self._transact(lambda ledger: _Held(ledger, copied=True))
        listed = [_view(held, *found) for found in gently(held.all())]
        return sorted(listed, key=lambda entry: entry.idle_s)

    def entry(self, entry_id: EntryId) -> CacheEntry | None:
        def show(ledger: Ledger) -> CacheEntry | None:
            held = _Held(ledger)
            found = held.find(entry_id)
            return _view(held, *found) if found else None

        return self._transact(show)

    def tail(self, entry_id: EntryId) -> Cursor | None:
        """Where an entry's latest state ends, or None where there is no such entry."""
        found = self._transact(lambda ledger: _Held(ledger).find(entry_id))
        return found[1] if found else None

    def elsewhere(self, owner: str, tokens: TokenArray) -> Elsewhere | None:
        """Who else has the longest beginning of `tokens`: for operators, never for a user."""

        def look(ledger: Ledger) -> list[Cursor]:
            others = [one for one in ledger.lineages() if one.owner not in (owner, SHARED)]
            return [ledger.tree.deepest(ledger.tree.origin(other), tokens) for other in others]

        best = max(self._transact(look), key=lambda place: place.position, default=None)
        return Elsewhere(best.lineage.user, best.position) if best and best.position else None

    def tree(self, hot: Mapping[EntryId, int], limit: int, at: str = "") -> CacheTree | None:
        """Everything that is stored as a tree of at most `limit` nodes, or what is at and below one of them; None
        where there is no such node. `hot`: entries whose latest state is in the engine, with its length.

        The store is held up only while references are copied.
        """

        def copy(ledger: Ledger) -> tuple[list[Chunk], list[Entry], list[tuple[Cursor, int]]]:
            known = [(ledger.entries.get(entry_id), length) for entry_id, length in hot.items()]
            found = [(entry and ledger.entries.tail_of(entry), length) for entry, length in known]
            return list(ledger.tree), list(ledger.entries), [(tail, length) for tail, length in found if tail]

        chunks, entries, resident = self._transact(copy)
        return outline(Runs(chunks, resident), entries, limit, at)

    def lineages(self) -> list[Lineage]:
        return self._transact(Ledger.lineages)

    def expired(self, ids: Iterable[EntryId]) -> list[EntryId]:
        """Returns those of `ids` that no request has wanted for their TTL; where such are deleted, those that
        are gone."""

        def look(ledger: Ledger) -> list[EntryId]:
            known = {entry_id: ledger.entries.get(entry_id) for entry_id in ids}
            is_gone = ledger.keeping.expire
            return [id_ for id_, entry in known.items() if (has_expired(ledger, entry) if entry else is_gone)]

        return self._transact(look)

    # ── changing ──

    def pin(self, entry_id: EntryId, pinned: bool) -> bool:
        """False where there is no such entry, or it has no name to be pinned by."""

        def change(ledger: Ledger) -> bool:
            entry = ledger.entries.get(entry_id)
            if entry is not None:
                ledger.entries.pin(entry, pinned)
            return entry is not None

        return self._transact(change)

    def remove(self, entry_id: EntryId) -> Removed | None:
        """Remove an entry and what only it uses, pinned or not; None where there is no such entry."""

        def change(ledger: Ledger) -> list[Chunk] | None:
            if entry := ledger.entries.get(entry_id):
                return ledger.remove_entry(entry)
            if found := _Held(ledger).find(entry_id):
                return ledger.drop(found[1].chunk, MissReason.REMOVED)
            return None

        gone = self._transact(change)
        if gone is None:
            return None
        self._remove_elsewhere(gone)
        return self._removed(gone, entries=1)

    def gc(self) -> Removed:
        """Remove everything that has outlived its TTL and is not pinned."""

        def change(ledger: Ledger) -> tuple[list[Chunk], int]:
            before = len(ledger.entries)
            gone = drop_expired(ledger, list(ledger.tree))
            ledger.entries.forget_empty()
            return gone, before - len(ledger.entries)

        gone, entries = self._transact(change)
        return self._removed(gone, entries)

    def forget_user(self, user: str) -> Removed:
        """Leave nothing of one user, under any salt, in any file or process.

        Raises StoreFailed when something may be left in a file: what was possible is done, and what was not is
        tried again.
        """
        whose = of_user(user)
        removed = self._transact(lambda ledger: _held_by(ledger, whose))
        try:
            swept = self._forget(user, whose)
        except OSError as error:
            if isinstance(error, StillElsewhere):
                raise StoreFailed(
                    f"Nothing of that user is left here, but {error}: it is asked again until this server stops; "
                    "ask again, too."
                ) from error
            raise StoreFailed(
                f"Not everything of that user could be removed from the disk ({error.strerror or error}): "
                "what is left is not used any more; ask again when the disk is well."
            ) from error
        return Removed(removed.entries, removed.tokens, max(removed.bytes, swept))

    def _removed(self, gone: list[Chunk], entries: int) -> Removed:
        def count(ledger: Ledger) -> None:
            ledger.counters.removed_chunks += len(gone)

        self._transact(count)
        # Not what the ledger says afterwards: a file that was just being written is removed by who wrote it.
        left = len(self._remove_files() & {chunk.key for chunk in gone})
        if left:
            raise StoreFailed(f"{left} files could not be removed from the disk: they are tried again, and count.")
        return Removed(entries, tokens=sum(len(c.tokens) for c in gone), bytes=sum(chunk.bytes for chunk in gone))


class _Held:
    """What the ledger holds: as it is, under the store's lock, or `copied`, to be read without it."""

    def __init__(self, ledger: Ledger, *, copied: bool = False) -> None:
        self._entries: Iterable[Entry] = list(ledger.entries) if copied else ledger.entries
        self._entry = ledger.entries.get
        self.chunks = dict(ledger.tree.by_key) if copied else ledger.tree.by_key
        self.now = ledger.clock.now()
        self.ttl = ledger.keeping.ttl
        self._before: dict[ChunkKey, _Sums] = {}

    def all(self) -> list[tuple[Entry, Cursor]]:
        """Every entry that there is still something of, with where its latest state ends."""
        named = [(entry, latest_tail(entry, self.chunks)) for entry in self._entries]
        return [*((entry, tail) for entry, tail in named if tail), *self._unnamed()]

    def find(self, entry_id: EntryId) -> tuple[Entry, Cursor] | None:
        """Must not be called on a copy."""
        entry = self._entry(entry_id)
        if entry is None:
            return next((found for found in self._unnamed() if found[0].id == entry_id), None)
        tail = latest_tail(entry, self.chunks)
        return (entry, tail) if tail else None

    def sums_to(self, tail: Cursor) -> _Sums:
        """Sums up everything from position 0 to `tail`, and what many entries begin with only once."""
        path, chunk = [tail.chunk], tail.chunk.parent
        while chunk is not None and not chunk.is_root and path[-1].key not in self._before:
            path.append(chunk)
            chunk = chunk.parent
        sums = self._before.get(path[-1].key, _Sums(0, 0, 0))
        for above, chunk in pairwise(reversed(path)):
            sums = self._before[chunk.key] = sums.with_part(above, chunk.take)
        return sums.with_part(tail.chunk, tail.used)

    def _unnamed(self) -> list[tuple[Entry, Cursor]]:
        """Ends of stored text that no entry leads to: the index was lost, or a turn was cut off by a crash."""
        ends_of_entries = {tail.chunk for entry in self._entries for tail in entry.tails}
        goes_on = {id(chunk.parent) for chunk in self.chunks.values() if not chunk.is_snapshot}
        texts = (chunk for chunk in self.chunks.values() if not chunk.is_snapshot)
        ends = [chunk for chunk in texts if id(chunk) not in goes_on and chunk.key not in ends_of_entries]
        return [(nameless(chunk), Cursor(chunk, len(chunk.tokens), chunk.lineage)) for chunk in ends]


def _held_by(ledger: Ledger, whose: Whose) -> Removed:
    theirs = {lineage for lineage in ledger.lineages() if lineage.owner in whose}
    chunks = [chunk for chunk in ledger.tree if chunk.lineage in theirs]
    ledger.counters.removed_chunks += len(chunks)
    return Removed(
        entries=sum(entry.lineage in theirs for entry in ledger.entries),
        tokens=sum(len(chunk.tokens) for chunk in chunks),
        bytes=sum(chunk.bytes for chunk in chunks),
    )


class _Sums(NamedTuple):
    bytes: int
    warm: int
    cold: int

    def with_part(self, chunk: Chunk, used: int) -> _Sums:
        """Adds the first `used` tokens of a chunk, whose bytes count whole."""
        warm, cold = used * (chunk.payload is not None), used * chunk.on_disk
        return _Sums(self.bytes + chunk.bytes * (used > 0), self.warm + warm, self.cold + cold)


def _view(held: _Held, entry: Entry, tail: Cursor) -> CacheEntry:
    sums = held.sums_to(tail)
    now = held.now
    last = tail.chunk
    ttl_s = held.ttl[entry.ttl]
    used_at = entry.used_at if entry.turns else last.expires - ttl_s
    return CacheEntry(
        id=entry.id,
        kind=entry.label.kind,
        name=entry.label.name,
        head=entry.label.head,
        user=tail.lineage.user,
        is_shared=tail.lineage.owner == SHARED,
        tokens=tail.position,
        bytes=sums.bytes,
        warm_tokens=sums.warm,
        cold_tokens=sums.cold,
        idle_s=max(now - used_at, 0.0),
        hits=last.hits,
        turns=entry.turns,
        branches=max(sum(t.chunk in held.chunks for t in entry.tails), 1),
        ttl=entry.ttl,
        expires_in_s=used_at + ttl_s - now,
        is_pinned=entry.is_pinned,
        kv_bits=tail.lineage.bits,
        repair=tail.lineage.repair,
    )
