"""What a person would call the store's contents: conversations and prefixes, over the chunks that hold them.

An entry says where its latest states end (a ring of tails), how many turns it has had and how long it is wanted.
It owns no chunk: equal prefixes are stored once, whoever uses them.

A ghost is what the store remembers of a chunk that is gone: why it went, and how often it had been reused. It lets
a miss be explained ("evicted", "expired"), and lets a chunk that comes back keep its history: one that is evicted
and wanted again and again is worth more than its last stay alone would say.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, chunk_key, pack_fields, token_bytes
from emberkeep.token_arrays import TokenArray
from emberkeep.types import EntryKind, Label, Lineage, MissReason, Ttl

RING = 8
"""Tails remembered per entry: the branches that a client may come back to."""

EntryId = str


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a turn ended: after the first `used` tokens of that chunk."""

    chunk: ChunkKey
    used: int
    turn: int
    tick: int


_USUAL = {EntryKind.PREFIX: Ttl.SHORT, EntryKind.CONVERSATION: Ttl.LONG}


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
        return cls(label, lineage, label.ttl or _USUAL[label.kind])

    def turn_ended(self, label: Label, cursor: Cursor, tick: int, now: float) -> None:
        self.label = label
        self.ttl = label.ttl or self.ttl
        self.turns += 1
        self.used_at = now
        # A tail that this turn has extended or repeated is no branch of its own.
        on_the_way = set(_chunks_above(cursor))
        kept = [t for t in self.tails if t.chunk not in on_the_way]
        self.tails = deque([*kept, Tail(cursor.chunk.key, cursor.used, self.turns, tick)], RING)

    def forget_tails(self, gone: Iterable[ChunkKey]) -> None:
        lost = set(gone)
        self.tails = deque((tail for tail in self.tails if tail.chunk not in lost), RING)

    def tails_moved(self, source: ChunkKey, target: ChunkKey) -> None:
        """`target` begins where `source` did, with its tokens."""
        moved = (replace(tail, chunk=target) if tail.chunk == source else tail for tail in self.tails)
        self.tails = deque(moved, RING)

    def move_tails(self, gone: Mapping[ChunkKey, Chunk]) -> None:
        """End before chunks that are gone."""
        moved = []
        for tail in self.tails:
            while (chunk := gone.get(tail.chunk)) and chunk.parent is not None:
                tail = replace(tail, chunk=chunk.parent.key, used=chunk.take)
            if tail.chunk != ROOT:
                moved.append(tail)
        self.tails = deque(moved, RING)

    def stale_tails(self, turns: int) -> list[Tail]:
        """Tails that this entry has left alone for that many of its turns."""
        return [tail for tail in self.tails if tail.turn <= self.turns - turns]

    def pack_tails(self) -> str:
        return json.dumps([[t.chunk.hex(), t.used, t.turn, t.tick] for t in self.tails])


def unpack_tails(packed: str) -> deque[Tail]:
    """Raises ValueError, TypeError."""
    rows = [Tail(ChunkKey(bytes.fromhex(key)), used, turn, tick) for key, used, turn, tick in json.loads(packed)]
    return deque(rows, RING)


def entry_id(lineage: Lineage, label: Label) -> EntryId:
    fields = [str(lineage).encode(), label.kind.encode(), label.key.encode()]
    return hashlib.blake2b(pack_fields(fields), digest_size=6).hexdigest()


def _chunks_above(cursor: Cursor) -> Iterator[ChunkKey]:
    chunk = cursor.chunk
    while chunk.parent is not None:
        yield chunk.key
        chunk = chunk.parent


# ── ghosts ──

GHOST_LIMIT = 50_000
"""About 100 bytes each."""

_OPENING = 16
"""Tokens by which a chunk that a prompt does not fill is recognised."""


@dataclass(frozen=True, slots=True)
class Ghost:
    key: ChunkKey
    lineage: Lineage
    parent: ChunkKey
    take: int
    length: int
    opening: bytes
    """Hash of its first tokens: which they were is nobody's business any more."""
    reason: MissReason
    hits: int
    last_used: int
    was_written: bool


def ghost_of(chunk: Chunk, reason: MissReason) -> Ghost:
    assert chunk.parent is not None
    return Ghost(
        key=chunk.key,
        lineage=chunk.lineage,
        parent=chunk.parent.key,
        take=chunk.take,
        length=len(chunk.tokens),
        opening=_opening(chunk.tokens),
        reason=reason,
        hits=chunk.hits,
        last_used=chunk.last_used,
        was_written=chunk.on_disk or chunk.was_written,
    )


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


# ── what the index does not know yet ──

CHANGES_LIMIT = 50_000


@dataclass(frozen=True, slots=True)
class Uses:
    """What is known about a chunk's use, which its file does not say."""

    last_used: int = 0
    hits: int = 0
    expires: float = 0.0


class UnsavedChanges:
    """What the index does not know yet. Bounded, also where there is no index, or one that takes nothing: of what
    is left out, the next opening finds that its chunks are gone."""

    def __init__(self) -> None:
        self.used: dict[ChunkKey, Chunk] = {}
        """Of chunks that are in the store."""
        self.entries: dict[EntryId, Entry] = {}
        """That are in the store."""
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
        self.forgotten = deque([*unsaved.forgotten, *self.forgotten], CHANGES_LIMIT)
        self.ghosts = deque([*unsaved.ghosts, *self.ghosts], CHANGES_LIMIT)

    def uses(self) -> list[tuple[ChunkKey, Uses]]:
        chunks = [chunk for chunk in self.used.values() if chunk.on_disk]
        return [(c.key, Uses(c.last_used, c.hits, c.expires)) for c in chunks]
