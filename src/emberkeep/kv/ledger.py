"""The store's ledger: which chunks exist, where their bytes are, and what has to go when room is short.

No locks, and no I/O but lines of the log at `debug`: `KvStore` calls everything here with its lock held.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from emberkeep.kv.content import ContentIndex
from emberkeep.kv.entries import Entries, Entry, Unsaved, ghost_of
from emberkeep.kv.policy import (
    ChunkRow,
    Keeping,
    Orphans,
    RamTier,
    Rhythm,
    StoreCounters,
    Tally,
    WriteBudget,
    worth_writing,
)
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, RadixTree, Span, chunks_at
from emberkeep.token_arrays import common_prefix
from emberkeep.types.cache import Label
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Ttl

log = logging.getLogger("emberkeep.kv")

T = TypeVar("T")


class Transact(Protocol):
    def __call__(self, change: Callable[[Ledger], T]) -> T:
        """Run `change` while nothing else looks at the ledger. It must be short, and must not block."""


class Ledger:
    """The tree, the RAM tier, the entries, and which files there are."""

    def __init__(
        self, keeping: Keeping | None = None, ram_budget: int = sys.maxsize, counters: StoreCounters | None = None
    ) -> None:
        self.keeping = keeping or Keeping()
        self.counters = counters or StoreCounters()
        self.clock = self.keeping.clock(None)
        self.writes = WriteBudget(self.keeping.writes_per_day)
        self.rhythm = Rhythm()
        self.tick = 0
        """Goes up with every lookup: the order of uses, whatever the machine's clock does."""
        self.tree = RadixTree()
        self.ram = RamTier(ram_budget)
        self.entries = Entries(self.tree)
        self.entries.tells_ghosts = not self.keeping.expire  # a ghost has its owner's name, and no end
        self.disk = Tally()
        self.orphans = Orphans()
        self.to_remove: dict[ChunkKey, int] = {}
        """Bytes of files that are still there and that nothing here leads to any more."""
        self.to_remove_bytes = 0
        self.unwritten: set[ChunkKey] = set()
        """In RAM only, because they were not worth writing when their turn came."""
        self.arriving: set[ChunkKey] = set()
        """Files that come into their places just now: others see them before `enter_files` does."""
        self.unwelcome: set[ChunkKey] = set()
        """Files of chunks that went while they came."""
        self.deletions = 0
        """Chunks that left, but for tails that are inside others: files may have traces of them."""
        self._content: ContentIndex | None = None
        self.on_delete: Callable[[Container[str]], None] = lambda owners: None
        """It is told whose chunks were removed, have expired or were lost: others may have removed those. It must
        be quick, and must not call the store."""

    @property
    def disk_bytes(self) -> int:
        """What every file that is known takes, whether a lookup can reach it or not."""
        return self.disk.bytes + self.to_remove_bytes + self.orphans.bytes

    def lineages(self) -> list[Lineage]:
        """Names all who have something here."""
        waiting = (Lineage.parse(row.namespace) for row in self.orphans)
        entered = (entry.lineage for entry in self.entries)
        return [*{*(chunk.lineage for chunk in self.tree), *waiting, *entered, *self.entries.ghosts.lineages()}]

    @property
    def content(self) -> ContentIndex:
        """Made when it is first asked for, and kept up from then on: who never asks pays nothing."""
        if self._content is None:
            self._content = ContentIndex(self.tree)
        return self._content

    # ── using ──

    def acquire(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Use and pin; returns those that were not worth writing so far."""
        listed = list(chunks)
        for chunk in listed:
            self.use(chunk)
        late = [chunk for chunk in listed if chunk.key in self.unwritten]
        for chunk in listed:  # last: nothing would ever unpin them if something failed after it
            chunk.pins += 1
        return late

    def use(self, chunk: Chunk) -> None:
        self.rhythm.observe(self.tick - chunk.last_used)
        chunk.hits += 1
        chunk.last_used = self.tick
        self.entries.changes.used[chunk.key] = chunk

    def turn_ended(self, label: Label, cursor: Cursor) -> Entry:
        """A request has left its state at `cursor`: it is wanted for its TTL from now on. What the entry has left
        alone for some turns gives back its RAM."""
        now = self.clock.now()
        entry = self.entries.turn_ended(label, cursor, self.tick, now)
        for chunk in chunks_at(cursor):
            chunk.expires = max(chunk.expires, now + self.keeping.ttl[entry.ttl])
            chunk.is_pinned |= entry.is_pinned
            self.entries.changes.used[chunk.key] = chunk
        self.entries.forget_empty()
        stale = entry.turns - self.keeping.cold_after
        for tail in [tail for tail in entry.tails if tail.turn <= stale]:
            cooled = self.ram.free_branch(self.tree.get(tail.chunk), tail.tick)
            self.counters.cooled_by_turns += cooled
            if cooled:
                log.debug("warm: %d chunks of a branch that was left leave RAM", cooled)
        return entry

    # ── coming ──

    def insert(self, chunk: Chunk, payload: memoryview) -> None:
        """Enter a chunk that a request has just computed; it is in RAM only.

        A file of it that waits for its parent is given up: something above it was damaged, it may be no better.
        """
        assert chunk.parent is not None
        self.counters.inserted_chunks += 1
        chunk.last_used = self.tick
        chunk.expires = self.wanted_until(Ttl.SHORT)  # until a turn ends in it
        if row := self.orphans.take(chunk.parent.key, chunk.key):
            self.discard_file(row.key, row.bytes)
        if ghost := self.entries.ghosts.take(chunk.key):
            chunk.hits, chunk.came_back, chunk.was_written = ghost.hits, True, ghost.was_written
            self.rhythm.observe(self.tick - ghost.last_used)
        self.ram.put(chunk, payload)
        self._enter(chunk)

    def enter_payload(self, chunk: Chunk, payload: memoryview) -> None:
        """A chunk's file was read."""
        if chunk.payload is None and chunk in self.tree:
            self.ram.put(chunk, payload)
        elif chunk.payload is None:
            chunk.payload = payload  # it has gone meanwhile, and a request waits for it

    def may_write(self, chunk: Chunk, batch: Mapping[ChunkKey, int]) -> bool:
        """Whether the SSD should wear for a chunk. `batch`: what is about to be written with it, in bytes."""
        assert chunk.parent is not None
        # A chunk is of no use on disk without those before it.
        reachable = chunk.parent.is_root or chunk.parent.on_disk or chunk.parent.key in batch
        spent = self.writes.spent + sum(batch.values())
        return reachable and worth_writing(chunk, spent, self.writes.limit)

    def skip_write(self, chunk: Chunk) -> None:
        if chunk in self.tree:
            self.unwritten.add(chunk.key)

    def admit_file(self, key: ChunkKey) -> bool:
        """Whether a file that is written is to come into its place."""
        if self.tree.get(key) is None or key in self.to_remove:
            return False
        self.arriving.add(key)
        return True

    def enter_files(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Enter the files that were written; those of chunks that went meanwhile are to be removed, even if one is
        here again."""
        self.writes.spend(sum(sizes.values()))
        for key, size in sizes.items():
            self.unwritten.discard(key)
            chunk = self.tree.get(key)
            if chunk is not None and key in self.arriving:
                self.enter_file(chunk, size)
                self.entries.changes.used[key] = chunk
            else:
                self.discard_file(key, size)
        self.arriving.clear()
        self.unwelcome.clear()

    def enter_file(self, chunk: Chunk, size: int) -> None:
        if not chunk.on_disk:
            chunk.on_disk, chunk.bytes = True, size
            self.disk.add(chunk, size)

    def adopt(self, rows: Iterable[ChunkRow]) -> None:
        """Enter chunks that are on disk; those whose parent is not known yet wait for it."""
        # For chunks of which only the file is known: where a TTL is a promise they cannot stay.
        wanted_until = 0.0 if self.keeping.expire else self.wanted_until(Ttl.EXTENDED)
        known = self.tree.by_key
        todo = list(rows)[::-1]  # the oldest is taken first: parents come before their children
        while todo:
            row = todo.pop()
            if row.key in known or row.key in self.to_remove or row.key in self.unwelcome:
                continue
            owner = Lineage.parse(row.namespace).owner
            parent = self.tree.root(owner) if row.parent == ROOT else known.get(row.parent)
            if parent is None:
                self.orphans.add(row)
                continue
            self._hang(row, parent, wanted_until)
            todo += self.orphans.take_all(row.key)

    def settle_orphan(self, row: ChunkRow, *, is_whole: bool) -> None:
        """An orphan's file was read: it is entered, or it is there no more."""
        parent = self.tree.get(row.parent)
        if parent is not None and self.orphans.take(row.parent, row.key) and is_whole:
            self._hang(row, parent, parent.expires)

    def give_up_orphans(self, is_one: Callable[[ChunkRow], bool] = lambda row: True) -> int:
        """Let go of files that no lookup can reach; returns how many."""
        rows = [row for row in self.orphans if is_one(row)]
        self.orphans.drop({row.key for row in rows})
        for row in rows:
            self.discard_file(row.key, row.bytes)
        return len(rows)

    # ── going ──

    def drop(self, chunk: Chunk, reason: MissReason | None) -> list[Chunk]:
        """Take a chunk and everything below it out of the store; returns them. Their files are to be removed.

        Without a reason it leaves no trace: something else holds its tokens.
        """
        gone = self._take_out(chunk)
        for victim in gone:
            if reason is not None:
                self.entries.remember(ghost_of(victim, reason))
            if victim.on_disk:
                self.discard_file(victim.key, victim.bytes)
        if reason is None:
            return gone
        self.deletions += len(gone)
        # What was merely evicted has no end any more by which its text would go.
        if reason is not MissReason.EVICTED or self.keeping.expire:
            self.on_delete({victim.lineage.owner for victim in gone})
        return gone

    def supersede(self, tail: Chunk) -> None:
        """Drop a tail that a longer chunk contains, unless a chunk builds on it or a lookup uses it: entries that
        ended in it end inside that one from now on."""
        if tail.pins or not tail.is_leaf or tail.is_fork or tail not in self.tree:
            return
        ending = self.entries.ending_in(tail.key)
        self.drop(tail, None)
        heir = sibling_with(tail)
        for entry in ending:
            self.entries.inherit(entry, tail, heir)

    def lose(self, chunk: Chunk, *, is_there: bool) -> list[ChunkKey]:
        """A chunk's file is missing or damaged. What hangs below it waits on disk until it is computed again:
        returns that.

        `is_there`: it is damaged and could not be put out of reach.
        """
        if chunk not in self.tree:  # it was being read when one above it was found damaged, and is no better
            assert chunk.parent is not None
            row = self.orphans.take(chunk.parent.key, chunk.key)
            if row is not None and is_there:
                self.discard_file(row.key, row.bytes)
            return []
        gone = self._take_out(chunk)
        self.deletions += len(gone)
        self.on_delete({victim.lineage.owner for victim in gone})
        below = [victim for victim in gone if victim.on_disk and victim is not chunk]
        for victim in below:
            assert victim.parent is not None
            place = (victim.key, str(victim.lineage), victim.parent.key, victim.take, victim.start)
            uses = (victim.bytes, victim.last_used, victim.hits, victim.expires)
            self.orphans.add(ChunkRow(0, *place, victim.tokens, victim.sampled, victim.made, *uses))
        if chunk.on_disk and is_there:
            self.discard_file(chunk.key, chunk.bytes)
        return [victim.key for victim in below]

    def remove_entry(self, entry: Entry) -> list[Chunk]:
        """Forget an entry and drop what no other builds on; returns those chunks.

        Of a chunk in which others end earlier they lose their part too: a chunk cannot be split, and what was to
        be removed must not stay.
        """
        self.entries.forget(entry)
        self.on_delete({entry.lineage.owner})  # also where nothing of it is left here
        gone: list[Chunk] = []
        for tail in entry.tails:
            chunk, used = self.tree.get(tail.chunk), tail.used
            while chunk and not chunk.is_root and chunk.ends_text and not self.entries.ends_at(chunk, used):
                parent, take = chunk.parent, chunk.take
                gone += self.drop(chunk, MissReason.REMOVED)
                chunk, used = parent, take
        self.entries.end_before({chunk.key: chunk for chunk in gone})
        return gone

    def forget(self, whose: Container[str], *, files_stay: bool = False) -> None:
        """Drop everything of these owners, traces included.

        `files_stay`: another process looks after them, and the index is right about them.
        """
        theirs = {lineage for lineage in self.lineages() if lineage.owner in whose}
        for chunk in [chunk for chunk in self.tree if chunk.lineage in theirs]:
            for victim in self._take_out(chunk) if chunk in self.tree else ():
                if victim.on_disk and not files_stay:
                    self.discard_file(victim.key, victim.bytes)
        waiting = {row.key for row in self.orphans if Lineage.parse(row.namespace) in theirs}
        if not files_stay:
            self.give_up_orphans(lambda row: row.key in waiting)
        self.orphans.drop(waiting)
        self.entries.forget_lineages(theirs, index_knows=files_stay)

    def shrink_ram(self) -> None:
        before = self.ram.tally.bytes
        if count := self.ram.shrink(self.worth, lambda chunk: self.drop(chunk, MissReason.EVICTED)):
            self.counters.warm_evictions += count
            log.debug("warm: %d chunks are evicted, %d bytes", count, before - self.ram.tally.bytes)

    def discard_file(self, key: ChunkKey, size: int) -> None:
        """There is a file that nothing here leads to: it is to be removed. It counts until it is gone."""
        self.to_remove_bytes += size - self.to_remove.get(key, 0)
        self.to_remove[key] = size

    def forget_files(self, keys: Iterable[ChunkKey]) -> None:
        """Their files are gone."""
        for key in keys:
            self.to_remove_bytes -= self.to_remove.pop(key, 0)

    # ── what the index does not know yet ──

    def take_unsaved(self) -> Unsaved | None:
        """What the index is to be told, if anything: `put_back` when it would not take it."""
        self.entries.forget_empty()
        if self.entries.changes.is_empty:
            return None
        changes = self.entries.take_changes()
        clock, (day, written) = self.clock.saved(), self.writes.saved
        meta = {"clock": clock.seconds, "wall": clock.wall, "write_day": day, "written": written}
        latest = clock.seconds + max(self.keeping.ttl.values())
        uses = [(c.last_used, c.hits, c.expires, latest, c.key) for c in changes.used.values() if c.on_disk]
        return Unsaved(changes, uses, meta)

    def stats(self, side_bytes: int) -> dict[str, Any]:
        """Cheap: nothing is walked. `side_bytes`: that lie beside the files of chunks."""
        counters = self.counters
        return {
            "lookups": counters.lookups,
            "inserted_chunks": counters.inserted_chunks,
            "entries": len(self.entries),
            "ghosts": len(self.entries.ghosts),
            "evictions": counters.evictions(),
            "warm": {**asdict(self.ram.tally), "read_seconds": round(counters.import_seconds, 6)},
            "cold": {
                **asdict(self.disk),
                **counters.reads(),
                "other_bytes": self.disk_bytes - self.disk.bytes + side_bytes,
                "written_today_bytes": self.writes.spent,
                "daily_write_budget": self.writes.limit,
                "unwritten_chunks": len(self.unwritten),
            },
        }

    # ── inside ──

    def wanted_until(self, ttl: Ttl) -> float:
        return self.clock.now() + self.keeping.ttl[ttl]

    def worth(self, chunk: Chunk) -> float:
        return self.keeping.worth(chunk, self.tick, self.rhythm.lookups)

    def _enter(self, chunk: Chunk) -> None:
        self.tree.add(chunk)
        if self._content is not None:
            self._content.add([chunk])

    def _take_out(self, chunk: Chunk) -> list[Chunk]:
        gone = self.tree.take_out(chunk)
        for victim in gone:
            self.ram.free(victim)
            if self._content is not None:
                self._content.remove(victim)
            if victim.on_disk:
                self.disk.take(victim, victim.bytes)
            elif victim.key in self.arriving:
                self.arriving.remove(victim.key)
                self.unwelcome.add(victim.key)
            self.unwritten.discard(victim.key)
            self.entries.forget_chunk(victim)
        return gone

    def _hang(self, row: ChunkRow, parent: Chunk, wanted_until: float) -> None:
        self.orphans.take(row.parent, row.key)  # another process may have written it meanwhile
        if row.take > len(parent.tokens):
            self.discard_file(row.key, row.bytes)  # nothing leads to it, and nothing ever will
            return
        chunk = Chunk(key=row.key, parent=parent, take=row.take, tokens=row.tokens, bytes=row.bytes)
        chunk.lineage, chunk.sampled, chunk.made = Lineage.parse(row.namespace), row.sampled, row.made
        chunk.last_used, chunk.hits, chunk.expires = row.last_used, row.hits, row.expires or wanted_until
        self.tick = max(self.tick, row.last_used)
        self.enter_file(chunk, row.bytes)
        self._enter(chunk)


# ── tails: chunks that end a turn, and are replaced by longer ones when the conversation grows ──


def tail_inside(chunk: Chunk) -> Chunk | None:
    """The longest sibling that `chunk` begins with, goes beyond and can replace.

    The chunk inherits what its siblings know was sampled: a lookup will find only one of them. Siblings of other
    lineages are seen by others.
    """
    assert chunk.parent is not None
    replaced = None
    beside = chunk.parent.branches[chunk.take][int(chunk.tokens[0])]
    for sibling in (known for known in beside if known.lineage == chunk.lineage):
        size, shared = len(sibling.tokens), common_prefix(sibling.tokens, chunk.tokens)
        known = ((begin, min(end, shared)) for begin, end in sibling.sampled if begin < shared)
        chunk.sampled = _merged((*chunk.sampled, *known))
        is_inside = shared == size < len(chunk.tokens) and not sibling.is_fork and sibling.is_leaf
        if is_inside and (replaced is None or size > len(replaced.tokens)):
            replaced = sibling
    return replaced


def sibling_with(tail: Chunk) -> Chunk | None:
    """The chunk beside `tail`, which is out of the tree, that begins with its tokens."""
    assert tail.parent is not None
    beside = tail.parent.branches.get(tail.take, {}).get(int(tail.tokens[0]), ())
    mine = (chunk for chunk in beside if chunk.lineage == tail.lineage)
    return next((chunk for chunk in mine if common_prefix(chunk.tokens, tail.tokens) == len(tail.tokens)), None)


def _merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans in order, touching and overlapping ones joined."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
