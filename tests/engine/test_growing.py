"""A context begins with few cells, has more when they are needed, and gives them back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.llamacpp import live_context as module
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.errors import EngineError
from helpers.engines import RANGE_KINDS, SNAPSHOT_KINDS, TOKENS, evaluate, exported

OTHER = TOKENS[::-1].copy()


@pytest.fixture(autouse=True)
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_CELLS", 256)


def cells(engine: LlamaEngine) -> object:
    return engine.stats()["cells"]


@pytest.mark.parametrize("kind", RANGE_KINDS)
def test_it_computes_what_one_with_all_cells_computes(open_engine, kind: str) -> None:
    growing, steady = open_engine(kind, rope_switches=False), open_engine(kind)
    assert (cells(growing), cells(steady)) == (256, 1024)
    assert growing.fingerprint == steady.fingerprint
    assert replace(growing.capabilities, resting_cells=None) == steady.capabilities
    for engine in (growing, steady):
        evaluate(engine, 0, 0, 200)
        engine.copy_kv(0, 1, 150)
        evaluate(engine, 1, 150, 350, OTHER)
    assert cells(growing) == 512
    for sequence, end in ((0, 200), (1, 350)):
        assert exported(growing, sequence, 0, end) == exported(steady, sequence, 0, end)
    assert (evaluate(growing, 0, 200, 201) == evaluate(steady, 0, 200, 201)).all()


def test_what_is_imported_makes_room_for_itself(open_engine) -> None:
    source, target = open_engine(), open_engine(rope_switches=False)
    evaluate(source, 0, 0, 700)
    evaluate(target, 1, 0, 100, OTHER)
    payload = exported(source, 0, 0, 700)
    assert target.import_kv(0, 0, 700, [payload], 0) is Outcome.DONE
    assert cells(target) == 1024
    assert exported(target, 0, 0, 700) == payload


def test_a_splice_makes_room_for_itself(open_engine) -> None:
    engine = open_engine(rope_switches=False)
    evaluate(engine, 0, 0, 250)
    assert engine.splice(0, 10, 20, TOKENS[:100]) is Outcome.DONE
    assert cells(engine) == 512


def test_beyond_all_cells_there_is_no_room(open_engine) -> None:
    engine = open_engine(cells=512, rope_switches=False)
    evaluate(engine, 0, 0, 500)
    assert cells(engine) == 512
    before = exported(engine, 0, 0, 500)
    assert engine.evaluate([Rows(1, 0, OTHER[:100], outputs=1)]) is Outcome.NO_ROOM
    assert exported(engine, 0, 0, 500) == before


def test_a_step_may_have_more_rows_than_an_engine_begins_with_cells(open_engine) -> None:
    engine = open_engine(batch=600, rope_switches=False)
    assert engine.evaluate([Rows(0, 0, TOKENS[:600], outputs=1)]) is Outcome.DONE
    evaluate(engine, 0, 600, 1000)
    engine.trim(0, 0)
    engine.rest()
    assert engine.evaluate([Rows(0, 0, TOKENS[:600], outputs=1)]) is Outcome.DONE


def test_where_no_larger_one_can_be_opened_nothing_is_lost(open_engine, monkeypatch) -> None:
    engine = open_engine(rope_switches=False)
    evaluate(engine, 0, 0, 200)
    before = exported(engine, 0, 0, 200)
    open_context = module.open_context

    def fail(model, settings, on_node):
        if settings.cells > 256:
            raise EngineError("out of memory")
        return open_context(model, settings, on_node)

    monkeypatch.setattr(module, "open_context", fail)
    assert engine.evaluate([Rows(1, 0, OTHER[:100], outputs=1)]) is Outcome.NO_ROOM
    assert cells(engine) == 256
    assert exported(engine, 0, 0, 200) == before


def test_where_memory_is_short_it_has_no_more_cells_than_there_is_memory_for(open_engine, monkeypatch) -> None:
    engine = open_engine(rope_switches=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_ram", lambda: 1000)
        evaluate(engine, 0, 0, 200)
        assert engine.evaluate([Rows(1, 0, OTHER[:100], outputs=1)]) is Outcome.NO_ROOM
        assert cells(engine) == 256
    engine.trim(0, 0)
    evaluate(engine, 0, 0, 500)
    of_a_token = engine.capabilities.kv_bytes_per_token
    # It takes a copy of 500 tokens, too.
    monkeypatch.setattr(module, "free_ram", lambda: (500 + 900) * of_a_token)
    assert engine.evaluate([Rows(1, 0, OTHER[:100], outputs=1)]) is Outcome.DONE
    assert cells(engine) == 768


def test_at_rest_it_has_the_cells_that_are_in_use(open_engine) -> None:
    engine = open_engine(rope_switches=False)
    evaluate(engine, 0, 0, 900)
    evaluate(engine, 1, 0, 50, OTHER)
    before = exported(engine, 1, 0, 50)
    engine.rest()
    assert cells(engine) == 1024
    engine.trim(0, 0)
    engine.rest()
    assert cells(engine) == 256
    assert exported(engine, 1, 0, 50) == before
    engine.trim(1, 0)
    assert np.isfinite(evaluate(engine, 0, 0, 900)).all()


@pytest.mark.parametrize("kind", SNAPSHOT_KINDS)
def test_what_has_more_than_ranges_has_all_cells_at_once(open_engine, kind: str) -> None:
    engine = open_engine(kind, rope_switches=False)
    assert cells(engine) == 1024
    engine.rest()
    assert cells(engine) == 1024
