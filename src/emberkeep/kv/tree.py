"""A radix tree over token ids whose edges are chunks.

    root ──[0,128)──┬──[128,256)────[256,300)        a tail ends a turn and may have any length
                    └─take 40──[168,290)             this branch uses 40 tokens of its parent's 128

A chunk begins at `parent.start + take`: a branch point inside a chunk needs no split, because an import can
stop anywhere. Matching compares every token. The tree holds no locks: its store does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from emberkeep.kv.keys import ROOT, ChunkKey, TokenArray

Span = tuple[int, int]


class Chunk:
    """One stored token range: its place in the tree, and where its bytes are."""

    __slots__ = (
        "branches",
        "bytes",
        "given",
        "hits",
        "is_fork",
        "key",
        "last_used",
        "namespace",
        "on_disk",
        "parent",
        "payload",
        "pins",
        "sampled",
        "start",
        "take",
        "tokens",
    )

    def __init__(
        self,
        *,
        key: ChunkKey,
        parent: Chunk | None,
        take: int,
        tokens: TokenArray,
        sampled: tuple[Span, ...] = (),
        given: bool = False,
        size: int = 0,
        namespace: str = "",
    ) -> None:
        """`namespace` is a root's; every other chunk has its parent's."""
        self.key = key
        self.namespace: str = parent.namespace if parent else namespace
        self.parent = parent
        self.take = take
        self.start: int = parent.start + take if parent else 0
        self.tokens = tokens
        self.sampled = sampled
        """Ranges of `tokens` (relative) that the model sampled."""
        self.given = given
        """A client sent its prompt as ids: where it was not sampled, it need not be as the tokenizer spells."""
        self.bytes = size
        self.payload: memoryview | None = None
        """The warm copy."""
        self.on_disk = False
        self.is_fork = False
        """Other sequences branch off at its end, so it is not replaced when its own conversation grows."""
        self.pins = 0
        self.hits = 0
        self.last_used = 0
        self.branches: dict[int, dict[int, list[Chunk]]] = {}
        """take -> first token -> children. More than one child only where processes stored the same twice."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        return not self.branches

    def children(self) -> Iterator[Chunk]:
        for by_first in self.branches.values():
            for group in by_first.values():
                yield from group

    def attach(self) -> None:
        assert self.parent is not None
        by_first = self.parent.branches.setdefault(self.take, {})
        by_first.setdefault(int(self.tokens[0]), []).append(self)

    def detach(self) -> None:
        assert self.parent is not None
        first = int(self.tokens[0])
        by_first = self.parent.branches.get(self.take, {})
        group = by_first.get(first, [])
        if self in group:
            group.remove(self)
        if not group:
            by_first.pop(first, None)
        if not by_first:
            self.parent.branches.pop(self.take, None)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the tree: after the first `used` tokens of `chunk`."""

    chunk: Chunk
    used: int

    @property
    def position(self) -> int:
        return self.chunk.start + self.used


@dataclass(frozen=True, slots=True)
class Segment:
    """The part [start, end) of a prompt that `chunk` supplies."""

    chunk: Chunk
    start: int
    end: int


def new_root(namespace: str) -> Chunk:
    root = Chunk(key=ROOT, namespace=namespace, parent=None, take=0, tokens=np.empty(0, np.int32))
    root.is_fork = True
    return root


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def descend(cursor: Cursor, tokens: TokenArray) -> Cursor:
    """The deepest place at or below `cursor` whose path spells `tokens` (the whole prompt, from 0)."""
    best = cursor
    todo = [cursor]
    while todo:
        chunk, used = (here := todo.pop()).chunk, here.used
        used += common_prefix(chunk.tokens[used:], tokens[here.position :])
        if chunk.start + used > best.position:
            best = Cursor(chunk, used)
        for take, by_first in chunk.branches.items():
            begin = chunk.start + take
            if here.used <= take <= used and begin < len(tokens):
                todo += (Cursor(child, 0) for child in by_first.get(int(tokens[begin]), ()))
    return best


def path_to(cursor: Cursor) -> tuple[Segment, ...]:
    """The segments from position 0 to `cursor`."""
    segments: list[Segment] = []
    chunk, used = cursor.chunk, cursor.used
    while chunk.parent is not None:
        if used:
            segments.append(Segment(chunk, chunk.start, chunk.start + used))
        chunk, used = chunk.parent, chunk.take
    return tuple(reversed(segments))
