"""Where the state of a sequence came from, and in what steps it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from emberkeep.kv.tree import Made
from emberkeep.types.events import Divergence, LookupRecord, MissReason, Source, Sourced
from emberkeep.values import dataclass


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

    def count(self, source: Source) -> int:
        return sum(end - start for start, end, known in self.spans if known is source)

    @property
    def hot(self) -> int:
        return self.count(Source.HOT)

    @property
    def warm(self) -> int:
        return self.count(Source.WARM)

    @property
    def cold(self) -> int:
        return self.count(Source.COLD)

    @property
    def remote(self) -> int:
        return self.count(Source.REMOTE)

    @property
    def moved(self) -> int:
        return self.count(Source.MOVED)

    @property
    def in_place(self) -> int:
        return self.hot + self.warm + self.cold + self.remote

    def record(self, prompt_tokens: int, reusable: int, shapes: Shapes, *, is_approximate: bool) -> LookupRecord:
        """What is said of it: of so many tokens, so many could be reused."""
        reused = self.in_place
        reused_all = reused + self.moved >= reusable
        return LookupRecord(
            prompt_tokens=prompt_tokens,
            hot_tokens=self.hot,
            warm_tokens=self.warm,
            cold_tokens=self.cold,
            remote_tokens=self.remote,
            moved_tokens=self.moved,
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
        """Reaching at least to `end`."""
        begin = 0
        for stop, made in self._runs:
            yield begin, stop, made
            begin = stop
        if begin < end:
            yield begin, end, Made.NARROW
