"""What a measured table says of steps that were not measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.step_table import StepTable

PLAIN = StepTable((1, 2, 4, 8, 16), (64, 2112), ((10, 12, 16, 24, 40), (20, 24, 32, 48, 80)))
CLIFF = StepTable((1, 8, 63, 64, 128), (64, 2112), ((10, 80, 630, 100, 200), (60, 480, 3780, 360, 700)))


def test_measured_steps_are_told_as_they_were_measured() -> None:
    for depth, times in zip(PLAIN.depths, PLAIN.milliseconds, strict=True):
        told = [round(1e3 * PLAIN.seconds(rows, depth)) for rows in PLAIN.rows]
        assert told == pytest.approx(list(times), rel=0.04)


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
