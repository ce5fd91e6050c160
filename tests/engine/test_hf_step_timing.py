"""What is measured of steps, with an engine that takes no time."""

from __future__ import annotations

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.hf import own_steps
from emberkeep.engine.hf.own_steps import measure_steps
from helpers.engines import RecordingEngine


def test_steps_of_every_size_are_measured_at_two_depths_and_nothing_is_left():
    engine = RecordingEngine(cells=1 << 13, context=4096, sequences=64, batch=512)
    table = measure_steps(engine)
    assert table.rows == (1, 2, 4, 8, 16, 32, 128)
    assert table.depths == (64, 2048)
    assert {shape[1] for (shape,) in engine.shapes if shape[3]} == {64, 2048}
    assert not engine.stats()["pool"]["used_blocks"]


@pytest.mark.parametrize(("context", "depths"), [(1024, (64, 512)), (300, (64,)), (100, None)])
def test_a_small_context_is_measured_as_far_as_it_goes(context, depths):
    table = measure_steps(FakeEngine(context=context, batch=8))
    assert (table.depths if table else None) == depths
    assert table is None or table.rows == (1, 2, 4, 8)  # no more than a step may have


def test_a_slow_machine_is_measured_less(monkeypatch):
    monkeypatch.setattr(own_steps, "_LONG_ENOUGH_S", -1.0)
    table = measure_steps(FakeEngine())
    assert (table.rows, table.depths) == ((1,), (64,))


def timed(monkeypatch, seconds):
    """An engine whose steps take as long as `seconds` says of their rows, by the clock that measures them."""
    now = 0.0

    class Slow(RecordingEngine):
        def evaluate(self, batch):
            nonlocal now
            now += seconds(len(batch[0].tokens))
            return super().evaluate(batch)

    monkeypatch.setattr(own_steps, "perf_counter", lambda: now)
    return Slow(cells=1 << 13, context=4096, sequences=64, batch=512)


@pytest.mark.parametrize(
    ("seconds", "rows", "taken"),
    [
        (lambda rows: 0.265, (1, 2, 8, 32), None),  # weights come over the link
        (lambda rows: 0.04 * rows, (1, 2, 4, 8), None),  # whoever comes meanwhile waits for a step
        (lambda rows: 0.7, (1, 8), [1, 1, 8]),
    ],
)
def test_slow_steps_are_measured_as_far_as_drafts_go_and_few_times(monkeypatch, seconds, rows, taken):
    engine = timed(monkeypatch, seconds)
    found = measure_steps(engine).rows
    shapes = [shape[2] for (shape,) in engine.shapes if shape[3]]
    assert found == rows and max(shapes) == rows[-1]
    assert taken in (None, shapes)


def test_a_depth_is_reached_in_slices_that_are_quick(monkeypatch):
    for seconds, widest in ((lambda rows: 0.01 * rows, 16), (lambda rows: 0.9, 43)):
        engine = timed(monkeypatch, seconds)
        measure_steps(engine)
        filled = [shape[2] for (shape,) in engine.shapes if not shape[3]]
        assert sum(filled) == 64
        assert max(filled) == widest
