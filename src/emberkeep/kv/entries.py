"""What a person would call the store's contents: conversations and prefixes, over the chunks that hold them.

An entry says where its latest states end (a ring of tails), how many turns it has had and how long it is wanted.
It owns no chunk: equal prefixes are stored once, for all that use them. Also what is remembered of chunks that are
gone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, NamedTuple

from emberkeep.kv.tree import (
    ROOT,
    Chunk,
    ChunkKey,
    Cursor,
    RadixTree,
    chunk_key,
    chunks_at,
    pack_fields,
    token_bytes,
    up_from,
)
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass

RING = 8
"""Tails remembered per entry: the branches that a client may come back to."""

MOST_ENTRIES = 50_000
"""Many may end in one chunk: what they are called takes more room than their state then. About 1 kB each."""

EntryId = str


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a turn ended: after the first `used` tokens of that chunk."""

    chunk: ChunkKey
    used: int
    turn: int
    tick: int


@dataclass(slots=True)
class Entry:
    label: Label
    lineage: Lineage
    ttl: Ttl
    turns: int = 0
    used_at: float = 0.0
    """In the store's seconds."""
    is_pinned: bool = False
    tails: deque[Tail] = field(default_factory=lambda: deque(maxlen=RING))
    """Latest last."""

    @property
    def id(self) -> EntryId:
        return entry_id(self.lineage, self.label)

    @classmethod
    def new(cls, label: Label, lineage: Lineage) -> Entry:
        usual = Ttl.SHORT if label.kind == EntryKind.PREFIX else Ttl.LONG
        return cls(label, lineage, label.ttl or usual)

    def tails_before(self, gone: Mapping[ChunkKey, Chunk]) -> Iterator[Tail]:
        """Where they end when these chunks are gone."""
        for tail in self.tails:
            while (chunk := gone.get(tail.chunk)) and chunk.parent is not None:
                tail = replace(tail, chunk=chunk.parent.key, used=chunk.take)
            if tail.chunk != ROOT:
                yield tail


