"""A radix tree over token ids whose edges are chunks.

    root ──[0,128)──┬──[128,256)────[256,300)        a tail ends a turn and may have any length
                    └─take 40──[168,290)             this branch uses 40 tokens of its parent's 128

A chunk begins at `parent.start + take`: a branch point inside a chunk needs no split, because an import can
stop anywhere. Matching compares every token. The tree holds no locks: its store does.

A snapshot is a chunk without tokens: state that cannot be cut by token, after exactly the tokens above it. It
hangs where it was taken, beside the chunks that go on from there.

Each owner has a root. What hangs below `SHARED`'s root may belong to any owner: a user's own text after a prefix
that the operator shares. A lookup sees what is shared and what belongs to its owner, and nothing else. Approximate
state hangs below the exact state that it continues: only lookups that ask for its lineage see it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import field
from enum import IntFlag
from functools import lru_cache
from typing import NewType

import numpy as np

from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT, SHARED, Lineage
from emberkeep.values import dataclass

# ── keys: a hash chain in which every field is length-prefixed, so that no two inputs collide ──

ChunkKey = NewType("ChunkKey", bytes)
"""Commits to the format version, the fingerprint (weights, KV layout, engine), the lineage, the parent's key, how
many of the parent's tokens come before the chunk, and the chunk's tokens."""
ROOT = ChunkKey(b"")
"""Parent key of chunks that begin at position 0."""
Span = tuple[int, int]
Text = bytes
FORMAT_VERSION = 2
_U32 = struct.Struct("<I")


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """Each field behind its length: a concatenation that can be taken apart in one way only."""
    return b"".join([_U32.pack(len(field)) + field for field in fields])


def unpack_fields(data: bytes) -> list[bytes]:
    """Inverse of `pack_fields`. Raises ValueError."""
    fields, end = [], 0
    while end < len(data):
        begin = end + 4
        end = begin + int.from_bytes(data[end:begin], "little")
        if max(begin, end) > len(data):
            raise ValueError("a field is cut off")
        fields.append(data[begin:end])
    return fields


def chunk_key(fingerprint: bytes, lineage: Lineage, parent: ChunkKey, take: int, tokens: TokenArray) -> ChunkKey:
    # What the keys of one lineage have in common is hashed once.
    digest = _common_part(fingerprint, lineage).copy()
    digest.update(pack_fields((parent, _U32.pack(take), token_bytes(tokens))))
    return ChunkKey(digest.digest())


@lru_cache(maxsize=256)
def _common_part(fingerprint: bytes, lineage: Lineage) -> hashlib.blake2b:
    fields = [_U32.pack(FORMAT_VERSION), fingerprint, str(lineage).encode()]
    return hashlib.blake2b(pack_fields(fields), digest_size=32)


def clear_lineage_caches() -> None:
    """Drop what is remembered of lineages for speed: their owners are users."""
    _common_part.cache_clear()
    Lineage.parse.cache_clear()


def store_name(fingerprint: bytes) -> str:
    """The name of the folder for everything with this fingerprint, in this format."""
    fields = [_U32.pack(FORMAT_VERSION), fingerprint]
    return hashlib.blake2b(pack_fields(fields), digest_size=16).hexdigest()


def token_bytes(tokens: TokenArray) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def pack_spans(spans: tuple[Span, ...]) -> bytes:
    return np.array(spans, "<u4").tobytes()


def unpack_spans(data: bytes) -> tuple[Span, ...]:
    """Raises ValueError."""
    # Most chunks have none, and opening a store reads a hundred thousand.
    return tuple((int(a), int(b)) for a, b in np.frombuffer(data, "<u4").reshape(-1, 2)) if data else ()


_SNAPSHOT = -1
"""The key of snapshots among siblings; others have their first token as key."""


class Made(IntFlag):
    """Says how a chunk was made. Files hold the numbers: they never change."""

    UNKNOWN = 0
    GIVEN = 1
    """A client sent its prompt as ids: where it was not sampled, the tokenizer may make other ids of its text."""
    WIDE = 2
    """Tokens of it were computed in steps with many rows of their sequence."""
    NARROW = 4
    """Tokens of it were computed in steps with few rows: decoding, short turns, slices beside answers."""
    REPRODUCIBLE = 8
    """It and all before it come from wide steps of an engine that held nothing else: the same steps give the
    same bytes again."""

    @property
    def steps(self) -> Made:
        """The flags about steps; NARROW if there is none, because they may have been."""
        return self & ~Made.GIVEN or Made.NARROW


MADE = tuple(Made(number) for number in range(16))
"""The values by their numbers: making them anew is a twentieth of the time that opening a large store takes."""


_GIVEN = frozenset(made for made in MADE if made & Made.GIVEN)


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Chunk:
    """One stored token range: its place in the tree, and where its bytes are."""

    key: ChunkKey
    parent: Chunk | None
    take: int
    tokens: TokenArray
    bytes: int = 0
    lineage: Lineage = EXACT
    start: int = 0
    """Follows from `parent` and `take`."""
    sampled: tuple[Span, ...] = ()
    """Ranges of `tokens` (relative) that the model sampled."""
    made: Made = Made.UNKNOWN
    text: Text | None = None
    """What its tokens say, once a text was compared with it."""
    payload: memoryview | None = None
    """The copy in RAM."""
    on_disk: bool = False
    is_fork: bool = False
    """Other sequences branch off at its end, so it is not replaced when its own conversation grows."""
    pins: int = 0
    """Lookups that are using it now."""
    is_pinned: bool = False
    """A user asked that it be kept."""
    hits: int = 0
    """Lookups that reused it, also before it was evicted and stored again."""
    last_used: int = 0
    """In ticks of the store's logical clock."""
    expires: float = 0.0
    """It is wanted until then, in the store's seconds."""
    came_back: bool = False
    """It had left the store, and was stored again."""
    was_written: bool = False
    """It was on disk before, and evicted."""
    branches: dict[int, dict[int, list[Chunk]]] = field(default_factory=dict)
    """take -> first token -> children. More than one child only where processes stored the same twice."""

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.start = self.parent.start + self.take

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_given(self) -> bool:
        return self.made in _GIVEN  # flags take ten times as long to be combined

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        return not self.branches

    @property
    def is_snapshot(self) -> bool:
        return self.parent is not None and not len(self.tokens)

    @property
    def ends_text(self) -> bool:
        """Only snapshots hang below it."""
        return all(child.is_snapshot for child in self.children())

    @property
    def may_go(self) -> bool:
        """Nothing hangs below it, no lookup uses it, and it is not pinned."""
        return self.is_leaf and not self.pins and not self.is_pinned

    def is_at_or_below(self, ancestor: Chunk) -> bool:
        chunk = self
        while chunk is not ancestor and chunk.parent is not None:
            chunk = chunk.parent
        return chunk is ancestor

    @property
    def saved_tokens(self) -> int:
        """Tokens that would be evaluated again without it; for a snapshot, those since the one before."""
        if not self.is_snapshot:
            return len(self.tokens)
        assert self.parent is not None
        before = last_snapshot(Cursor(self.parent, self.take, self.lineage), self.start - 1)
        return self.start - (before.start if before else 0)

    def children(self) -> Iterator[Chunk]:
        for by_first in self.branches.values():
            for group in by_first.values():
                yield from group

    def attach(self) -> None:
        assert self.parent is not None
        by_first = self.parent.branches.setdefault(self.take, {})
        by_first.setdefault(self._place, []).append(self)

    def detach(self) -> None:
        assert self.parent is not None
        by_first = self.parent.branches.get(self.take, {})
        if self in (group := by_first.get(self._place, [])):
            group.remove(self)
        if not group:
            by_first.pop(self._place, None)
        if not by_first:
            self.parent.branches.pop(self.take, None)

    @property
    def _place(self) -> int:
        return int(self.tokens[0]) if len(self.tokens) else _SNAPSHOT


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the tree, after the first `used` tokens of `chunk`, as a request of `lineage` sees it."""

    chunk: Chunk
    used: int
    lineage: Lineage

    @property
    def position(self) -> int:
        return self.chunk.start + self.used

    def sees(self, chunk: Chunk) -> bool:
        return self.lineage.sees(chunk.lineage)

    def at(self, chunk: Chunk, used: int) -> Cursor:
        return Cursor(chunk, used, self.lineage)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part [start, end) of a prompt that `chunk` supplies."""

    chunk: Chunk
    start: int
    end: int


