"""What is stored says in what steps it was computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.tree import Made
from emberkeep.sched.sequence_state import Shapes
from emberkeep.types.lineage import EXACT
from helpers.kv_building import chunks_of
from helpers.scheduling import PROMPT, Gate, Rig, text

WIDE, NARROW = Made.WIDE, Made.NARROW
ALONE = Made.WIDE | Made.REPRODUCIBLE
CLASSES = [WIDE, NARROW, ALONE]


# ── the runs ──

steps = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.sampled_from(CLASSES)), max_size=12)


@given(steps, st.integers(0, 60), st.integers(0, 60))
def test_runs_say_what_a_list_of_positions_says(steps, start, end):
    shapes, plainly = Shapes(), list[Made]()
    for back, count, made in steps:
        begin = max(len(plainly) - back, 0)
        plainly[begin:] = [made] * count
        shapes.computed(begin, begin + count, made)
    first = [plainly[i] if i < len(plainly) else NARROW for i in range(end)]
    together = Made.UNKNOWN
    for made in first[start:]:
        together |= made
    if not all(made is ALONE for made in first):
        together &= ~Made.REPRODUCIBLE
    assert shapes.within(start, end) == together
    assert shapes.wide(end) == sum(not made & NARROW for made in first)
    assert shapes.reproducible(end) == next((i for i, made in enumerate(first) if made is not ALONE), end)
    assert shapes.until(end).within(start, end) == shapes.within(start, end)


# ── in the loop ──


def kinds(rig: Rig) -> list[tuple[int, int, Made]]:
    return sorted((chunk.start, chunk.end, chunk.made) for chunk in chunks_of(rig.store))


@pytest.fixture
def alone(tmp_path: Path):
    with Rig(tmp_path, FakeEngine(cells=1 << 15), parallel=1, prefill_slice=128) as rig:
        yield rig


@pytest.mark.parametrize("given", [Made.UNKNOWN, Made.GIVEN])
def test_a_prompt_is_wide_its_last_token_and_the_answer_are_narrow_and_given_ids_are_known(
    alone: Rig, given
) -> None:
    alone.run(PROMPT[:300], given=bool(given))
    assert [made for _, _, made in kinds(alone)] == [ALONE | given, ALONE | given, WIDE | NARROW | given]


def test_slices_beside_an_answer_are_narrow(tmp_path: Path) -> None:
    engine = FakeEngine(cells=1 << 15)
    with Rig(tmp_path, engine) as rig:
        rig.store.costs.evaluate.value = 1.0  # as slow as can be: the smallest slices
        gate = Gate(engine, holds=lambda step: step == 6)
        first = rig.start(PROMPT[:257], max_new=60, closing=())
        gate.reached()
        other = text(385, seed=9)
        second = rig.start(other)
        gate.open()
        first.wait()
        second.wait()
        rig.settle()
        of_other = rig.store.match(EXACT, rig.sequence(other).tokens)
        assert {segment.chunk.made & ~WIDE for segment in of_other.segments[:2]} == {NARROW}
        rig.store.release(of_other)


def test_an_engine_that_rounds_in_every_shape_differently_has_no_wide_steps(tmp_path: Path) -> None:
    engine = FakeEngine(cells=1 << 15)
    engine.capabilities = replace(engine.capabilities, wide_rows=None)
    with Rig(tmp_path, engine) as rig:
        rig.run(PROMPT)
        assert {made for _, _, made in kinds(rig)} == {NARROW}


def test_what_is_loaded_brings_what_is_known_of_it(tmp_path: Path) -> None:
    """After a restart, and when the index is made anew from the files."""
    prompt = PROMPT[:300]
    with Rig(tmp_path, parallel=1) as rig:
        answer = rig.run(prompt, given=True).answer
        stored = kinds(rig)
    turn = [*prompt, *answer, *text(300, seed=5)]
    with Rig(tmp_path, parallel=1) as rig:
        assert kinds(rig) == stored
        lookup = rig.run(turn).lookup
        assert (lookup.wide_tokens, lookup.reproducible_tokens) == (256, 256)
        assert lookup.reused_tokens > 300
        stored = kinds(rig)
    for database in tmp_path.rglob("index.db*"):
        database.unlink()
    with Rig(tmp_path, parallel=1) as rig:
        assert kinds(rig) == stored


def test_what_was_computed_beside_others_is_not_promised(tmp_path: Path) -> None:
    engine = FakeEngine(cells=1 << 15)
    gate = Gate(engine)
    with Rig(tmp_path, engine) as rig:
        first = rig.start(text(900, seed=1), max_new=1)
        gate.reached()
        second = rig.start(PROMPT)
        gate.open()
        assert first.answer
        assert second.answer
        rig.settle()
        again = rig.run([*PROMPT, *text(80, seed=2)], from_store=True).lookup
    assert again.wide_tokens > 0
    assert again.reproducible_tokens == 0


def test_what_rests_on_other_bytes_than_the_stored_ones_is_not_promised(tmp_path: Path) -> None:
    """Its beginning is stored, computed alone, and it has computed the same for itself, beside another."""
    engine = FakeEngine(cells=1 << 15)
    with Rig(tmp_path, engine) as rig:
        rig.run(PROMPT[:300])
        assert (0, 128, ALONE) in kinds(rig)
        gate = Gate(engine)
        other = rig.start(text(900, seed=1), max_new=1)
        gate.reached()
        second = rig.start(PROMPT, use_cache=False)
        gate.open()
        assert other.answer
        assert second.answer
        rig.settle()
        match = rig.store.match(EXACT, rig.sequence(PROMPT).tokens)
        flags = [bool(segment.chunk.made & Made.REPRODUCIBLE) for segment in match.segments]
        rig.store.release(match)
    assert flags[:2] == [True, True]
    assert not any(flags[2:])


def test_what_a_sequence_takes_over_in_the_engine_keeps_its_kind(alone: Rig) -> None:
    alone.run(PROMPT[:300])
    hot = alone.run([*PROMPT[:300], *text(10, seed=4)]).lookup
    assert hot.hot_tokens >= 299
    assert hot.wide_tokens == hot.reproducible_tokens == 299
