"""How long the steps of a Hugging Face engine take: measured when nothing waits, in about a second."""

from __future__ import annotations

from math import inf
from time import perf_counter

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.idle_steps import Steps
from emberkeep.engine.step_table import StepTable

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


def measure_steps(engine: Steps) -> StepTable | None:
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


def _line(engine: Steps, depth: int, before: dict[int, float] | None, most: int, begin: float) -> dict[int, float]:
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


def _fill(engine: Steps, depth: int) -> None:
    start, count, fewer_took = 0, 1, inf
    while start < depth:
        tokens = min(count, engine.capabilities.batch, depth - start)
        begin = perf_counter()
        engine.evaluate([Rows(0, start, np.zeros(tokens, np.int32), outputs=0)])
        elapsed, start = perf_counter() - begin, start + tokens
        if elapsed < _QUICK_S / 2 / _WIDER or elapsed < _HARDLY_LONGER * fewer_took:
            count, fewer_took = _WIDER * count, elapsed


def _milliseconds(engine: Steps, depth: int, count: int, until: float) -> float:
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
