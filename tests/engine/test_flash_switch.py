"""Which kind of attention the next step is computed with, and what is lost by not knowing what comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp.live_context import FlashSwitch
from emberkeep.engine.step_table import StepTable

SLIGHT = 1e-9
FEW, MANY = 1, 64


def table(few: float, many: float) -> StepTable:
    """What `FEW` and `MANY` rows take at any depth, in milliseconds. `many` is no less."""
    return StepTable((FEW, MANY), (64,), ((few, many),))


WITH, WITHOUT = table(10, 300), table(20, 100)
TABLES = {True: WITH, False: WITHOUT}
"""With flash attention few rows are quicker, by 10 ms; without it many are, by 200 ms."""


def step(rows: int, start: int = 0, sequences: int = 1) -> list[Rows]:
    return [Rows(number, start, np.zeros(rows, np.int32), outputs=1) for number in range(sequences)]


@dataclass
class Run:
    """An engine that only adds up: steps as the switch wants them, with what it says that they take."""

    switch: FlashSwitch
    seconds: float = 0.0
    changes: int = 0

    def step(self, rows: int, cost: float) -> bool:
        """The way in which it was computed."""
        if self.switch.is_due(step(rows), cells=rows, seconds=cost):
            self.switch.change()
            self.changes += 1
            self.seconds += cost
        assert self.switch.table is not None
        self.seconds += self.switch.table.seconds(rows, rows)
        return self.switch.flash


# ── the rule ──


def test_it_changes_when_more_was_lost_than_changing_takes() -> None:
    """The step by which that is so is computed in the other way already."""
    run = Run(FlashSwitch(TABLES, flash=True, has_choice=True))
    assert [run.step(MANY, cost=0.5) for _ in range(4)] == [True, True, False, False]
    # Back as well, from nothing lost on: 10 ms at a time.
    assert [run.step(FEW, cost=0.035) for _ in range(5)] == [False, False, False, True, True]
    assert run.changes == 2


def test_what_is_gained_makes_up_for_what_is_lost() -> None:
    run = Run(FlashSwitch(TABLES, flash=True, has_choice=True))
    for _ in range(50):
        assert run.step(MANY, cost=0.3)
        for _ in range(20):
            assert run.step(FEW, cost=0.3)


def test_what_was_gained_before_is_no_credit() -> None:
    """Otherwise a long quiet time would have to be made up for before anything changes."""
    run = Run(FlashSwitch(TABLES, flash=True, has_choice=True))
    for _ in range(1000):
        run.step(FEW, cost=0.3)
    assert [run.step(MANY, cost=0.3) for _ in range(2)] == [True, False]


def test_the_table_is_that_of_the_way_it_is() -> None:
    switch = FlashSwitch(TABLES, flash=True, has_choice=True)
    assert (switch.flash, switch.table) == (True, WITH)
    switch.change()
    assert (switch.flash, switch.table) == (False, WITHOUT)
    switch.change()
    assert (switch.flash, switch.table) == (True, WITH)


def test_where_it_cannot_change_now_the_loss_is_counted_anew() -> None:
    switch = FlashSwitch(TABLES, flash=True, has_choice=True)
    assert [switch.is_due(step(MANY), MANY, 0.3) for _ in range(2)] == [False, True]
    assert switch.is_due(step(MANY), MANY, 0.3)  # still
    switch.stay()
    assert (switch.flash, switch.has_choice) == (True, True)
    assert [switch.is_due(step(MANY), MANY, 0.3) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("flash", [True, False])
def test_where_it_cannot_change_any_more_it_does_not(flash: bool) -> None:
    switch = FlashSwitch(TABLES, flash, has_choice=True)
    switch.settle()
    assert not switch.has_choice
    assert (switch.flash, switch.table) == (flash, TABLES[flash])
    assert not any(switch.is_due(step(rows), rows, 0.0) for rows in (FEW, MANY) * 50)


def test_a_step_takes_what_it_takes_in_the_quicker_way() -> None:
    with_flash = StepTable((1,), (0, 1024), ((10,), (110,)))
    without = StepTable((1,), (0, 1024), ((20,), (70,)), logits_ms=3)
    switch = FlashSwitch({True: with_flash, False: without}, flash=True, has_choice=True)
    assert switch.seconds(1, 0, 0, 1) == pytest.approx(0.010)
    assert switch.seconds(1, 1024, 1024, 1) == pytest.approx(0.070)
    assert switch.seconds(1, 1024, 1024, 3) == pytest.approx(0.076)
    # With flash attention what belongs to others is passed over.
    assert switch.seconds(1, 256, 1280, 1) == pytest.approx(0.035)
    switch.settle()
    assert switch.seconds(1, 1024, 1024, 1) == pytest.approx(0.110)
    assert FlashSwitch({}, flash=True, has_choice=False).seconds(1, 0, 0, 1) is None


@pytest.mark.parametrize("tables", [{}, {True: WITH}, {False: WITHOUT}], ids=["none", "with", "without"])
@pytest.mark.parametrize("flash", [True, False])
def test_without_two_tables_there_is_no_choice(tables: dict[bool, StepTable], flash: bool) -> None:
    switch = FlashSwitch(tables, flash, has_choice=len(tables) > 1)
    assert not switch.has_choice
    assert not any(switch.is_due(step(rows), rows, 0.0) for rows in (FEW, MANY) * 50)
    assert switch.table == tables.get(flash)


# ── how deep a row sees ──

DEEPER = StepTable((1,), (0, 2048), ((1,), (2049,)))
"""As many milliseconds as there are cells to look at, and one; what is near each other is not told apart."""


@pytest.mark.parametrize(
    ("sequences", "start", "cells", "seen"),
    [
        (1, 2048, 2048, 2048),  # alone: its own are all there are
        (8, 1024, 8192, 1664),  # a tenth of what others have: 1024 + 716, to the next 128 below
        (1, 0, 4096, 384),
    ],
)
def test_a_row_with_flash_attention_skips_the_cells_of_others(
    sequences: int, start: int, cells: int, seen: int
) -> None:
    """Without it looks at all that are in use, whoever has them."""
    nothing = StepTable((1,), (64,), ((1e-6,),))
    batch = step(1, start, sequences)
    for tables, flash, depth in (
        ({True: DEEPER, False: nothing}, True, seen),
        ({True: nothing, False: DEEPER}, False, cells // 128 * 128),
    ):
        lost = sequences * (depth + 1) / 1e3
        assert FlashSwitch(tables, flash, has_choice=len(tables) > 1).is_due(batch, cells, lost - 1e-3)
        assert not FlashSwitch(tables, flash, has_choice=len(tables) > 1).is_due(batch, cells, lost + 1e-3)


def test_the_depth_is_the_mean_of_all_rows() -> None:
    """A prompt at the beginning beside a token deep in another conversation."""
    batch = [Rows(0, 0, np.zeros(63, np.int32), outputs=0), Rows(1, 2048, np.zeros(1, np.int32), outputs=1)]
    tables = {True: DEEPER, False: StepTable((1,), (64,), ((1e-6,),))}
    # Hardly any of its own, and a tenth of the other 2016: to the next 128 below, for each of 64 rows.
    assert FlashSwitch(tables, flash=True, has_choice=len(tables) > 1).is_due(batch, 2048, 64 * 0.128)
    assert not FlashSwitch(tables, flash=True, has_choice=len(tables) > 1).is_due(batch, 2048, 64 * 0.13)


# ── what it costs not to know what comes ──

times = st.floats(0.01, 1000.0)
rows = st.integers(1, MANY)


@st.composite
def tables_of_both(draw: st.DrawFn) -> dict[bool, StepTable]:
    return {flash: table(*sorted((draw(times), draw(times)))) for flash in (True, False)}


histories = st.lists(rows, min_size=1, max_size=200)
costs = st.floats(0.001, 2.0)


@given(tables_of_both(), histories, costs, st.booleans())
def test_where_one_way_is_never_slower_at_most_twice_the_cost_of_changing_is_lost(
    tables, steps, cost, flash
) -> None:
    """Once while it waits, once for changing; nothing if it began so."""
    better = {
        flash: tables[flash],
        not flash: StepTable((FEW, MANY), (64,), (tuple(time + 1 for time in tables[flash].milliseconds[0]),)),
    }
    best = sum(tables[flash].seconds(count, count) for count in steps)
    for begin, lost in ((flash, 0.0), (not flash, 2 * cost)):
        run = Run(FlashSwitch(better, begin, has_choice=len(better) > 1))
        for count in steps:
            run.step(count, cost)
        assert run.seconds <= best + lost + SLIGHT
        assert run.changes <= (begin != flash)


@given(tables_of_both(), st.lists(st.tuples(rows, costs), min_size=1, max_size=200), st.booleans())
def test_what_is_lost_against_either_fixed_way_is_bounded_whatever_comes(tables, steps, flash) -> None:
    """Against a fixed way no more is lost than three times what that loses by being fixed, and twice a change.

    Let C be what changing takes. In the other way it loses at most C against the fixed one, since it changes when
    it would be more; and each time it went there, the fixed one had lost more than C. So for each C that the fixed
    one had lost, at most 3 C are: one in the other way, and two changes, there and back. If it begins in the other
    way, that is C and one change more. Where C is not always the same, the least of it is what had been lost.
    """
    run = Run(FlashSwitch(tables, flash, has_choice=len(tables) > 1))
    for count, cost in steps:
        run.step(count, cost)
    taken = {way: [tables[way].seconds(count, count) for count, _ in steps] for way in (True, False)}
    least = sum(min(pair) for pair in zip(*taken.values(), strict=True))
    low, high = min(cost for _, cost in steps), max(cost for _, cost in steps)
    for way in (True, False):
        itself = sum(taken[way])
        begun = 0.0 if way == flash else 2 * high
        assert run.seconds <= itself + 3 * (itself - least) * high / low + begun + SLIGHT


@given(tables_of_both(), histories, costs, st.booleans())
def test_it_does_not_change_more_often_than_it_pays(tables, steps, cost, flash) -> None:
    """Between two changes the way that is left has lost more than a change takes."""
    run = Run(FlashSwitch(tables, flash, has_choice=len(tables) > 1))
    lost = 0.0
    for count in steps:
        before = run.switch.flash
        now, then = (tables[way].seconds(count, count) for way in (before, not before))
        lost += max(now - then, 0.0)
        if run.step(count, cost) != before:
            assert lost > cost - SLIGHT
            lost = 0.0
