"""The radix tree without its chunks: runs of tokens up to where texts part.

    chunks  ──[0,128)──┬──[128,256)──[256,300)        runs  ──[0,40)──┬──[40,300)
                       └─take 40──[40,90)                             └──[40,90)

A chunk in which texts part is cut into pieces there, and pieces that only follow each other are one run. A change
of lineage begins a new one.

It is read without the store's lock, from references that were copied under it: where a chunk hangs never changes,
the rest is as it is when it is read, and chunks that go meanwhile are seen once more. There may be hundreds of
thousands of chunks: they become columns of numbers, and other threads get the interpreter after every thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import sleep
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.tree import Chunk, Cursor, path_to

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_AT_ONCE = 1000
_PAUSE_S = 1e-4
"""A wait of no time would often give the interpreter to nobody."""
_SPAN = 1 << 32
"""More tokens than a chunk has."""


def gently(items: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
    """A thousand at a time, each after how many come before them, with room for other threads in between."""
    for begin in range(0, len(items), _AT_ONCE):
        yield begin, items[begin : begin + _AT_ONCE]
        sleep(_PAUSE_S)


class ChunkTable:
    """What is read of every chunk: a column each, in the order in which they were stored, so that parents come
    before their children."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self.by_key: dict[ChunkKey, int] = {}
        self.index: dict[int, int] = {}
        """By identity."""
        columns: list[Ints] = []
        for begin, part in gently(chunks):
            numbers = range(begin, begin + len(part))
            self.index.update(zip(map(id, part), numbers, strict=True))
            self.by_key.update(zip((chunk.key for chunk in part), numbers, strict=True))
            columns.append(_read(part, self.index))
        (
            self.parent,
            self.start,
            self.take,
            self.length,
            self.bytes,
            self.hits,
            self.used,
            self.is_warm,
            self.is_pinned,
            self.follows,
        ) = np.concatenate(columns, axis=1) if columns else np.zeros((10, 0), np.int64)
        self._leave_empty_beginnings()

    def _leave_empty_beginnings(self) -> None:
        """What uses no token of its parent goes on from what is before that."""
        while (odd := np.flatnonzero((self.parent >= 0) & (self.take == 0))).size:
            above = self.parent[odd]
            self.parent[odd], self.take[odd] = self.parent[above], self.take[above]


def _read(part: Sequence[Chunk], index: dict[int, int]) -> Ints:
    return np.array(
        [
            [index.get(id(chunk.parent), -1) for chunk in part],
            [chunk.start for chunk in part],
            [chunk.take for chunk in part],
            [len(chunk.tokens) for chunk in part],
            [chunk.bytes for chunk in part],
            [chunk.hits for chunk in part],
            [chunk.last_used for chunk in part],
            [chunk.payload is not None for chunk in part],
            [chunk.is_pinned for chunk in part],
            [_follows(chunk) for chunk in part],
        ],
        np.int64,
    )


def _follows(chunk: Chunk) -> bool:
    """It is of the lineage of what is before it."""
    parent = chunk.parent
    return parent is not None and (chunk.lineage is parent.lineage or chunk.lineage == parent.lineage)


class _Pieces:
    """Chunks of tokens, cut where others go on from inside them; each after the one that it follows."""

    def __init__(self, table: ChunkTable) -> None:
        text = np.flatnonzero(table.length > 0)
        above, take = table.parent[text], table.take[text]
        is_cut = (above >= 0) & (take < table.length[above])
        self._places = np.unique(np.concatenate([text * _SPAN, above[is_cut] * _SPAN + take[is_cut]]))
        self.chunk, self.begin = np.divmod(self._places, _SPAN)
        self.is_first = self.begin == 0
        after = np.append(self.begin[1:], 0)[: len(self.chunk)]
        self.is_last = after == 0
        self.end = np.where(self.is_last, table.length[self.chunk], after)
        before = self.before(table.parent[self.chunk], table.take[self.chunk])
        self.parent = np.where(self.is_first, before, np.arange(len(self.chunk)) - 1)

    def before(self, chunk: Ints, offset: Ints) -> Ints:
        """The pieces that end with those so many tokens of chunks, or that hold the last of them; -1 for no
        chunk."""
        found = np.searchsorted(self._places, chunk * _SPAN + offset) - 1
        return np.where(chunk >= 0, found, -1)

    def run_heads(self, follows: Bools) -> Ints:
        """The first piece of the run of each. `follows`: pieces that may be of one run with the piece before."""
        branches = np.bincount(self.parent[self.parent >= 0], minlength=len(self.chunk))
        joins = follows & (self.parent >= 0) & (branches[self.parent] == 1)
        head = np.where(joins, self.parent, np.arange(len(self.chunk)))
        while (further := head[head] != head).any():
            head[further] = head[head[further]]
        return head


