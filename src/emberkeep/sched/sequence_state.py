"""What a sequence carries: its phase, output, tokens, what is on its way to or from the store, what was reused."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from enum import Enum
from typing import Protocol

import numpy as np

from emberkeep.engine.base import KvExport, Payload
from emberkeep.errors import EmberkeepError
from emberkeep.kv.content import Moved
from emberkeep.kv.disk.transfers import Fetch, FetchState
from emberkeep.kv.lookups import Match
from emberkeep.kv.tree import Chunk, Cursor, Made, Span
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import (
    Divergence,
    LookupRecord,
    MissReason,
    Progress,
    Source,
    Sourced,
    Timings,
    TokenLogprob,
)
from emberkeep.values import dataclass


class Phase(Enum):
    WAITING = "waiting"  # for a slot
    LOADING = "loading"  # stored state is on its way
    FULL = "full"  # the answer can go on when messages have left the context
    EVALUATING = "evaluating"  # prompt or answer
    CLOSING = "closing"  # answered; the end of the turn is still to be evaluated
    IDLE = "idle"  # in the engine, ready to be continued or copied; no client waits for it


class EndReason(Enum):
    END_OF_TURN = "end of turn"  # the model sampled an end-of-generation token
    STOPPED = "stopped"  # the output asked to stop
    LENGTH = "length"  # max_tokens or the context


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence went."""

    reason: EndReason
    timings: Timings
    lookup: LookupRecord
    slot: int = -1


class SequenceOutput(Protocol):
    """Receives what a sequence samples, on the engine's thread: methods must be quick.

    What they raise ends the sequence, and `failed` is called; where that raises, it is called once more. Exactly
    one of `ended` and `failed` succeeds unless the sequence is cancelled.
    """

    def progress(self, progress: Progress) -> None: ...

    def scored(self, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        """How likely the tokens of the prompt from `start` on were; some may be told again."""

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """A sampled token, end-of-generation tokens excepted. True: stop now."""

    def kept_tokens(self) -> int:
        """Asked after `token` answered True: how many sampled tokens belong to the answer."""

    def full(self) -> bool:
        """The context is full. True: `Scheduler.make_room` will be called."""

    def ended(self, ending: Ending) -> None: ...

    def failed(self, error: EmberkeepError) -> None: ...


class TokenBuffer:
    """Token ids that only grow or are cut, always visible as one array."""

    def __init__(self, tokens: TokenArray, room: int) -> None:
        self._data = np.empty(len(tokens) + room, np.int32)
        self._data[: len(tokens)] = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> TokenArray:
        return self._data[: self._length][part]

    def begin_as(self, tokens: TokenArray) -> bool:
        """A quick look at the first one: most that have nothing in common differ there."""
        return len(tokens) > 0 and self._length > 0 and bool(self._data[0] == tokens[0])

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.empty(max(64, self._length), np.int32)])
        self._data[self._length] = token
        self._length += 1

    def cut(self, length: int) -> None:
        self._length = min(self._length, length)