class Entries:
    """All entries, the chunks that they end in, the ghosts, and what of this the index does not know yet.

    No locks and no I/O: `KvStore` calls it with its lock held.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._entries: OrderedDict[EntryId, Entry] = OrderedDict()
        """The latest used last."""
        self._ending: dict[ChunkKey, set[EntryId]] = {}
        """Which entries have a tail in a chunk."""
        self._maybe_empty: set[EntryId] = set()
        self.ghosts = Ghosts()
        self.tells_ghosts = True
        """The index is told of them; else they end with the process."""
        self.changes = UnsavedChanges()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, id_: EntryId) -> Entry | None:
        return self._entries.get(id_)

    def tail_of(self, entry: Entry) -> Cursor | None:
        """Where its latest state that still exists ends."""
        return latest_tail(entry, self._tree.by_key)

    def turn_ended(self, label: Label, cursor: Cursor, tick: int, now: float) -> Entry:
        entry = Entry.new(label, cursor.lineage)
        entry = self._entries.setdefault(entry.id, entry)
        self._entries.move_to_end(entry.id)
        entry.label, entry.ttl, entry.used_at = label, label.ttl or entry.ttl, now
        entry.turns += 1
        # A tail that this turn has extended or repeated is no branch of its own.
        on_the_way = {chunk.key for chunk, _ in up_from(cursor)}
        branches = [t for t in entry.tails if t.chunk in self._tree.by_key and t.chunk not in on_the_way]
        self._set_tails(entry, [*branches, Tail(cursor.chunk.key, cursor.used, entry.turns, tick)])
        self._shorten()
        return entry

    def restore(self, entries: Iterable[Entry]) -> None:
        """Enter those of a store that is being opened. Those whose chunks are gone do not stay."""
        for entry in sorted(entries, key=lambda entry: entry.used_at):
            self._entries[entry.id] = entry
            self._note_tails(entry)
        self._maybe_empty = set(self._entries)
        self.forget_empty()
        self._shorten()
        self._apply_pins()

    def pin(self, entry: Entry, pinned: bool) -> None:
        entry.is_pinned = pinned
        self.changes.entries[entry.id] = entry
        self.changes.pins[entry.id] = pinned
        for chunk in self._held_by(entry):
            chunk.is_pinned = pinned
        if not pinned:
            self._apply_pins()  # other entries may hold on to the same chunks

    def forget(self, entry: Entry) -> None:
        self._unnote_tails(entry)
        self._entries.pop(entry.id, None)
        self.changes.forget_entry(entry.id)

    def forget_empty(self) -> None:
        """Entries whose last chunk is gone are not listed any more. Looks only at those that lost one."""
        suspects, self._maybe_empty = self._maybe_empty, set()
        for entry in [entry for id_ in suspects if (entry := self._entries.get(id_))]:
            if self.tail_of(entry) is None:
                self.forget(entry)

    def forget_chunk(self, chunk: Chunk) -> None:
        self.changes.used.pop(chunk.key, None)
        self._maybe_empty |= self._ending.get(chunk.key, set())

    def ending_in(self, key: ChunkKey) -> list[Entry]:
        return [self._entries[id_] for id_ in self._ending.get(key, ())]

    def ends_at(self, chunk: Chunk, used: int) -> bool:
        """Some entry ends in `chunk`, at or after that many of its tokens."""
        ending = self.ending_in(chunk.key)
        return any(t.chunk == chunk.key and t.used >= used for entry in ending for t in entry.tails)

    def end_before(self, gone: Mapping[ChunkKey, Chunk]) -> None:
        """Entries that ended in these chunks end before them now."""
        for entry in {entry.id: entry for key in gone for entry in self.ending_in(key)}.values():
            self._set_tails(entry, list(entry.tails_before(gone)))

    def inherit(self, entry: Entry, tail: Chunk, heir: Chunk | None) -> None:
        """`heir` begins with the tokens of `tail`, in which `entry` ended."""
        others = [self._tree.get(known.chunk) for known in entry.tails if known.chunk != tail.key]
        kept = [known for known in entry.tails if known.chunk != tail.key]
        if heir is not None and not any(chunk and chunk.is_at_or_below(heir) for chunk in others):
            kept = [replace(t, chunk=heir.key) if t.chunk == tail.key else t for t in entry.tails]
            heir.expires = max(heir.expires, tail.expires)
            heir.is_pinned |= entry.is_pinned
        self._set_tails(entry, kept)  # none: another turn of it went on from there

    def remember(self, ghost: Ghost) -> None:
        self.ghosts.add([ghost])
        if self.tells_ghosts:
            self.changes.ghosts.append(ghost)

    def forget_lineages(self, lineages: Container[Lineage], *, index_knows: bool) -> None:
        """Every trace. `index_knows`: the index is right about them, and need not be told."""
        for entry in [entry for entry in self if entry.lineage in lineages]:
            self.forget(entry)
            if index_knows:
                self.changes.forgotten.remove(entry.id)
        self.ghosts.forget(lineages)
        self.changes.forget_ghosts(lineages)

    def take_changes(self) -> UnsavedChanges:
        """What the index is about to be told."""
        changes, self.changes = self.changes, UnsavedChanges()
        return changes

    def put_back(self, unsaved: UnsavedChanges) -> None:
        """The index would not take it."""
        self.changes.put_back(unsaved, self._entries, self._tree.by_key)

    def _shorten(self) -> None:
        """The least recently used go, unless they are pinned; their state stays, without a name."""
        while len(self._entries) > MOST_ENTRIES:
            oldest = next((entry for entry in self._entries.values() if not entry.is_pinned), None)
            if oldest is None:
                return
            self.forget(oldest)

    def _apply_pins(self) -> None:
        for entry in self._entries.values():
            for chunk in self._held_by(entry) if entry.is_pinned else ():
                chunk.is_pinned = True

    def _held_by(self, entry: Entry) -> Iterator[Chunk]:
        cursor = self.tail_of(entry)
        return chunks_at(cursor) if cursor else iter(())

    def _set_tails(self, entry: Entry, tails: list[Tail]) -> None:
        self._unnote_tails(entry)
        entry.tails = deque(tails, RING)
        self._note_tails(entry)
        self.changes.entries[entry.id] = entry

    def _note_tails(self, entry: Entry) -> None:
        for tail in entry.tails:
            self._ending.setdefault(tail.chunk, set()).add(entry.id)

    def _unnote_tails(self, entry: Entry) -> None:
        for key in {tail.chunk for tail in entry.tails}:
            ids = self._ending.get(key, set())
            ids.discard(entry.id)
            if not ids:
                self._ending.pop(key, None)


def entry_id(lineage: Lineage, label: Label) -> EntryId:
    fields = [str(lineage).encode(), label.kind.encode(), label.key.encode()]
    return hashlib.blake2b(pack_fields(fields), digest_size=6).hexdigest()


def latest_tail(entry: Entry, chunks: Mapping[ChunkKey, Chunk]) -> Cursor | None:
    """Where the latest state of an entry ends that is among `chunks`."""
    for tail in reversed(entry.tails):
        if (chunk := chunks.get(tail.chunk)) and tail.used <= len(chunk.tokens):
            return Cursor(chunk, tail.used, entry.lineage)
    return None


def nameless(chunk: Chunk) -> Entry:
    """Stands for stored text that no entry leads to, and that ends with `chunk`."""
    label = Label(EntryKind.PREFIX, f"chunk:{chunk.key.hex()}", "", Ttl.EXTENDED)
    return Entry.new(label, chunk.lineage)


# ── what the index does not know yet ──

CHANGES_LIMIT = 50_000


class UnsavedChanges:
    """Holds what the index does not know yet. It is bounded, also where no index takes anything: the next opening
    finds that the chunks of what is left out are gone."""

    def __init__(self) -> None:
        self.used: dict[ChunkKey, Chunk] = {}
        self.entries: dict[EntryId, Entry] = {}
        self.pins: dict[EntryId, bool] = {}
        """What was pinned or unpinned here: others may have done so with the rest."""
        self.forgotten: deque[EntryId] = deque(maxlen=CHANGES_LIMIT)
        self.ghosts: deque[Ghost] = deque(maxlen=CHANGES_LIMIT)

    @property
    def is_empty(self) -> bool:
        return not (self.used or self.entries or self.forgotten or self.ghosts)

    @property
    def is_pressing(self) -> bool:
        """Something that people would miss after a crash."""
        return bool(self.entries or self.forgotten or self.ghosts)

    def forget_entry(self, id_: EntryId) -> None:
        self.entries.pop(id_, None)
        self.pins.pop(id_, None)
        self.forgotten.append(id_)

    def forget_ghosts(self, lineages: Container[Lineage]) -> None:
        self.ghosts = deque((ghost for ghost in self.ghosts if ghost.lineage not in lineages), CHANGES_LIMIT)

    def put_back(self, unsaved: UnsavedChanges, entries: Container[EntryId], chunks: Container[ChunkKey]) -> None:
        """It could not be written down: what came since wins, and of what has gone meanwhile nothing is needed.

        `entries` and `chunks`: that are in the store.
        """
        self.used = {**{key: chunk for key, chunk in unsaved.used.items() if key in chunks}, **self.used}
        known = {id_: entry for id_, entry in unsaved.entries.items() if id_ in entries}
        self.entries = {**known, **self.entries}
        self.pins = {**{id_: pinned for id_, pinned in unsaved.pins.items() if id_ in known}, **self.pins}
        self.forgotten = deque([*unsaved.forgotten, *self.forgotten], CHANGES_LIMIT)
        self.ghosts = deque([*unsaved.ghosts, *self.ghosts], CHANGES_LIMIT)


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What the index is to be told."""

    changes: UnsavedChanges
    uses: list[tuple[int, int, float, float, ChunkKey]]
    """When and how often chunks were used, until when they are wanted, and how long any process may want them."""
    meta: dict[str, Any]


