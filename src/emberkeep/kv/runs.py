"""The radix tree without its chunks: runs of tokens up to where texts part.

    chunks  ──[0,128)──┬──[128,256)──[256,300)        runs  ──[0,40)──┬──[40,300)
                       └─take 40──[40,90)                             └──[40,90)

A chunk in which texts part is cut there, and parts that only follow each other are one run. A change of lineage
begins a new one.

It is read without the store's lock, from references that were copied under it: where a chunk hangs never changes,
the rest is as it is when it is read, and chunks that go meanwhile are seen once more. There may be hundreds of
thousands of chunks: other threads get the interpreter after every thousand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from time import sleep
from typing import TypeVar

from emberkeep.kv.tree import Chunk, Cursor, path_to
from emberkeep.values import dataclass

T = TypeVar("T")

_AT_ONCE = 1000
_PAUSE_S = 1e-4
"""A wait of no time would often give the interpreter to nobody."""


def gently(items: Sequence[T]) -> Iterator[T]:
    """One after the other, with room for other threads after every thousand."""
    for number, item in enumerate(items):
        if number % _AT_ONCE == 0:
            sleep(_PAUSE_S)
        yield item


@dataclass(slots=True, eq=False)
class Run:
    """Tokens that only follow each other."""

    number: int
    """Runs are numbered so that each comes after the one it goes on from."""
    parent: Run | None
    first: Chunk
    offset: int
    """How many tokens of the first chunk are before the run."""
    last: Chunk
    ends_whole: bool = False
    """It ends with a chunk in which nothing else begins."""
    children: list[Run] = field(default_factory=list)
    tokens: int = 0
    hot: int = 0
    warm: int = 0
    bytes: int = 0
    chunks: int = 0
    hits: int = 0
    used: int = 0
    is_pinned: bool = False
    tokens_below: int = 0
    """Of it and everything that goes on from it."""
    used_below: int = 0

    @property
    def start(self) -> int:
        return self.first.start + self.offset

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def add(self, chunk: Chunk, begin: int, end: int, hot: int) -> None:
        """The tokens [begin, end) of a chunk, the first `hot` tokens of which are in the engine."""
        length, size, tokens = len(chunk.tokens), chunk.bytes, end - begin
        hot = min(max(hot - begin, 0), tokens) if hot else 0
        self.last, self.ends_whole = chunk, tokens == length
        self.tokens += tokens
        self.hot += hot
        self.warm += tokens - hot if chunk.payload is not None else 0
        self.bytes += size * end // length - size * begin // length
        self.chunks += begin == 0
        self.hits, self.used = max(self.hits, chunk.hits), max(self.used, chunk.last_used)
        self.is_pinned |= chunk.is_pinned


class Runs:
    """All runs of a store, by number."""

    def __init__(self, chunks: Sequence[Chunk], resident: Iterable[tuple[Cursor, int]] = ()) -> None:
        """`chunks` are in the order in which they were stored, so that parents come before their children;
        `resident`: places whose state up to a length is in the engine."""
        self.by_key = {chunk.key: chunk for chunk in chunks}
        self.runs: list[Run] = []
        self._ends: dict[int, list[int]] = {}
        """By a chunk's identity: the ends of the parts into which it is cut."""
        self._parts: dict[int, list[Run]] = {}
        """The runs of these."""
        self._cut([chunk for chunk in gently(chunks) if len(chunk.tokens)], _hot_tokens(resident))
        for chunk in gently(chunks):
            if not chunk.is_snapshot:
                continue
            above, take = _goes_on_from(chunk)
            if above is not None and (run := self.run_at(above, take)):
                run.bytes += chunk.bytes
                run.chunks += 1
        for run in self.runs:
            run.tokens_below, run.used_below = run.tokens, run.used
        for run in gently(self.runs[::-1]):
            if run.parent is not None:
                run.parent.tokens_below += run.tokens_below
                run.parent.used_below = max(run.parent.used_below, run.used_below)

    def __len__(self) -> int:
        return len(self.runs)

    def run_at(self, chunk: Chunk, used: int) -> Run | None:
        """The run that has the last of the first `used` tokens of a chunk; None for a chunk that is not there."""
        ends = self._ends.get(id(chunk))
        return self._parts[id(chunk)][bisect_left(ends, used)] if ends else None

    def find(self, key: bytes, offset: int) -> Run | None:
        """The run that has the token after the first `offset` of the chunk whose key begins so."""
        chunk = next((chunk for known, chunk in self.by_key.items() if known.startswith(key)), None)
        return self.run_at(chunk, offset + 1) if chunk and offset < len(chunk.tokens) else None

    def _cut(self, texts: Sequence[Chunk], hot: dict[int, int]) -> None:
        self._ends = {id(chunk): [len(chunk.tokens)] for chunk in texts}
        places = [_goes_on_from(chunk) for chunk in gently(texts)]
        branches = Counter((id(above), take) for above, take in places)
        for identity, take in branches:
            if (ends := self._ends.get(identity)) and take < ends[-1]:
                insort(ends, take)
                branches[identity, take] += 1  # the chunk itself goes on there
        for chunk, (above, take) in zip(gently(texts), places, strict=True):
            ends = self._ends[id(chunk)]
            run = self.run_at(above, take) if above is not None and take else None
            follows = run is not None and branches[id(above), take] == 1 and chunk.lineage == run.last.lineage
            parts = self._parts[id(chunk)] = []
            for begin, end in pairwise([0, *ends]):
                if run is None or begin or not follows:
                    run = self._new(run, chunk, begin)
                run.add(chunk, begin, end, hot.get(id(chunk), 0))
                parts.append(run)

    def _new(self, parent: Run | None, chunk: Chunk, offset: int) -> Run:
        run = Run(len(self.runs), parent, chunk, offset, chunk)
        self.runs.append(run)
        if parent is not None:
            parent.children.append(run)
        return run


def _goes_on_from(chunk: Chunk) -> tuple[Chunk | None, int]:
    """What is before a chunk, and how many tokens of it: what uses none of its parent goes on from before that."""
    above, take = chunk.parent, chunk.take
    while above is not None and take == 0:
        take, above = above.take, above.parent
    return above, take


def _hot_tokens(resident: Iterable[tuple[Cursor, int]]) -> dict[int, int]:
    """How many of the first tokens of each chunk are in the engine, by the chunk's identity."""
    hot: dict[int, int] = {}
    for cursor, length in resident:
        for segment in path_to(cursor):
            tokens = min(segment.end, length) - segment.start
            hot[id(segment.chunk)] = max(hot.get(id(segment.chunk), 0), tokens)
    return hot
