"""What a person would call the store's contents: conversations and prefixes, over the chunks that hold them.

An entry says where its latest states end (a ring of tails), how many turns it has had and how long it is wanted.
It owns no chunk: equal prefixes are stored once, whoever uses them.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from emberkeep.kv.keys import ROOT, ChunkKey, pack_fields
from emberkeep.kv.tree import Chunk, Cursor
from emberkeep.types import EntryKind, Lineage, Ttl

RING = 8
"""Tails remembered per entry: the branches that a client may come back to."""

EntryId = str


@dataclass(frozen=True, slots=True)
class Label:
    """What a request calls the state that it leaves behind."""

    kind: EntryKind
    key: str
    """Requests with equal keys (in one lineage) belong to one entry."""
    head: str
    """The first words, for people."""
    ttl: Ttl | None = None
    """None: as it was, or the usual one of its kind."""
    name: str = ""
    """The conversation id, if the client gave one."""
    source: str = ""
    """Hash of the stable segments before any template, by which other models' stores can be searched."""


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