# ── what the store remembers of a chunk that is gone ──

GHOST_LIMIT = 50_000
"""About 100 bytes each."""
_OPENING = 16
"""Tokens by which a chunk that a prompt does not fill is recognised."""


class Ghost(NamedTuple):
    """Explains a miss, and lets a chunk that comes back keep its history: one that is evicted and wanted again and
    again is worth more than its last stay alone would say."""

    key: ChunkKey
    lineage: Lineage
    parent: ChunkKey
    take: int
    length: int
    opening: bytes
    """Hash of its first tokens: which they were must not be known any more."""
    reason: MissReason
    hits: int
    last_used: int
    was_written: bool


def ghost_of(chunk: Chunk, reason: MissReason) -> Ghost:
    assert chunk.parent is not None
    place = (chunk.key, chunk.lineage, chunk.parent.key, chunk.take)
    tokens = (len(chunk.tokens), _opening(chunk.tokens))
    return Ghost(*place, *tokens, reason, chunk.hits, chunk.last_used, chunk.on_disk or chunk.was_written)


class Ghosts:
    """The latest `limit` of them. No locks: the store has one."""

    def __init__(self, limit: int = GHOST_LIMIT) -> None:
        self._limit = limit
        self._by_key: OrderedDict[ChunkKey, Ghost] = OrderedDict()
        self._below: dict[tuple[ChunkKey, int], set[ChunkKey]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, ghosts: Iterable[Ghost]) -> None:
        for ghost in ghosts:
            self.take(ghost.key)
            self._by_key[ghost.key] = ghost
            self._below.setdefault(_place(ghost), set()).add(ghost.key)
        while len(self._by_key) > self._limit:
            self.take(next(iter(self._by_key)))

    def take(self, key: ChunkKey) -> Ghost | None:
        """Forget a chunk, because it is back; returns what was known."""
        ghost = self._by_key.pop(key, None)
        if ghost is not None:
            siblings = self._below[_place(ghost)]
            siblings.discard(key)
            if not siblings:
                del self._below[_place(ghost)]
        return ghost

    def forget(self, lineages: Container[Lineage]) -> None:
        for key in [key for key, ghost in self._by_key.items() if ghost.lineage in lineages]:
            self.take(key)

    def lineages(self) -> set[Lineage]:
        return {ghost.lineage for ghost in self._by_key.values()}

    def after(self, fingerprint: bytes, cursor: Cursor, tokens: TokenArray) -> Ghost | None:
        """The longest chunk that went on from `cursor` with what `tokens` (a whole prompt) has there."""
        below = [self._by_key[key] for key in self._below.get((cursor.chunk.key, cursor.used), ())]
        seen = [ghost for ghost in below if cursor.lineage.sees(ghost.lineage)]
        rest = tokens[cursor.position :]
        known = sorted(seen, key=lambda ghost: -ghost.length)
        return next((ghost for ghost in known if _went_on_with(ghost, fingerprint, rest)), None)


def _went_on_with(ghost: Ghost, fingerprint: bytes, rest: TokenArray) -> bool:
    if not 0 < ghost.length <= len(rest):
        # It was longer than the prompt, which therefore cannot be compared with all of it.
        return ghost.length >= _OPENING <= len(rest) and _opening(rest) == ghost.opening
    part = rest[: ghost.length]
    return chunk_key(fingerprint, ghost.lineage, ghost.parent, ghost.take, part) == ghost.key


def _opening(tokens: TokenArray) -> bytes:
    return hashlib.blake2b(token_bytes(tokens[:_OPENING]), digest_size=8).digest()


def _place(ghost: Ghost) -> tuple[ChunkKey, int]:
    return ghost.parent, ghost.take
