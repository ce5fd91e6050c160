"""What a Hugging Face engine does once it is open and nothing waits, and what the next one knows of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.hf import engine as engines
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.network import Network
from emberkeep.engine.hf.own_steps import Reference
from emberkeep.errors import EngineError
from helpers import tiny_hf
from helpers.engines import evaluate

pytestmark = pytest.mark.slow

Open = Callable[..., HfEngine]


def never() -> bool:
    return False


@pytest.fixture
def opened(hf_model, tmp_path: Path):
    made = []

    def make(family: str = "llama", *, facts: Path | None = tmp_path, batch: int = 64) -> HfEngine:
        made.append(HfEngine(hf_model(family), tiny_hf.settings(512, 1024, batch=batch, facts=facts), "digest"))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_it_gives_way_after_the_step_that_runs_and_goes_on_later(opened: Open, monkeypatch, after: int) -> None:
    engine, steps = opened(), []
    assert engine.step_seconds(1, 0, 1) is None
    take = engine.evaluate
    monkeypatch.setattr(engine, "evaluate", lambda batch: (steps.append(1), take(batch))[1])
    assert not engine.improve(lambda: len(steps) >= after)
    assert len(steps) == after
    assert not engine.stats()["pool"]["used_blocks"]
    evaluate(engine, 0, 0, 40)
    engine.trim(0, 0)
    assert engine.improve(never)
    assert engine.step_seconds(1, 0, 1) > 0
    taken = len(steps)
    assert engine.improve(never)  # nothing is done again
    assert len(steps) == taken
    assert not engine.stats()["pool"]["used_blocks"]


def test_the_next_start_knows_what_was_measured(opened: Open) -> None:
    first = opened()
    first.improve(never)
    second = opened()
    assert second.step_seconds(8, 64, 1) == pytest.approx(first.step_seconds(8, 64, 1), abs=1e-5)
    assert second.footprint.per_step_token == first.footprint.per_step_token
    assert second.footprint.per_pair == first.footprint.per_pair
    assert opened(batch=32).step_seconds(1, 0, 1) is None  # another size of steps is measured for itself


def test_what_a_step_adds_is_estimated_until_it_is_measured(opened: Open, monkeypatch) -> None:
    engine = opened()
    estimate = engine.footprint
    monkeypatch.setattr(engines, "measure_step", lambda *_: {"per_step_token": 1e6, "per_pair": 7.0})
    engine.improve(never)
    assert (engine.footprint.per_step_token, engine.footprint.per_pair) == (1e6, 7.0)
    assert engine.footprint.fixed == estimate.fixed
    assert 0 < estimate.per_step_token < 1e6


def test_a_model_is_compared_with_its_own_code_once(opened: Open, monkeypatch) -> None:
    compared = []
    reference = Network.reference
    monkeypatch.setattr(Network, "reference", lambda *given: (compared.append(1), reference(*given))[1])
    first = opened()
    assert compared
    compared.clear()
    second = opened()
    assert not compared
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(evaluate(second, 0, 0, 100), evaluate(first, 0, 0, 100))


def test_without_a_memory_every_start_compares(opened: Open, monkeypatch) -> None:
    opened(facts=None)
    monkeypatch.setattr(Reference, "check", differ)
    with pytest.raises(EngineError, match="several sequences"):
        opened(facts=None)


def differ(self: Reference, engine: object) -> None:
    raise EngineError("This model computes something else in a batch of several sequences.")


def test_a_memory_that_no_longer_holds_is_noticed_and_forgotten(opened: Open, monkeypatch, caplog) -> None:
    opened()
    engine = opened()
    monkeypatch.setattr(Reference, "check", differ)
    engine.improve(never)
    assert "restart" in caplog.text
    with pytest.raises(EngineError, match="restart"):
        evaluate(engine, 0, 0, 10)
    with pytest.raises(EngineError, match="several sequences"):
        opened()


def test_what_fails_is_left_out(opened: Open, monkeypatch, caplog) -> None:
    def fail(steps: object) -> None:
        raise EngineError("the device is gone")

    monkeypatch.setattr("emberkeep.engine.hf.own_steps.measure_steps", fail)
    engine = opened()
    assert engine.improve(never)
    assert "the device is gone" in caplog.text
    assert engine.step_seconds(1, 0, 1) is None


def test_experts_chosen_meanwhile_are_not_counted(opened: Open) -> None:
    engine = opened("qwen3_moe")
    engine.experts.track(True)
    engine.evaluate([Rows(0, 0, np.arange(40, 60, dtype=np.int32), outputs=1)])
    engine.trim(0, 0)
    before = engine.experts.stats()
    assert before.layers
    engine.improve(never)
    assert engine.experts.stats() == before
