"""In what steps a sequence was computed: an engine rounds differently in those of few rows and those of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emberkeep.kv.tree import Made

_Run = tuple[int, Made]
"""Up to where, and how."""


class Shapes:
    """Of the positions from 0 on. What nobody told is taken to be narrow."""

    def __init__(self, runs: Iterable[_Run] = ()) -> None:
        self._runs = list(runs)

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
        """Of the positions [start, end): all kinds of steps, and whether all up to `end` are reproducible."""
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
