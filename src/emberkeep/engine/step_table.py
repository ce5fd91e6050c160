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
from typing import Protocol, cast

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