class RadixTree:
    """Every chunk of the store, by its place and by its key; each owner who has something here has a root.

    No locks and no I/O: `KvStore` calls it with its lock held.
    """

    def __init__(self) -> None:
        self._roots: dict[str, Chunk] = {}
        self.by_key: dict[ChunkKey, Chunk] = {}
        self.get = self.by_key.get

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.by_key.values())

    def __contains__(self, chunk: Chunk) -> bool:
        """Compares by identity: a chunk that was dropped and stored anew is another one under the same key."""
        return chunk.is_root or self.by_key.get(chunk.key) is chunk

    def root(self, owner: str) -> Chunk:
        """The root of an owner's state, exact and approximate. It is new at each call until a chunk hangs below
        it: before you attach one, ask again."""
        return self._roots.get(owner) or new_root(owner)

    def origin(self, lineage: Lineage) -> Cursor:
        return Cursor(self.root(lineage.owner), 0, lineage)

    def anchor(self, parent: Chunk) -> Chunk:
        """The chunk to attach to: for a root, the one that is in use now."""
        return self.root(parent.lineage.owner) if parent.is_root else parent

    def deepest(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """The place from `cursor` (its origin, if it is gone) on that matches most; from 0, also shared ones."""
        cursor = cursor.at(self.anchor(cursor.chunk), cursor.used)
        if cursor.chunk not in self:
            cursor = self.origin(cursor.lineage)
        best = descend(cursor, tokens)
        if cursor.position == 0 and cursor.chunk.lineage.owner != SHARED:
            shared = descend(Cursor(self.root(SHARED), 0, cursor.lineage), tokens)
            best = max(best, shared, key=lambda place: place.position)
        return best

    def add(self, chunk: Chunk) -> None:
        assert chunk.parent is not None
        if chunk.parent.is_root:
            self._roots[chunk.parent.lineage.owner] = chunk.parent
        self.by_key[chunk.key] = chunk
        chunk.attach()

    def take_out(self, chunk: Chunk) -> list[Chunk]:
        """Take a chunk and everything below it out; returns those that were in."""
        chunk.detach()
        parent = chunk.parent
        if parent is not None and parent.is_root and parent.is_leaf:
            self._roots.pop(parent.lineage.owner, None)
        gone: list[Chunk] = []
        todo = [chunk]
        while todo:
            victim = todo.pop()
            todo += victim.children()
            if self.by_key.pop(victim.key, None) is not None:
                gone.append(victim)
        return gone


def new_chunk(fingerprint: bytes, cursor: Cursor, tokens: TokenArray, size: int, made: Made) -> Chunk:
    """A chunk of `tokens` (none: a snapshot) after `cursor`, not yet in the tree."""
    parent, lineage = cursor.chunk, cursor.lineage
    key = chunk_key(fingerprint, lineage, parent.key, cursor.used, tokens)
    return Chunk(key=key, parent=parent, take=cursor.used, tokens=tokens, bytes=size, lineage=lineage, made=made)


def new_root(owner: str) -> Chunk:
    empty = np.empty(0, np.int32)
    return Chunk(key=ROOT, lineage=Lineage(owner), parent=None, take=0, tokens=empty, is_fork=True)


def descend(cursor: Cursor, tokens: TokenArray) -> Cursor:
    """The place at or below `cursor` that matches most of `tokens` (the prompt, from 0)."""
    return cursor.at(*max(places_along(cursor, tokens), key=lambda place: place[0].start + place[1]))


def places_along(cursor: Cursor, tokens: TokenArray) -> Iterator[tuple[Chunk, int]]:
    """Yields where each chunk at or below `cursor` stops matching `tokens`, if it begins to: the chunk, and how
    many of its tokens match."""
    first, length = cursor.position, len(tokens)
    following = np.asarray(tokens[first:], np.int32).tobytes()
    todo = [(cursor.chunk, cursor.used)]
    while todo:
        chunk, since = todo.pop()
        begin = chunk.start + since
        # Nearly always all of it, which is found in a fifth of the time.
        if not since and following.startswith(chunk.tokens.tobytes(), 4 * (begin - first)):
            used = len(chunk.tokens)
        else:
            used = since + common_prefix(chunk.tokens[since:], tokens[begin:])
        yield chunk, used
        for take, by_first in chunk.branches.items():
            if since <= take <= used and chunk.start + take < length:
                group = by_first.get(int(tokens[chunk.start + take]), ())
                todo += [(child, 0) for child in group if cursor.sees(child)]


def place_at(cursor: Cursor, position: int) -> Cursor:
    chunk = cursor.chunk
    while chunk.parent is not None and chunk.start >= position:
        chunk = chunk.parent
    return cursor.at(chunk, position - chunk.start)


def last_snapshot(cursor: Cursor, limit: int) -> Chunk | None:
    """The deepest snapshot on the way to `cursor` that was taken at or before position `limit`."""
    chunk, used = cursor.chunk, cursor.used
    while True:
        for take in sorted((t for t in chunk.branches if t <= min(used, limit - chunk.start)), reverse=True):
            for snapshot in chunk.branches[take].get(_SNAPSHOT, ()):
                if cursor.sees(snapshot):
                    return snapshot
        if chunk.parent is None:
            return None
        chunk, used = chunk.parent, chunk.take


def path_to(cursor: Cursor) -> tuple[Segment, ...]:
    path = up_from(cursor)
    return tuple([Segment(chunk, chunk.start, chunk.start + used) for chunk, used in reversed(path)])


def up_from(cursor: Cursor) -> list[tuple[Chunk, int]]:
    """The chunks on the way to `cursor`, the last one first, and how many tokens of each."""
    path: list[tuple[Chunk, int]] = []
    chunk, used = cursor.chunk, cursor.used
    while chunk.parent is not None:
        if used:
            path.append((chunk, used))
        chunk, used = chunk.parent, chunk.take
    return path


def chunks_at(cursor: Cursor) -> Iterator[Chunk]:
    """The chunks that make up the state at `cursor`, with the snapshots taken inside them."""
    for chunk, used in reversed(up_from(cursor)):
        yield chunk
        for take, by_first in chunk.branches.items():
            if take <= used:
                yield from (snapshot for snapshot in by_first.get(_SNAPSHOT, ()) if cursor.sees(snapshot))


def tokens_to(cursor: Cursor) -> TokenArray:
    """All tokens up to `cursor`. Chunks do not change, so no lock is needed."""
    parts = [s.chunk.tokens[: s.end - s.start] for s in path_to(cursor)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
