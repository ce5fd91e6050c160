"""How long a step takes on this machine, by the number of its rows and by how deep in a sequence they are; and
the steps that are taken to measure it while nothing waits.

The time does not always grow with the rows: a kernel that takes rows together may begin with 8 or 64 of them,
and a step just below costs more than one that is filled up with rows that mean nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from time import perf_counter
from typing import Protocol, cast

import numpy as np

from emberkeep.engine.base import Capabilities, Logits, Outcome, Rows
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_NEAR = 128
"""Depths are told apart no better than this, so that a step is looked up and not computed."""
_GAIN = 0.9
"""A step is filled up where it then takes at most this share of its time: measurements are not exact."""
_LEAST = 5
"""Rows from which on a step is filled up: fewer are decoded tokens, which round as they do alone."""


@dataclass(frozen=True)
class StepTable:
    """Measured once; every number in between is interpolated, and beyond them extrapolated."""

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    """One or two, in ascending order like `rows`."""
    milliseconds: tuple[tuple[float, ...], ...]
    """For each of `depths`, of steps of so many `rows`, with logits after one of them."""
    logits_ms: float = 0.0
    """What logits after one row more take."""

    def seconds(self, rows: int, depth: int, outputs: int = 1) -> float:
        """What a step of so many rows takes, with logits after `outputs` of them, filled up where that is
        quicker. Any thread, a microsecond."""
        times = self._times(depth)
        logits = self.logits_ms * max(outputs - 1, 0)
        return (min([self._at(times, rows), *times[bisect_left(self.rows, rows) :]]) + logits) / 1e3

    def filled(self, rows: int, depth: int, most: int) -> int:
        """How many rows a step of `rows` should have, up to `most`: `rows` unless more are clearly quicker."""
        times = self._times(depth)
        first = bisect_left(self.rows, rows)
        if rows < _LEAST:
            return rows
        counts = [*zip(times[first:], self.rows[first : bisect_right(self.rows, most)], strict=False)]
        time, count = min(counts, default=(inf, rows))
        return count if time < _GAIN * self._at(times, rows) else rows

    def json(self) -> dict[str, Json]:
        return {
            "rows": list(self.rows),
            "depths": list(self.depths),
            "milliseconds": [[round(time, 3) for time in times] for times in self.milliseconds],
            "logits_ms": round(self.logits_ms, 3),
        }

    @classmethod
    def from_json(cls, data: Json) -> StepTable:
        """Raises ValueError for anything else than what `json` gave."""
        try:
            fields = cast("dict[str, list[list[float]]]", data)
            rows, depths = (
                tuple(int(cast("float", each)) for each in fields[name]) for name in ("rows", "depths")
            )
            times = tuple(tuple(float(time) for time in line) for line in fields["milliseconds"])
            logits_ms = float(cast("float", fields["logits_ms"]))
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError("This is no table of steps.") from error
        if (
            not (
                _ascends(rows, 1) and _ascends(depths, 0) and len(depths) <= 2 and _are_times(times, rows, depths)
            )
            or not 0 <= logits_ms < inf
        ):
            raise ValueError("This is no table of steps.")
        return cls(rows, depths, times, logits_ms)

    def _at(self, times: Sequence[float], rows: int) -> float:
        """On the straight line between the two nearest numbers of rows."""
        if len(self.rows) == 1:
            return times[0] * rows / self.rows[0]
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        x, y = self.rows[right - 1 : right + 1]
        rise = times[right] - times[right - 1]
        if rows > y and rise < 0:  # the step down that a cliff makes does not go on; a slight one is chance
            is_cliff = times[right] < _GAIN * times[right - 1]
            rise = times[right] * (y - x) / y if is_cliff else 0.0
        return times[right] + rise * (rows - y) / (y - x)

    def _times(self, depth: int) -> tuple[float, ...]:
        """The times of `self.rows` at a depth, from the shallowest measured one on."""
        near = max(depth, self.depths[0]) // _NEAR
        if near not in self._known:
            columns = zip(*self.milliseconds, strict=True)
            self._known[near] = tuple(self._deep(times, near * _NEAR) for times in columns)
        return self._known[near]

    def _deep(self, times: tuple[float, ...], depth: int) -> float:
        if len(times) == 1:
            return times[0]
        (shallow, deep), (first, last) = times, self.depths
        return shallow + max(deep - shallow, 0) * max(depth - first, 0) / (last - first)

    @cached_property
    def _known(self) -> dict[int, tuple[float, ...]]:
        return {}


def _ascends(numbers: Sequence[int], least: int) -> bool:
    return bool(numbers) and numbers[0] >= least and all(a < b for a, b in pairwise(numbers))


def _are_times(times: Sequence[Sequence[float]], rows: Sequence[int], depths: Sequence[int]) -> bool:
    shape = len(times) == len(depths) and all(len(line) == len(rows) for line in times)
    return shape and all(isfinite(time) and time > 0 for line in times for time in line)


class Interrupted(Exception):
    """Something waits for the thread that measures."""


class Stepper(Protocol):
    """What of an engine a measurement needs."""

    @property
    def capabilities(self) -> Capabilities: ...

    def evaluate(self, batch: Sequence[Rows]) -> Outcome: ...

    def logits(self, index: int, row: int = 0) -> Logits: ...

    def trim(self, sequence: int, start: int) -> None: ...

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None: ...


class IdleSteps:
    """The steps of an engine, until something waits: then Interrupted is raised in place of the next one."""

    def __init__(self, engine: Stepper, is_wanted: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_wanted = is_wanted

    def give_way(self) -> None:
        """Raises Interrupted if something waits."""
        if self._is_wanted():
            raise Interrupted

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        self.give_way()
        return self._engine.evaluate(batch)

    def logits(self, index: int, row: int = 0) -> Logits:
        return self._engine.logits(index, row)

    def trim(self, sequence: int, start: int) -> None:
        self._engine.trim(sequence, start)

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return self._engine.step_seconds(rows, depth, outputs)


_ROWS = (1, 8, 32, 2, 16, 4, 128)
"""In the order in which they are measured: between two of them guesses are better than beyond all."""
_SHALLOW, _DEEP = 64, (2048, 1024, 512)
"""The deepest that fits is measured."""
_TIMES = 3
"""Each step is taken up to so often, once more to warm up while there is time, and the quickest counts."""
_LONG_ENOUGH_S = 2.0
"""What takes longer is told by fewer steps, and by none that is deep: a gap may be short."""
_QUICK_S, _AS_QUICK = 0.5, 2.0
"""No step is taken that takes longer, or so many times as long as one of a single row: whoever comes meanwhile
waits for it."""
_WIDER, _HARDLY_LONGER = 4, 1.2
"""A depth is filled with one token, then with so many times as many at once for as long as that is quick, or takes
hardly longer than fewer did."""


def measure_steps(engine: Stepper) -> StepTable | None:
    """One sequence with more and more rows, as drafts have them. `engine` holds nothing, before and after. None
    where a context is too small for it. Raises what the engine raises."""
    able = engine.capabilities
    most = min(able.batch, able.outputs)
    room = able.context - max(_ROWS)
    depths = [each for each in (_SHALLOW, next((deep for deep in _DEEP if deep <= room), 0)) if 0 < each <= room]
    times: list[dict[int, float]] = []
    begin = perf_counter()
    for depth in depths:
        _fill(engine, depth)
        if not times:
            begin = perf_counter()
        times.append(_line(engine, depth, times[0] if times else None, most, begin))
        engine.trim(0, 0)
        if perf_counter() - begin > _LONG_ENOUGH_S / 2:
            break
    if not times:
        return None
    known = sorted(times[0])
    return StepTable(
        tuple(known), tuple(depths[: len(times)]), tuple(tuple(line[count] for count in known) for line in times)
    )


def _line(
    engine: Stepper, depth: int, before: dict[int, float] | None, most: int, begin: float
) -> dict[int, float]:
    """Milliseconds by the number of rows: of those that `before` has, or of those that do not take too long."""
    line: dict[int, float] = {}
    for count in before or [count for count in _ROWS if count <= most]:
        if before is None and line and _expected(line, count) > max(1e3 * _QUICK_S, _AS_QUICK * line[1]):
            continue
        line[count] = _milliseconds(engine, depth, count, until=begin + _LONG_ENOUGH_S)
        if before is None and perf_counter() - begin > _LONG_ENOUGH_S:
            break
    return line


def _expected(line: dict[int, float], count: int) -> float:
    """What a step takes by the two smaller ones that are nearest to it; no more than a larger one took."""
    if any(rows > count for rows in line):
        return 0.0
    *before, last = sorted(line)
    rise = (line[last] - line[before[-1]]) / (last - before[-1]) if before else 0.0
    return line[last] + rise * (count - last)


def _fill(engine: Stepper, depth: int) -> None:
    start, count, fewer_took = 0, 1, inf
    while start < depth:
        tokens = min(count, engine.capabilities.batch, depth - start)
        begin = perf_counter()
        engine.evaluate([Rows(0, start, np.zeros(tokens, np.int32), outputs=0)])
        elapsed, start = perf_counter() - begin, start + tokens
        if elapsed < _QUICK_S / 2 / _WIDER or elapsed < _HARDLY_LONGER * fewer_took:
            count, fewer_took = _WIDER * count, elapsed


def _milliseconds(engine: Stepper, depth: int, count: int, until: float) -> float:
    rows = Rows(0, depth, np.zeros(count, np.int32), outputs=count)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _TIMES and sum(seconds) < _LONG_ENOUGH_S / len(_ROWS)):
        begin = perf_counter()
        engine.evaluate([rows])
        seconds.append(perf_counter() - begin)
        engine.trim(0, depth)
        if perf_counter() > until:
            break
    return 1e3 * min(seconds[1:] or seconds)
