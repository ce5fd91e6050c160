"""The store's books: which chunks exist, where their bytes are, and what has to go when room is short.

No locks and no I/O: `KvStore` calls everything here with its lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from emberkeep.kv import value
from emberkeep.kv.content import ContentIndex
from emberkeep.kv.entries import Entry, EntryId, Label, Tail
from emberkeep.kv.ghosts import Ghost, Ghosts, ghost_of
from emberkeep.kv.index import Row
from emberkeep.kv.keys import ROOT, ChunkKey, TokenArray
from emberkeep.kv.news import News
from emberkeep.kv.tree import Chunk, Cursor, common_prefix, descend, new_root, path_to
from emberkeep.types import SHARED, MissReason, Ttl, exact_namespace, user_of

Worth = Callable[[Chunk, int, float], float]
"""A chunk, the logical clock and the store's rhythm to what it is worth."""

LOW_WATER = 0.99
"""Eviction goes down to this share of a budget: a hundred chunks are looked at for each that comes, in 0.1 ms."""


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
    def __init__(self, worth: Worth = value.worth) -> None:
        """`worth` says what goes first when room is short."""
        self._policy = worth
        self.rhythm = value.Rhythm()
        self.clock = 0
        """Ticks once per lookup: the order of uses, whatever the machine's clock does."""
        self.warm = Tally()
        self.cold = Tally()
        self.ghosts = Ghosts()
        self.entries: dict[EntryId, Entry] = {}
        self.news = News()
        self._roots: dict[str, Chunk] = {}
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._warm: dict[ChunkKey, Chunk] = {}
        self._orphans: dict[ChunkKey, list[Row]] = {}
        self._content: ContentIndex | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def __contains__(self, chunk: Chunk) -> bool:
        """By identity: a chunk that was dropped and stored anew is another one under the same key."""
        return chunk.is_root or self._chunks.get(chunk.key) is chunk

    def get(self, key: ChunkKey) -> Chunk | None:
        return self._chunks.get(key)

    def root(self, namespace: str) -> Chunk:
        namespace = exact_namespace(namespace)  # what is approximate grows on what is not
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = new_root(namespace)
        return root

    def namespaces(self) -> list[str]:
        """Of everybody who has something here, or had."""
        waiting = (row.namespace for rows in self._orphans.values() for row in rows)
        return [*{*self._roots, *(chunk.namespace for chunk in self), *waiting}]

    # ── finding ──

    def origin(self, namespace: str) -> Cursor:
        return Cursor(self.root(namespace), 0, namespace)

    def deepest(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """The deepest place at or below `cursor` that spells `tokens`; from the beginning, also what is shared."""
        if cursor.chunk not in self:
            cursor = self.origin(cursor.namespace)
        best = descend(cursor, tokens)
        if cursor.position == 0 and cursor.chunk.namespace != SHARED:
            shared = descend(Cursor(self.root(SHARED), 0, cursor.namespace), tokens)
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
        """Enter a chunk that has just been computed; it is in RAM only."""
        chunk.last_used = self.clock
        if ghost := self.ghosts.take(chunk.key):
            chunk.hits, chunk.came_back, chunk.was_written = ghost.hits, True, ghost.was_written
            self.rhythm.heard(self.clock - ghost.last_used)
        self._warmed(chunk, payload)
        self._enter(chunk)

    def adopt(self, rows: Iterable[Row], wanted_until: float) -> None:
        """Enter chunks that are on disk; those whose parent is not known yet wait for it.

        `wanted_until` goes for chunks of which only the file is known.
        """
        todo = list(rows)[::-1]  # the oldest is taken first: parents come before their children
        while todo:
            row = todo.pop()
            parent = self.root(row.namespace) if row.parent == ROOT else self._chunks.get(row.parent)
            if parent is None:
                self._orphans.setdefault(row.parent, []).append(row)
                continue
            if row.key not in self._chunks and row.take <= len(parent.tokens):
                self._hang(row, parent, wanted_until)
            if self._orphans:
                todo += self._orphans.pop(row.key, ())

    def take_orphans(self) -> list[ChunkKey]:
        """Chunks on disk that no lookup can reach because their parent was lost; they are forgotten here."""
        lost = [row.key for rows in self._orphans.values() for row in rows]
        self._orphans.clear()
        return lost

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

    # ── entries ──

    def turn_ended(self, label: Label, cursor: Cursor, now: float, ttl_s: Mapping[Ttl, float]) -> Entry:
        """A request has left its state at `cursor`: it is wanted for its TTL from now on."""
        entry = Entry.new(label, cursor.namespace)
        entry = self.entries.setdefault(entry.id, entry)
        entry.forget_tails(key for key in {tail.chunk for tail in entry.tails} if key not in self._chunks)
        entry.turn_ended(label, cursor, self.clock, now)
        self.news.entries[entry.id] = entry
        for chunk in _on_the_way(cursor):
            chunk.expires = max(chunk.expires, now + ttl_s[entry.ttl])
            chunk.is_pinned |= entry.is_pinned
            self.news.used[chunk.key] = chunk
        return entry

    def tail_of(self, entry: Entry) -> Cursor | None:
        """Where its latest state that still exists ends."""
        for tail in reversed(entry.tails):
            if (chunk := self._chunks.get(tail.chunk)) and tail.used <= len(chunk.tokens):
                return Cursor(chunk, tail.used, entry.namespace)
        return None

    def pin(self, entry: Entry, pinned: bool) -> None:
        entry.is_pinned = pinned
        self.news.entries[entry.id] = entry
        for chunk in self._held_by(entry):
            chunk.is_pinned = pinned
        if not pinned:
            self.apply_pins()  # other entries may hold on to the same chunks

    def apply_pins(self) -> None:
        for entry in self.entries.values():
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
        tails = (tail for entry in self.entries.values() for tail in entry.tails)
        return any(tail.chunk == chunk.key and tail.used >= used for tail in tails)

    def _move_tails(self, gone: Mapping[ChunkKey, Chunk]) -> None:
        """Entries that ended in these chunks end before them now."""
        for entry in self.entries.values():
            if any(tail.chunk in gone for tail in entry.tails):
                entry.move_tails(gone)
                self.news.entries[entry.id] = entry

    def forget_empty_entries(self) -> None:
        """Entries whose last chunk is gone are not listed any more."""
        for entry in [e for e in self.entries.values() if self.tail_of(e) is None]:
            self._forget_entry(entry)

    # ── going ──

    def drop(self, chunk: Chunk, reason: MissReason | None) -> list[Chunk]:
        """Take a chunk and everything below it out of the tree and the books; returns them.

        Without a reason it leaves no trace: something else holds its tokens.
        """
        chunk.detach()
        gone: list[Chunk] = []
        todo = [chunk]
        while todo:
            victim = todo.pop()
            todo += victim.children()
            if self._chunks.pop(victim.key, None) is None:
                continue
            if reason is not None:
                self._remember(ghost_of(victim, reason))
            self._cool(victim)
            if self._content is not None:
                self._content.remove(victim)
            if victim.on_disk:
                self.cold.take(victim, victim.bytes)
            self.news.used.pop(victim.key, None)
            gone.append(victim)
        return gone

    def supersede(self, tail: Chunk) -> None:
        """Drop a tail that a longer chunk contains: entries that ended in it end inside that one from now on."""
        self.drop(tail, None)
        heir = _sibling_with(tail)
        for entry in self.entries.values():
            if any(known.chunk == tail.key for known in entry.tails):
                self._inherit(entry, tail, heir)

    def forget(self, namespace: str) -> list[ChunkKey]:
        """Drop everything of a namespace, traces included; returns what was there."""
        gone = [chunk for chunk in self._chunks.values() if chunk.namespace == namespace]
        for chunk in gone:
            self.drop(chunk, None)
        # The root stays: sequences that are running build on it.
        lost = [row for rows in self._orphans.values() for row in rows if row.namespace == namespace]
        for row in lost:
            self._orphans[row.parent].remove(row)
        for entry in [e for e in self.entries.values() if e.namespace == namespace]:
            self._forget_entry(entry)
        self.ghosts.forget(namespace)
        self.news.ghosts = [ghost for ghost in self.news.ghosts if ghost.namespace != namespace]
        return [chunk.key for chunk in gone] + [row.key for row in lost]

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

    def shrink_cold(self, target: float, now: float, newcomer: Chunk | None = None) -> list[Chunk]:
        """Drop leaves that nobody uses or pinned, expired ones first, then by worth, down to `target` bytes.

        With a `newcomer`, only what is worth less than it goes. A parent that becomes a leaf is weighed with the
        rest. Returns what was dropped.
        """
        victims: list[Chunk] = []
        if self.cold.bytes <= target:
            return victims

        def ranked(chunk: Chunk) -> tuple[bool, float, ChunkKey, Chunk]:
            return chunk.expires > now, self._worth(chunk), chunk.key, chunk

        limit = (True, self._worth(newcomer)) if newcomer else (True, float("inf"))
        heap = [ranked(chunk) for chunk in self if chunk.on_disk and _may_go(chunk)]
        heapify(heap)
        while heap and self.cold.bytes > target and heap[0][:2] < limit:
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
        self.entries.pop(entry.id, None)
        self.news.entries.pop(entry.id, None)
        self.news.forgotten.append(entry.id)

    def _inherit(self, entry: Entry, tail: Chunk, heir: Chunk | None) -> None:
        others = [self._chunks.get(known.chunk) for known in entry.tails if known.chunk != tail.key]
        if heir is None or any(chunk and _is_at_or_below(chunk, heir) for chunk in others):
            entry.forget_tails([tail.key])  # another turn of it went on from there
        else:
            entry.tails_moved(tail.key, heir.key)
            heir.expires = max(heir.expires, tail.expires)
            heir.is_pinned |= entry.is_pinned
        self.news.entries[entry.id] = entry

    def _held_by(self, entry: Entry) -> Iterator[Chunk]:
        cursor = self.tail_of(entry)
        return _on_the_way(cursor) if cursor else iter(())

    def _hang(self, row: Row, parent: Chunk, wanted_until: float) -> None:
        chunk = Chunk(
            key=row.key,
            parent=parent,
            take=row.take,
            tokens=row.tokens,
            sampled=row.sampled,
            given=row.given,
            size=row.bytes,
            namespace=row.namespace,
        )
        chunk.last_used, chunk.hits = row.last_used, row.hits
        chunk.expires = row.expires or wanted_until
        self.clock = max(self.clock, row.last_used)
        self.became_cold(chunk, row.bytes)
        self._enter(chunk)


def of_user(namespaces: Iterable[str], user: str) -> list[str]:
    """Those that belong to `user`, whatever the salt; "" is everybody who gave no name."""
    return [n for n in namespaces if exact_namespace(n) != SHARED and user_of(n) == user]


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
    return next((c for c in begins if c.namespace == tail.namespace), None)


def _is_at_or_below(chunk: Chunk, ancestor: Chunk) -> bool:
    while chunk is not ancestor and chunk.parent is not None:
        chunk = chunk.parent
    return chunk is ancestor


def _may_go(chunk: Chunk) -> bool:
    return chunk.is_leaf and not chunk.pins and not chunk.is_pinned


def _only_snapshots(chunk: Chunk) -> bool:
    """Nothing but state at positions inside it hangs below it."""
    return all(child.is_snapshot for child in chunk.children())
