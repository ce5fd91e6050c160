"""Steps that are filled up with rows that mean nothing: what is computed is that of a larger step, and no more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import EngineError
from helpers.engines import RANGE_KINDS, SNAPSHOT_KINDS, TOKENS, evaluate, exported

FULL = 64
"""From so many rows on, flash attention takes them together."""
CLIFF = StepTable((1, 63, FULL, 128), (64,), ((10, 630, 40, 80),))
OTHER = TOKENS[::-1].copy()
Open = Callable[..., LlamaEngine]


@pytest.fixture(params=[True, False], ids=["flash", "no flash"])
def flash(request) -> bool:
    return request.param


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows llama.cpp was given in each step."""
    seen: list[int] = []
    decode = LlamaEngine._decode

    def note(engine: LlamaEngine, batch: list[Rows]) -> bool:
        seen.append(sum(len(rows.tokens) for rows in batch))
        return decode(engine, batch)

    monkeypatch.setattr(LlamaEngine, "_decode", note)
    return seen


def left_over(engine: LlamaEngine) -> int:
    """Cells that no sequence of the scheduler's has."""
    free = engine.capabilities.cells - engine._context.cells.used
    rows = Rows(7, 0, np.resize(TOKENS, free), outputs=0)
    outcome = engine._decode([rows])
    engine.trim(7, 0)
    return 0 if outcome else free


@pytest.mark.parametrize("kind", RANGE_KINDS)
def test_the_state_is_that_of_a_step_of_so_many_rows(open_engine: Open, steps: list[int], kind: str) -> None:
    """Before, inside and behind it, in one sequence and in several."""
    filled, plain = open_engine(kind, table=CLIFF), open_engine(kind)
    evaluate(filled, 0, 0, 100)
    evaluate(plain, 0, 0, 100)
    del steps[:]
    filled.evaluate([Rows(0, 100, TOKENS[100:145], outputs=0)])
    plain.evaluate([Rows(0, 100, TOKENS[100 : 100 + FULL], outputs=0)])
    assert steps == [FULL, FULL]
    plain.trim(0, 145)
    assert exported(filled, 0, 0, 145) == exported(plain, 0, 0, 145)
    two = [Rows(0, 145, TOKENS[145:165], outputs=1), Rows(1, 0, OTHER[:20], outputs=1)]
    filled.evaluate(two)
    plain.evaluate([*two, Rows(2, 0, OTHER[: FULL - 40], outputs=0)])
    for sequence, end in ((0, 165), (1, 20)):
        assert exported(filled, sequence, 0, end) == exported(plain, sequence, 0, end)
        assert np.array_equal(filled.logits(sequence), plain.logits(sequence))


def test_a_prompt_in_filled_steps_has_the_bytes_of_one_in_large_ones(open_engine: Open) -> None:
    """The next rows lie in the cells that the filler had."""
    filled, plain = open_engine(table=CLIFF), open_engine()
    for start in range(0, 200, 40):
        filled.evaluate([Rows(0, start, TOKENS[start : start + 40], outputs=0)])
    plain.evaluate([Rows(0, 0, TOKENS[:200], outputs=0)])
    assert exported(filled, 0, 0, 200) == exported(plain, 0, 0, 200)


def test_nothing_is_left_of_the_filler(open_engine: Open, steps: list[int]) -> None:
    engine = open_engine(cells=512, table=CLIFF, batch=512)
    evaluate(engine, 0, 0, 40)
    assert steps[-1] == FULL
    assert left_over(engine) == 0


def test_without_room_for_the_filler_the_step_is_taken_without(open_engine: Open, steps: list[int]) -> None:
    engine = open_engine(cells=256, table=CLIFF)
    evaluate(engine, 0, 0, 200)
    del steps[:]
    assert engine.evaluate([Rows(0, 200, TOKENS[200:240], outputs=1)]) is Outcome.DONE
    assert steps == [FULL, 40]
    assert np.isfinite(engine.logits(0)).all()
    assert engine.evaluate([Rows(1, 0, TOKENS[:40], outputs=1)]) is Outcome.NO_ROOM
    assert left_over(engine) == 0


def test_after_a_step_that_fails_nothing_is_left_of_the_filler(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(cells=512, table=CLIFF, batch=512)
    evaluate(engine, 0, 0, 10)
    decode = LlamaEngine._decode

    def fail(self: LlamaEngine, batch: list[Rows]) -> bool:
        decode(self, batch)
        raise EngineError("the last kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaEngine, "_decode", fail)
        with pytest.raises(EngineError, match="kernel"):
            engine.evaluate([Rows(0, 10, TOKENS[10:50], outputs=0)])
    engine.trim(0, 10)
    assert left_over(engine) == 0


@pytest.mark.parametrize(("rows", "batch"), [(1, 256), (4, 256), (64, 256), (80, 256), (40, 63)])
def test_a_step_stays_as_it_is_where_more_rows_are_not_quicker_or_too_many(
    open_engine: Open, steps: list[int], rows: int, batch: int
) -> None:
    engine = open_engine(batch=batch, table=CLIFF)
    del steps[:]
    evaluate(engine, 0, 0, rows)
    assert steps[0] == rows


@pytest.mark.parametrize("kind", SNAPSHOT_KINDS)
def test_steps_of_models_with_snapshots_are_not_filled_up(open_engine: Open, steps: list[int], kind: str) -> None:
    engine = open_engine(kind, table=CLIFF)
    del steps[:]
    evaluate(engine, 0, 0, 40)
    assert steps == [40]


def test_experts_of_fillers_are_not_counted(open_engine: Open, steps: list[int]) -> None:
    engine = open_engine("moe", table=CLIFF)
    assert engine.experts is not None
    evaluate(engine, 0, 0, 40)
    assert steps[-1] == FULL
    engine.experts.track(True)
    evaluate(engine, 0, 0, 40)
    assert steps[-1] == 40
    assert {layer.tokens for layer in engine.experts.stats().layers} <= {1, 40}


def test_a_splice_moves_what_it_set_aside(open_engine: Open) -> None:
    """What is inserted is evaluated while the scratch sequence holds what follows."""
    filled, plain = open_engine(table=CLIFF), open_engine()
    for engine in (filled, plain):
        evaluate(engine, 0, 0, 200)
        assert engine.splice(0, 20, 120, OTHER[:10]) is Outcome.DONE
    assert exported(filled, 0, 0, 110) == exported(plain, 0, 0, 110)