@dataclass(frozen=True, slots=True)
class Load:
    """A stored chunk on its way into the sequence, of which the positions up to `end` are wanted."""

    chunk: Chunk
    end: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class NewChunk:
    """What the store is told about a chunk besides its bytes."""

    tokens: TokenArray
    sampled: tuple[Span, ...]
    made: Made
    is_fork: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Chunks on their way into the store, as they were when they were exported: the sequence may have gone on, and
    even have become another, since then."""

    start: Cursor
    chunks: list[NewChunk]
    exports: list[KvExport]
    around: tuple[NewChunk, KvExport] | None = None
    """The block that the first of them lies in, for other hosts."""

    @property
    def is_done(self) -> bool:
        """`payloads` does not block."""
        around = [self.around[1]] if self.around else []
        return all(export.is_done for export in [*self.exports, *around])

    def payloads(self) -> list[Payload]:
        """One for each chunk. Blocks until they are there. Raises EngineError."""
        return [payload for export in self.exports for payload in export.payloads()]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """State of another place, for [start, end) of the sequence."""

    start: int
    end: int
    chunk: Chunk
    source: int
    """The position in its own sequence that goes to `start`."""
    fetch: Fetch

    def part(self, start: int, end: int) -> StoredPiece:
        return replace(self, start=start, end=end, source=self.source + start - self.start)


@dataclass(slots=True)
class Arrivals:
    """What is on its way into one sequence, and what is pinned for it."""

    match: Match | None = None
    loads: deque[Load] = field(default_factory=deque)
    from_disk: frozenset[bytes] = frozenset()
    """Keys of what was not in RAM."""
    moved: list[Moved] = field(default_factory=list)
    """Pinned for the sake of pieces from other places."""
    one_by_one: bool = False
    """The engine has refused several pieces together."""
    patience_ends: float = float("inf")

    def take_pins(self) -> list[Match | Moved]:
        """Nothing is on its way any more; returns what was pinned."""
        pinned: list[Match | Moved] = [*self.moved]
        pinned += [self.match] if self.match else []
        self.loads.clear()
        self.match, self.moved = None, []
        return pinned


def take_together(loads: deque[Load]) -> list[Load]:
    """The first, and what follows it without a gap and is there too."""
    together = [loads.popleft()]
    while loads and _follows(loads[0], together[-1]):
        together.append(loads.popleft())
    return together


def _follows(load: Load, before: Load) -> bool:
    is_there = load.fetch.state is before.fetch.state is FetchState.READY
    is_range = not load.chunk.is_snapshot and not before.chunk.is_snapshot
    return is_there and is_range and load.chunk.start == before.end == before.chunk.end


@dataclass(slots=True)
class Reuse:
    """What of a prompt was not evaluated, by where it came from, and why not more."""

    spans: list[tuple[int, int, Source]] = field(default_factory=list)
    """Positions [start, end) and where their state came from, in order and apart from each other."""
    repaired: int = 0
    reason: MissReason = MissReason.NEW
    divergence: Divergence | None = None
    load_seconds: float = 0.0
    splice_seconds: float = 0.0

    def add(self, start: int, end: int, source: Source) -> None:
        if start < end:
            self.spans.append((start, end, source))

    def by_source(self) -> Counter[Source]:
        """How many tokens came from where."""
        counts: Counter[Source] = Counter()
        for start, end, source in self.spans:
            counts[source] += end - start
        return counts

    @property
    def moved(self) -> int:
        return self.by_source()[Source.MOVED]

    @property
    def in_place(self) -> int:
        return sum(end - start for start, end, source in self.spans if source is not Source.MOVED)

    def record(self, prompt_tokens: int, reusable: int, shapes: Shapes, *, is_approximate: bool) -> LookupRecord:
        """What is said of it: of so many tokens, so many could be reused."""
        reused, by_source = self.in_place, self.by_source()
        reused_all = by_source.total() >= reusable
        return LookupRecord(
            prompt_tokens=prompt_tokens,
            hot_tokens=by_source[Source.HOT],
            warm_tokens=by_source[Source.WARM],
            cold_tokens=by_source[Source.COLD],
            remote_tokens=by_source[Source.REMOTE],
            moved_tokens=by_source[Source.MOVED],
            repaired_tokens=self.repaired,
            wide_tokens=shapes.wide(reused),
            reproducible_tokens=0 if is_approximate else shapes.reproducible(reused),
            is_approximate=is_approximate,
            load_ms=1e3 * self.load_seconds,
            cut_ms=1e3 * self.splice_seconds,
            reason=MissReason.NONE if reused_all else self.reason,
            divergence=None if reused_all else self.divergence,
            sources=self.sources(prompt_tokens),
        )

    def only(self, length: int, moved: int = 0, behind: int = 0) -> None:
        """Only the first `length` tokens of what was loaded were of use, and `moved` ones that were moved up to
        stand `behind` so many others."""
        kept, self.spans = self.spans, []
        for start, end, source in kept:
            self.add(start, min(end, length), source)
        self.add(length + behind, length + behind + moved, Source.MOVED)

    def sources(self, length: int) -> tuple[Sourced, ...]:
        """Where the state of the first `length` tokens came from: what has no other source was evaluated."""
        found: list[Sourced] = []
        reached = 0
        for start, end, source in (*self.spans, (length, length, Source.EVALUATED)):
            runs = ((Source.EVALUATED, min(start, length) - reached), (source, min(end, length) - start))
            for each, tokens in runs:
                if tokens <= 0:
                    continue
                if found and found[-1].source is each:
                    found[-1] = Sourced(each, found[-1].tokens + tokens)
                else:
                    found.append(Sourced(each, tokens))
            reached = max(reached, min(end, length))
        return tuple(found)


_Run = tuple[int, Made]
"""Up to where, and how."""


class Shapes:
    """In what steps the positions from 0 on were computed: an engine rounds differently in those of few rows and
    those of many. What is not known is taken to be narrow."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def computed(self, start: int, end: int, made: Made) -> None:
        """The positions [start, end) were; nothing is known beyond them any more."""
        if self._runs and self._runs[-1] == (start, made) and end > start:  # nearly always: a token more
            self._runs[-1] = (end, made)
            return
        if not self._runs or self._runs[-1][0] != start:
            self._runs = self.until(start)._runs
        if end > start:
            self._append(end, made)

    def until(self, end: int) -> Shapes:
        """A copy for the first `end` positions."""
        first = Shapes()
        for begin, stop, made in self._spans(end):
            if begin < end:
                first._append(min(stop, end), made)
        return first

    def within(self, start: int, end: int) -> Made:
        """All kinds of steps of the positions [start, end), and whether all up to `end` are reproducible."""
        found = Made.UNKNOWN
        for begin, stop, made in self._spans(end):
            if max(begin, start) < min(stop, end):
                found |= made
        return found if self.reproducible(end) >= end else found & ~Made.REPRODUCIBLE

    def wide(self, end: int) -> int:
        """How many of the first `end` positions are known to be of wide steps."""
        spans = self._spans(end)
        return sum(max(min(stop, end) - begin, 0) for begin, stop, made in spans if not made & Made.NARROW)

    def reproducible(self, end: int) -> int:
        """How many of the first `end` positions, without a gap, are."""
        gaps = (begin for begin, _, made in self._spans(end) if not made & Made.REPRODUCIBLE)
        return min(next(gaps, end), end)

    def _append(self, end: int, made: Made) -> None:
        if self._runs and self._runs[-1][1] == made:
            self._runs.pop()
        self._runs.append((end, made))

    def _spans(self, end: int) -> Iterator[tuple[int, int, Made]]:
        begin = 0
        for stop, made in self._runs:
            yield begin, stop, made
            begin = stop
        if begin < end:
            yield begin, end, Made.NARROW
