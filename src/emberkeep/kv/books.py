"""The store's books: which chunks exist, where their bytes are, and what has to go when room is short.

No locks and no I/O: `KvStore` calls everything here with its lock held.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from emberkeep.kv.content import ContentIndex
from emberkeep.kv.entries import Entry, EntryId, Ghost, Ghosts, Tail, UnsavedChanges, ghost_of
from emberkeep.kv.index import Row
from emberkeep.kv.policy import Rhythm, Worth, worth
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, descend, new_root, path_to
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types import SHARED, Label, Lineage, MissReason, Ttl

LOW_WATER = 0.99
"""Eviction goes down to this share of a budget: a hundred chunks are looked at for each that comes, in 0.1 ms."""

MOST_ENTRIES = 50_000
"""Many may end in one chunk: what they are called takes more room than their state then. About 1 kB each."""


@dataclass(slots=True)
class Tally:
    """What one tier holds."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, chunk: Chunk, size: int) -> None:
        self.chunks += 1
        self.tokens += len(chunk.tokens)
        self.bytes += size

    def take(self, chunk: Chunk, size: int) -> None:
        self.chunks -= 1
        self.tokens -= len(chunk.tokens)
        self.bytes -= size


class Books:
    def __init__(self, worth: Worth = worth) -> None:
        """`worth` says what goes first when room is short."""
        self._policy = worth
        self.rhythm = Rhythm()
        self.clock = 0
        """Ticks once per lookup: the order of uses, whatever the machine's clock does."""
        self.warm = Tally()
        self.cold = Tally()
        self.leaving: dict[ChunkKey, int] = {}
        """Bytes of files that are still there and that nothing here leads to any more: they are to be removed."""
        self.leaving_bytes = 0
        self.unwritten: set[ChunkKey] = set()
        """In RAM only, because they were not worth writing when their turn came."""
        self.ghosts = Ghosts()
        self.news = UnsavedChanges()
        self._entries: OrderedDict[EntryId, Entry] = OrderedDict()
        """The latest used last."""
        self._ending: dict[ChunkKey, set[EntryId]] = {}
        """Which entries have a tail in a chunk."""
        self._maybe_empty: set[EntryId] = set()
        self._roots: dict[str, Chunk] = {}
        """Of those who have something here."""
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._warm: dict[ChunkKey, Chunk] = {}
        self._orphans: dict[ChunkKey, dict[ChunkKey, Row]] = {}
        """On disk, by the parent without whom no lookup can reach them."""
        self._orphan_bytes = 0
        self._lost: set[ChunkKey] = set()
        """Those parents that were lost since the store was opened, and may well be computed again."""
        self._content: ContentIndex | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def __contains__(self, chunk: Chunk) -> bool:
        """By identity: a chunk that was dropped and stored anew is another one under the same key."""
        return chunk.is_root or self._chunks.get(chunk.key) is chunk

    @property
    def entries(self) -> Mapping[EntryId, Entry]:
        return self._entries

    @property
    def disk_bytes(self) -> int:
        """Of every file that is known, whether a lookup can reach it or not."""
        return self.cold.bytes + self.leaving_bytes + self._orphan_bytes

    def get(self, key: ChunkKey) -> Chunk | None:
        return self._chunks.get(key)

    def root(self, owner: str) -> Chunk:
        """Where the state of an owner begins: what is approximate grows on what is not. One under which nothing
        hangs is not remembered: who hangs something there asks again."""
        return self._roots.get(owner) or new_root(owner)

    def anchored(self, parent: Chunk) -> Chunk:
        """The chunk to hang something under: for a root, the one that is in use now."""
        return self.root(parent.lineage.owner) if parent.is_root else parent

    def lineages(self) -> list[Lineage]:
        """Of everybody who has something here."""
        waiting = (Lineage.parse(row.namespace) for rows in self._orphans.values() for row in rows.values())
        entered = (entry.lineage for entry in self._entries.values())
        return [*{*(chunk.lineage for chunk in self), *waiting, *entered, *self.ghosts.lineages()}]

    # ── finding ──

    def origin(self, lineage: Lineage) -> Cursor:
        return Cursor(self.root(lineage.owner), 0, lineage)

    def deepest(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """The deepest place at or below `cursor` that spells `tokens`; from the beginning, also what is shared."""
        cursor = cursor.moved(self.anchored(cursor.chunk), cursor.used)
        if cursor.chunk not in self:
            cursor = self.origin(cursor.lineage)
        best = descend(cursor, tokens)
        if cursor.position == 0 and cursor.chunk.lineage.owner != SHARED:
            shared = descend(Cursor(self.root(SHARED), 0, cursor.lineage), tokens)
            best = max(best, shared, key=lambda place: place.position)
        return best

    @property
    def content(self) -> ContentIndex:
        """Made when it is first asked for, and kept up from then on: who never asks pays nothing."""
        if self._content is None:
            self._content = ContentIndex(self)
        return self._content

    def use(self, chunk: Chunk) -> None:
        self.rhythm.heard(self.clock - chunk.last_used)
        chunk.hits += 1
        chunk.last_used = self.clock
        self.news.used[chunk.key] = chunk

    # ── coming ──

    def add(self, chunk: Chunk, payload: memoryview) -> None:
        """Enter a chunk that has just been computed; it is in RAM only.

        A file of it that waits for its parent is given up: something above it was damaged, it may be no better.
        """
        assert chunk.parent is not None
        chunk.last_used = self.clock
        if row := self._stop_waiting(chunk.parent.key, chunk.key):
            self.leave(row.key, row.bytes)
        if ghost := self.ghosts.take(chunk.key):
            chunk.hits, chunk.came_back, chunk.was_written = ghost.hits, True, ghost.was_written
            self.rhythm.heard(self.clock - ghost.last_used)
        self._warmed(chunk, payload)
        self._enter(chunk)

    def reachable_orphans(self) -> list[Row]:
        """Those whose parent is there again. Their files may be as damaged as its was: somebody has to look."""
        return [row for parent, rows in self._orphans.items() if parent in self._chunks for row in rows.values()]

    def was_looked_at(self, row: Row, *, is_whole: bool) -> None:
        """Somebody has read an orphan's file: it is entered, or it is there no more."""
        parent = self._chunks.get(row.parent)
        if parent is None or not self._stop_waiting(row.parent, row.key):
            return
        if is_whole and row.take <= len(parent.tokens):
            self._hang(row, parent, parent.expires)
        elif is_whole:
            self.leave(row.key, row.bytes)

    def adopt(self, rows: Iterable[Row], wanted_until: float) -> None:
        """Enter chunks that are on disk; those whose parent is not known yet wait for it.

        `wanted_until` goes for chunks of which only the file is known.
        """
        todo = list(rows)[::-1]  # the oldest is taken first: parents come before their children
        while todo:
            row = todo.pop()
            if row.key in self._chunks or row.key in self.leaving:
                continue
            lineage = Lineage.parse(row.namespace)
            parent = self.root(lineage.owner) if row.parent == ROOT else self._chunks.get(row.parent)
            if parent is None:
                self._wait_for_parent(row)
                continue
            if row.take <= len(parent.tokens):
                self._hang(row, parent, wanted_until)
            else:
                self.leave(row.key, row.bytes)  # nothing leads to it, and nothing ever will
            if row.key in self._orphans:
                todo += self._returning(row.key)

    def take_orphans(self, *, lost_ones_too: bool) -> None:
        """Let chunks go that no lookup can reach because their parent was gone when the store was opened, or was
        lost since then."""
        missing = [key for key in self._orphans if key not in self._lost and key not in self._chunks]
        for parent in list(self._orphans) if lost_ones_too else missing:
            for row in self._returning(parent):
                self.leave(row.key, row.bytes)

    def leave(self, key: ChunkKey, size: int) -> None:
        """There is a file that nothing here leads to. It counts until it `left`."""
        self.leaving_bytes += size - self.leaving.get(key, 0)
        self.leaving[key] = size

    def left(self, keys: Iterable[ChunkKey]) -> None:
        """Their files are gone."""
        for key in keys:
            self.leaving_bytes -= self.leaving.pop(key, 0)

    def became_warm(self, chunk: Chunk, payload: memoryview) -> None:
        if chunk.payload is None and chunk in self:
            self._warmed(chunk, payload)
        elif chunk.payload is None:
            chunk.payload = payload  # it has gone meanwhile, and somebody waits for it

    def became_cold(self, chunk: Chunk, size: int) -> None:
        if not chunk.on_disk:
            chunk.on_disk = True
            chunk.bytes = size
            self.cold.add(chunk, size)

    def put_back(self, unsaved: UnsavedChanges) -> None:
        """The index would not take it."""
        self.news.put_back(unsaved, self._entries, self._chunks)

    # ── entries ──

    def turn_ended(self, label: Label, cursor: Cursor, now: float, ttl_s: Mapping[Ttl, float]) -> Entry:
        """A request has left its state at `cursor`: it is wanted for its TTL from now on."""
        entry = Entry.new(label, cursor.lineage)
        entry = self._entries.setdefault(entry.id, entry)
        self._entries.move_to_end(entry.id)
        with self._retailing(entry):
            entry.forget_tails(key for key in {tail.chunk for tail in entry.tails} if key not in self._chunks)
            entry.turn_ended(label, cursor, self.clock, now)
        self._shorten_entries()
        for chunk in _on_the_way(cursor):
            chunk.expires = max(chunk.expires, now + ttl_s[entry.ttl])
            chunk.is_pinned |= entry.is_pinned
            self.news.used[chunk.key] = chunk
        return entry

    def restore_entries(self, entries: Iterable[Entry]) -> None:
        """Those of a store that is being opened: of those whose chunks are gone nothing stays."""
        for entry in sorted(entries, key=lambda entry: entry.used_at):
            self._entries[entry.id] = entry
            self._note_tails(entry)
        self._maybe_empty = set(self._entries)
        self.forget_empty_entries()
        self._shorten_entries()
        self.apply_pins()

    def tail_of(self, entry: Entry) -> Cursor | None:
        """Where its latest state that still exists ends."""
        for tail in reversed(entry.tails):
            if (chunk := self._chunks.get(tail.chunk)) and tail.used <= len(chunk.tokens):
                return Cursor(chunk, tail.used, entry.lineage)
        return None

    def pin(self, entry: Entry, pinned: bool) -> None:
        entry.is_pinned = pinned
        self.news.entries[entry.id] = entry
        for chunk in self._held_by(entry):
            chunk.is_pinned = pinned
        if not pinned:
            self.apply_pins()  # other entries may hold on to the same chunks

    def apply_pins(self) -> None:
        for entry in self._entries.values():
            for chunk in self._held_by(entry) if entry.is_pinned else ():
                chunk.is_pinned = True

    def remove_entry(self, entry: Entry) -> list[Chunk]:
        """Forget an entry and drop what nobody else builds on; returns those chunks.

        Of a chunk in which others end earlier they lose their part too: a chunk cannot be cut, and what was to be
        removed must not stay.
        """
        self._forget_entry(entry)
        gone: list[Chunk] = []
        for tail in entry.tails:
            chunk, used = self._chunks.get(tail.chunk), tail.used
            while chunk and not chunk.is_root and _only_snapshots(chunk) and not self._ends_at(chunk, used):
                parent, take = chunk.parent, chunk.take
                gone += self.drop(chunk, MissReason.REMOVED)
                chunk, used = parent, take
        self._move_tails({chunk.key: chunk for chunk in gone})
        return gone

    def _ends_at(self, chunk: Chunk, used: int) -> bool:
        """Some entry ends in `chunk`, at or after that many of its tokens."""
        tails = (tail for entry in self._ending_in(chunk.key) for tail in entry.tails)
        return any(tail.chunk == chunk.key and tail.used >= used for tail in tails)

    def _move_tails(self, gone: Mapping[ChunkKey, Chunk]) -> None:
        """Entries that ended in these chunks end before them now."""
        for entry in {entry.id: entry for key in gone for entry in self._ending_in(key)}.values():
            with self._retailing(entry):
                entry.move_tails(gone)

    def forget_empty_entries(self) -> None:
        """Entries whose last chunk is gone are not listed any more. Looks only at those that lost one."""
        suspects, self._maybe_empty = self._maybe_empty, set()
        for entry in [entry for id_ in suspects if (entry := self._entries.get(id_))]:
            if self.tail_of(entry) is None:
                self._forget_entry(entry)

    def _shorten_entries(self) -> None:
        """The least recently used go, unless somebody pinned them; their state stays, without a name."""
        while len(self._entries) > MOST_ENTRIES:
            oldest = next((entry for entry in self._entries.values() if not entry.is_pinned), None)
            if oldest is None:
                return
            self._forget_entry(oldest)

    @contextmanager
    def _retailing(self, entry: Entry) -> Iterator[None]:
        """Around every change of an entry's tails."""
        self._unnote_tails(entry)
        yield
        self._note_tails(entry)
        self.news.entries[entry.id] = entry

    def _note_tails(self, entry: Entry) -> None:
        for tail in entry.tails:
            self._ending.setdefault(tail.chunk, set()).add(entry.id)

    def _unnote_tails(self, entry: Entry) -> None:
        for key in {tail.chunk for tail in entry.tails}:
            ids = self._ending.get(key, set())
            ids.discard(entry.id)
            if not ids:
                self._ending.pop(key, None)

    def _ending_in(self, key: ChunkKey) -> list[Entry]:
        return [self._entries[id_] for id_ in self._ending.get(key, ())]

    # ── going ──

    def drop(self, chunk: Chunk, reason: MissReason | None) -> list[Chunk]:
        """Take a chunk and everything below it out of the tree and the books; returns them. Their files are to be
        removed.

        Without a reason it leaves no trace: something else holds its tokens.
        """
        gone = self._take_out(chunk)
        for victim in gone:
            if reason is not None:
                self._remember(ghost_of(victim, reason))
            if victim.on_disk:
                self.leave(victim.key, victim.bytes)
        return gone

    def lose(self, chunk: Chunk, *, is_there: bool) -> list[ChunkKey]:
        """A chunk's file is missing or damaged. What hangs below it waits on disk until it is computed again:
        returns that.

        `is_there`: it is damaged and could not be put out of reach.
        """
        if chunk not in self:
            self._lose_orphan(chunk, is_there=is_there)
            return []
        below = [victim for victim in self._take_out(chunk) if victim.on_disk and victim is not chunk]
        for victim in below:
            row = _row_of(victim)
            self._wait_for_parent(row)
            self._lost.add(row.parent)
        if chunk.on_disk and is_there:
            self.leave(chunk.key, chunk.bytes)
        return [victim.key for victim in below]

    def _lose_orphan(self, chunk: Chunk, *, is_there: bool) -> None:
        """It was being read when one above it was found damaged, and is no better."""
        assert chunk.parent is not None
        row = self._stop_waiting(chunk.parent.key, chunk.key)
        if row is not None and is_there:
            self.leave(row.key, row.bytes)

    def lose_orphans(self, missing: Container[ChunkKey]) -> None:
        """Their files are not there either."""
        for parent, rows in list(self._orphans.items()):
            for key in [key for key in rows if key in missing]:
                self._stop_waiting(parent, key)

    def _take_out(self, chunk: Chunk) -> list[Chunk]:
        self._detach(chunk)
        gone: list[Chunk] = []
        todo = [chunk]
        while todo:
            victim = todo.pop()
            todo += victim.children()
            if self._chunks.pop(victim.key, None) is None:
                continue
            self._cool(victim)
            if self._content is not None:
                self._content.remove(victim)
            if victim.on_disk:
                self.cold.take(victim, victim.bytes)
            self.news.used.pop(victim.key, None)
            self.unwritten.discard(victim.key)
            self._maybe_empty |= self._ending.get(victim.key, set())
            gone.append(victim)
        return gone

    def _detach(self, chunk: Chunk) -> None:
        chunk.detach()
        parent = chunk.parent
        if parent is not None and parent.is_root and parent.is_leaf:
            self._roots.pop(parent.lineage.owner, None)

    def supersede(self, tail: Chunk) -> None:
        """Drop a tail that a longer chunk contains: entries that ended in it end inside that one from now on."""
        ending = self._ending_in(tail.key)
        self.drop(tail, None)
        heir = _sibling_with(tail)
        for entry in ending:
            self._inherit(entry, tail, heir)

    def forget(self, whose: Container[str], *, files_stay: bool = False) -> None:
        """Drop everything of these owners, traces included.

        `files_stay`: another process looks after them, and the index is right about them.
        """
        theirs = {lineage for lineage in self.lineages() if lineage.owner in whose}
        for chunk in [chunk for chunk in self._chunks.values() if chunk.lineage in theirs]:
            for victim in self._take_out(chunk) if chunk in self else ():
                if victim.on_disk and not files_stay:
                    self.leave(victim.key, victim.bytes)
        for parent, rows in list(self._orphans.items()):
            for row in [row for row in rows.values() if Lineage.parse(row.namespace) in theirs]:
                self._stop_waiting(parent, row.key)
                if not files_stay:
                    self.leave(row.key, row.bytes)
        for entry in [e for e in self._entries.values() if e.lineage in theirs]:
            self._forget_entry(entry)
            if files_stay:
                self.news.forgotten.remove(entry.id)
        self.ghosts.forget(theirs)
        self.news.forget_ghosts(theirs)

    def shrink_warm(self, budget: int) -> int:
        """Bring RAM under `budget`; returns how many chunks left it. What is also on disk goes first, and of what
        exists nowhere else only leaves go."""
        count = 0
        while self.warm.bytes > budget and (left := self._shrink_warm_once(budget * LOW_WATER)):
            count += left
        return count

    def _shrink_warm_once(self, target: float) -> int:
        """Parents may be leaves after it."""
        warm = [c for c in self._warm.values() if not c.pins]
        warm.sort(key=lambda c: (not c.on_disk, self._worth(c)))
        count = 0
        for chunk in warm:
            if self.warm.bytes <= target:
                break
            if chunk.on_disk:
                self._cool(chunk)
            elif chunk.is_leaf and not chunk.is_pinned:
                self.drop(chunk, MissReason.EVICTED)
            else:
                continue
            count += 1
        return count

    def shrink_cold(
        self, target: float, now: float, newcomer: Chunk | None = None, *, most_chunks: int = sys.maxsize
    ) -> list[Chunk]:
        """Drop leaves that nobody uses or pinned, expired ones first, then by worth, down to `target` bytes and
        `most_chunks`.

        With a `newcomer`, only what is worth less than it goes. A parent that becomes a leaf is weighed with the
        rest. Returns what was dropped.
        """
        victims: list[Chunk] = []
        if self.cold.bytes <= target and self.cold.chunks <= most_chunks:
            return victims

        def ranked(chunk: Chunk) -> tuple[bool, float, ChunkKey, Chunk]:
            return chunk.expires > now, self._worth(chunk), chunk.key, chunk

        limit = (True, self._worth(newcomer)) if newcomer else (True, float("inf"))
        heap = [ranked(chunk) for chunk in self if chunk.on_disk and _may_go(chunk)]
        heapify(heap)
        while heap and heap[0][:2] < limit and (self.cold.bytes > target or self.cold.chunks > most_chunks):
            is_wanted, _, _, chunk = heappop(heap)
            victims.append(chunk)
            self.drop(chunk, MissReason.EVICTED if is_wanted else MissReason.EXPIRED)
            parent = chunk.parent
            if parent and not parent.is_root and parent.on_disk and _may_go(parent):
                heappush(heap, ranked(parent))
        return victims

    def drop_expired(self, now: float) -> list[Chunk]:
        """Drop everything that is not wanted any more, leaves first."""
        victims: list[Chunk] = []
        while expired := [c for c in self if c.expires <= now and _may_go(c)]:
            for chunk in expired:
                victims += self.drop(chunk, MissReason.EXPIRED)
        return victims

    def cool_expired(self, now: float) -> int:
        """Give back the RAM of what is on disk and not wanted any more; returns how many chunks left it."""
        idle = [c for c in self._warm.values() if c.on_disk and c.expires <= now and not c.pins]
        for chunk in idle:
            self._cool(chunk)
        return len(idle)

    def cool_branch(self, tail: Tail) -> int:
        """Give back the RAM of a branch that nobody has used since `tail`; returns how many chunks left it."""
        count = 0
        chunk = self._chunks.get(tail.chunk)
        while chunk and not chunk.is_root and chunk.last_used <= tail.tick and not chunk.pins:
            if chunk.on_disk and chunk.payload is not None:
                self._cool(chunk)
                count += 1
            chunk = chunk.parent
        return count

    # ── inside ──

    def _worth(self, chunk: Chunk) -> float:
        return self._policy(chunk, self.clock, self.rhythm.lookups)

    def _enter(self, chunk: Chunk) -> None:
        assert chunk.parent is not None
        if chunk.parent.is_root:
            self._roots[chunk.parent.lineage.owner] = chunk.parent
        self._chunks[chunk.key] = chunk
        chunk.attach()
        if self._content is not None:
            self._content.add([chunk])

    def _warmed(self, chunk: Chunk, payload: memoryview) -> None:
        chunk.payload = payload
        self._warm[chunk.key] = chunk
        self.warm.add(chunk, len(payload))

    def _cool(self, chunk: Chunk) -> None:
        if self._warm.pop(chunk.key, None) is not None and chunk.payload is not None:
            self.warm.take(chunk, len(chunk.payload))
        chunk.payload = None

    def _remember(self, ghost: Ghost) -> None:
        self.ghosts.add([ghost])
        self.news.ghosts.append(ghost)

    def _forget_entry(self, entry: Entry) -> None:
        self._unnote_tails(entry)
        self._entries.pop(entry.id, None)
        self.news.forget_entry(entry.id)

    def _wait_for_parent(self, row: Row) -> None:
        waiting = self._orphans.get(row.parent)
        if waiting is None:
            self._orphans[row.parent] = {row.key: row}
        elif row.key in waiting:
            return
        else:
            waiting[row.key] = row
        self._orphan_bytes += row.bytes

    def _stop_waiting(self, parent: ChunkKey, key: ChunkKey) -> Row | None:
        """What waited so, if anything did."""
        waiting = self._orphans.get(parent, {})
        row = waiting.pop(key, None)
        if row is not None:
            self._orphan_bytes -= row.bytes
            if not waiting:
                del self._orphans[parent]
                self._lost.discard(parent)
        return row

    def _returning(self, parent: ChunkKey) -> list[Row]:
        """Those who waited for it, and do not any more."""
        rows = self._orphans.pop(parent)
        self._lost.discard(parent)
        for row in rows.values():
            self._orphan_bytes -= row.bytes
        return list(rows.values())

    def _inherit(self, entry: Entry, tail: Chunk, heir: Chunk | None) -> None:
        others = [self._chunks.get(known.chunk) for known in entry.tails if known.chunk != tail.key]
        with self._retailing(entry):
            if heir is None or any(chunk and _is_at_or_below(chunk, heir) for chunk in others):
                entry.forget_tails([tail.key])  # another turn of it went on from there
            else:
                entry.tails_moved(tail.key, heir.key)
                heir.expires = max(heir.expires, tail.expires)
                heir.is_pinned |= entry.is_pinned

    def _held_by(self, entry: Entry) -> Iterator[Chunk]:
        cursor = self.tail_of(entry)
        return _on_the_way(cursor) if cursor else iter(())

    def _hang(self, row: Row, parent: Chunk, wanted_until: float) -> None:
        self._stop_waiting(row.parent, row.key)  # another process may have written it meanwhile
        chunk = Chunk(
            key=row.key,
            parent=parent,
            take=row.take,
            tokens=row.tokens,
            sampled=row.sampled,
            made=row.made,
            size=row.bytes,
            lineage=Lineage.parse(row.namespace),
        )
        chunk.last_used, chunk.hits = row.last_used, row.hits
        chunk.expires = row.expires or wanted_until
        self.clock = max(self.clock, row.last_used)
        self.became_cold(chunk, row.bytes)
        self._enter(chunk)


def _row_of(chunk: Chunk) -> Row:
    assert chunk.parent is not None
    place = (chunk.key, str(chunk.lineage), chunk.parent.key, chunk.take, chunk.start)
    uses = (chunk.bytes, chunk.last_used, chunk.hits, chunk.expires)
    return Row(0, *place, chunk.tokens, chunk.sampled, chunk.made, *uses)


def _on_the_way(cursor: Cursor) -> Iterator[Chunk]:
    """The chunks that make up the state at `cursor`, with the snapshots taken inside them."""
    for segment in path_to(cursor):
        yield segment.chunk
        for snapshot in segment.chunk.children():
            if snapshot.is_snapshot and snapshot.start <= segment.end and cursor.sees(snapshot):
                yield snapshot


def _sibling_with(tail: Chunk) -> Chunk | None:
    """The chunk beside `tail`, which is out of the tree, that begins with its tokens."""
    assert tail.parent is not None
    beside = tail.parent.branches.get(tail.take, {}).get(int(tail.tokens[0]), ())
    begins = (c for c in beside if common_prefix(c.tokens, tail.tokens) == len(tail.tokens))
    return next((c for c in begins if c.lineage == tail.lineage), None)


def _is_at_or_below(chunk: Chunk, ancestor: Chunk) -> bool:
    while chunk is not ancestor and chunk.parent is not None:
        chunk = chunk.parent
    return chunk is ancestor


def _may_go(chunk: Chunk) -> bool:
    return chunk.is_leaf and not chunk.pins and not chunk.is_pinned


def _only_snapshots(chunk: Chunk) -> bool:
    """Nothing but state at positions inside it hangs below it."""
    return all(child.is_snapshot for child in chunk.children())
