"""How long the steps of a Hugging Face engine take: measured when nothing waits, in about a second."""

from __future__ import annotations

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
_SLICE = 256
"""Tokens that a depth is filled with at once: whoever comes meanwhile waits for them."""


def measure_steps(engine: Steps) -> StepTable | None:
    """One sequence with more and more rows, as drafts have them. `engine` holds nothing, before and after. None
    where a context is too small for it. Raises what the engine raises."""
    begin, able = perf_counter(), engine.capabilities
    most = min(able.batch, able.outputs)
    room = able.context - max(_ROWS)
    depths = [each for each in (_SHALLOW, next((deep for deep in _DEEP if deep <= room), 0)) if 0 < each <= room]
    rows = [count for count in _ROWS if count <= most]
    times: list[dict[int, float]] = []
    for depth in depths:
        _fill(engine, depth)
        times.append({})
        for count in rows:
            times[-1][count] = _milliseconds(engine, depth, count, until=begin + _LONG_ENOUGH_S)
            if len(times) == 1 and perf_counter() - begin > _LONG_ENOUGH_S:
                break
        engine.trim(0, 0)
        if perf_counter() - begin > _LONG_ENOUGH_S / 2:
            break
    if not times:
        return None
    known = sorted(times[0])
    return StepTable(
        tuple(known), tuple(depths[: len(times)]), tuple(tuple(line[count] for count in known) for line in times)
    )


def _fill(engine: Steps, depth: int) -> None:
    step = min(engine.capabilities.batch, _SLICE)
    for start in range(0, depth, step):
        engine.evaluate([Rows(0, start, np.zeros(min(step, depth - start), np.int32), outputs=0)])


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
