"""How steps are measured, and what a measured table says of those that were not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine import step_table
from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.step_table import StepTable, measure_steps
from helpers.engines import RecordingEngine

PLAIN = StepTable((1, 2, 4, 8, 16), (64, 2112), ((10, 12, 16, 24, 40), (20, 24, 32, 48, 80)))

CLIFF = StepTable((1, 8, 63, 64, 128), (64, 2112), ((10, 80, 630, 100, 200), (60, 480, 3780, 360, 700)))


def test_measured_steps_are_told_as_they_were_measured() -> None:
    for depth, times in zip(PLAIN.depths, PLAIN.milliseconds, strict=True):
        found = [round(1e3 * PLAIN.seconds(rows, depth)) for rows in PLAIN.rows]
        assert found == pytest.approx(list(times), rel=0.04)


def test_between_and_beyond_what_was_measured_lies_a_straight_line() -> None:
    assert 1e3 * PLAIN.seconds(3, 0) == pytest.approx(14)
    assert 1e3 * PLAIN.seconds(12, 0) == pytest.approx(32)
    assert 1e3 * PLAIN.seconds(116, 0) == pytest.approx(240)
    assert 1e3 * PLAIN.seconds(1, 64 + 1024) == pytest.approx(15, rel=0.05)
    assert 1e3 * PLAIN.seconds(1, 64 + 4096) == pytest.approx(30, rel=0.05)


def test_below_a_cliff_a_step_costs_what_the_filled_up_one_does() -> None:
    assert CLIFF.seconds(45, 64) == CLIFF.seconds(63, 64) == CLIFF.seconds(64, 64) == pytest.approx(0.1)
    assert CLIFF.seconds(8, 64) == pytest.approx(0.08)
    assert CLIFF.seconds(65, 64) > CLIFF.seconds(64, 64)


@pytest.mark.parametrize(
    ("rows", "depth", "filled"),
    [
        (1, 64, 1),
        (4, 9999, 4),
        (8, 64, 8),
        (12, 64, 64),
        (45, 64, 64),
        (64, 64, 64),
        (100, 64, 100),
        (500, 64, 500),
        (7, 2112, 64),
    ],
)
def test_a_step_is_filled_up_where_that_is_clearly_quicker(rows: int, depth: int, filled: int) -> None:
    assert CLIFF.filled(rows, depth, most=512) == filled
    assert PLAIN.filled(rows, depth, most=512) == rows


def test_no_step_is_filled_up_beyond_what_an_engine_takes() -> None:
    assert CLIFF.filled(45, 64, most=63) == 45
    assert CLIFF.filled(45, 64, most=64) == 64


def test_a_table_that_ends_at_a_cliff_goes_on_upwards() -> None:
    ends = StepTable((1, 63, 64), (64,), ((10, 630, 100),))
    assert ends.seconds(128, 9999) == pytest.approx(0.2)


def test_what_took_slightly_less_by_chance_is_no_cliff() -> None:
    level = StepTable((1, 2), (64,), ((264.1, 263.9),))
    assert level.seconds(8, 64) == pytest.approx(0.264, rel=0.01)


def test_one_measured_step_is_enough_for_a_guess() -> None:
    assert StepTable((1,), (64,), ((10,),)).seconds(5, 3000) == pytest.approx(0.05)


@given(st.integers(1, 2000), st.integers(0, 100_000))
def test_more_rows_and_more_depth_never_take_less_time(rows: int, depth: int) -> None:
    for table in (PLAIN, CLIFF):
        assert 0 < table.seconds(rows, depth) <= table.seconds(rows + 1, depth)
        assert table.seconds(rows, depth) <= table.seconds(rows, depth + 500)


def test_logits_after_more_rows_take_longer() -> None:
    table = replace(PLAIN, logits_ms=3.0)
    assert table.seconds(8, 64) == PLAIN.seconds(8, 64) == table.seconds(8, 64, outputs=0)
    assert table.seconds(8, 64, outputs=8) == pytest.approx(PLAIN.seconds(8, 64) + 0.021)


def test_a_table_can_be_written_and_read() -> None:
    for table in (PLAIN, CLIFF):
        assert StepTable.from_json(json.loads(json.dumps(table.json()))) == table


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [1, 1, 4, 8, 16]},
        {"rows": [0, 2, 4, 8, 16]},
        {"rows": [1, 2]},
        {"depths": [64]},
        {"depths": [64, 65, 66]},
        {"milliseconds": [[1, 2, 3, 4, 5], [1, 2, 3, 4, float("nan")]]},
        {"milliseconds": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]},
        {"milliseconds": None},
        {"logits_ms": -1.0},
        {"logits_ms": float("inf")},
        {"logits_ms": None},
        {"milliseconds": ["abcde", "abcde"]},
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"table|convert"):
        StepTable.from_json({**PLAIN.json(), **change})
    for other in (None, [], {}, "table"):
        with pytest.raises(ValueError, match="table"):
            StepTable.from_json(other)


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
    monkeypatch.setattr(step_table, "_LONG_ENOUGH_S", -1.0)
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

    monkeypatch.setattr(step_table, "perf_counter", lambda: now)
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