class Runs:
    """All runs, as columns, each directly before everything below it: from `i` to `i + size[i]`."""

    def __init__(self, chunks: Sequence[Chunk], resident: Iterable[tuple[Cursor, int]] = ()) -> None:
        """`resident`: places whose state up to a length is in the engine."""
        self.table = table = ChunkTable(chunks)
        self._pieces = pieces = _Pieces(table)
        follows = ~pieces.is_first | (table.follows[pieces.chunk] > 0)
        heads, run_of = np.unique(pieces.run_heads(follows), return_inverse=True)
        above = pieces.parent[heads]
        parent = np.where(above >= 0, run_of[above], -1)
        order, self.size = _preorder(parent)
        self._run_of = order[run_of]
        self.parent, self.head = np.empty_like(parent), np.empty_like(heads)
        self.parent[order] = np.where(parent >= 0, order[parent], -1)
        self.head[order] = heads
        self._sum_up(_hot_tokens(table, resident))

    def __len__(self) -> int:
        return len(self.head)

    def _sum_up(self, hot_of: Ints) -> None:
        table, pieces = self.table, self._pieces
        tokens = pieces.end - pieces.begin
        hot = np.clip(hot_of[pieces.chunk] - pieces.begin, 0, tokens)
        self.tokens = self._sums(tokens)
        self.hot = self._sums(hot)
        self.warm = self._sums(np.where(table.is_warm[pieces.chunk] > 0, tokens - hot, 0))
        self.pinned = self._sums(table.is_pinned[pieces.chunk])
        self.hits = self._most(table.hits[pieces.chunk])
        self.used = self._most(table.used[pieces.chunk])
        self.last = self._most(np.arange(len(pieces.chunk)))
        size, length = table.bytes[pieces.chunk], table.length[pieces.chunk]
        self.bytes = self._sums(size * pieces.end // length - size * pieces.begin // length)
        self.chunks = self._sums(pieces.is_first)
        snapshots = np.flatnonzero((table.length == 0) & (table.parent >= 0))
        where = self.run_at(table.parent[snapshots], table.take[snapshots])
        np.add.at(self.bytes, where, table.bytes[snapshots])
        np.add.at(self.chunks, where, 1)
        self.start: Ints = table.start[pieces.chunk[self.head]] + pieces.begin[self.head]

    def _sums(self, of_pieces: npt.NDArray[np.generic]) -> Ints:
        summed = np.zeros(len(self), np.int64)
        np.add.at(summed, self._run_of, of_pieces)
        return summed

    def _most(self, of_pieces: Ints) -> Ints:
        most = np.zeros(len(self), np.int64)
        np.maximum.at(most, self._run_of, of_pieces)
        return most

    @property
    def end(self) -> Ints:
        return self.start + self.tokens

    def find(self, key: bytes, offset: int) -> int | None:
        """The run that has the token after the first `offset` of the chunk whose key begins so."""
        found = next((number for known, number in self.table.by_key.items() if known.startswith(key)), None)
        if found is None or offset >= self.table.length[found]:
            return None
        return int(self.run_at(np.array([found]), np.array([offset + 1]))[0])

    def run_at(self, chunk: Ints, offset: Ints) -> Ints:
        """The runs that hold the last of so many tokens of chunks."""
        return self._run_of[self._pieces.before(chunk, offset)]

    def first(self, run: int) -> tuple[Chunk, int]:
        """The chunk with which a run begins, and how many of its tokens are before that."""
        piece = self.head[run]
        return self.table.chunks[self._pieces.chunk[piece]], int(self._pieces.begin[piece])

    def last_chunk(self, run: int) -> int | None:
        """The index of the chunk with which a text ends; None where one goes on from the run or from inside that
        chunk."""
        piece, pieces = self.last[run], self._pieces
        is_whole = pieces.is_first[piece] and pieces.is_last[piece]
        return int(pieces.chunk[piece]) if is_whole and self.size[run] == 1 else None

    def below(self, of_runs: Ints) -> Ints:
        """Sums over everything at and below each run."""
        until: Ints = np.concatenate([[0], np.cumsum(of_runs)])
        sums: Ints = until[np.arange(len(self)) + self.size] - until[:-1]
        return sums

    def with_all_below(self, heads: Ints) -> Ints:
        """These runs, none of which is below another, and everything below them."""
        edges = np.zeros(len(self) + 1, np.int64)
        np.add.at(edges, heads, 1)
        np.add.at(edges, heads + self.size[heads], -1)
        return np.flatnonzero(np.cumsum(edges[:-1]))


def _hot_tokens(table: ChunkTable, resident: Iterable[tuple[Cursor, int]]) -> Ints:
    """How many of the first tokens of each chunk are in the engine."""
    hot = np.zeros(len(table.chunks), np.int64)
    for cursor, length in resident:
        for segment in path_to(cursor):
            chunk = table.index.get(id(segment.chunk))
            if chunk is not None:
                hot[chunk] = max(hot[chunk], min(segment.end, length) - segment.start)
    return hot


def _preorder(parent: Ints) -> tuple[Ints, Ints]:
    """For nodes whose parents come before them: the place of each in the order in which everything below a node
    directly follows it, and in that order the number of nodes at and below each."""
    above, size = parent.tolist(), [1] * len(parent)
    for _, part in gently(range(len(above) - 1, -1, -1)):
        for node in part:
            if above[node] >= 0:
                size[above[node]] += size[node]
    place, free, top = [0] * len(above), [0] * len(above), 0
    for _, part in gently(range(len(above))):
        for node in part:
            if above[node] >= 0:
                place[node] = free[above[node]]
                free[above[node]] += size[node]
            else:
                place[node] = top
                top += size[node]
            free[node] = place[node] + 1
    order = np.array(place, np.int64)
    sizes = np.empty_like(order)
    sizes[order] = size
    return order, sizes
