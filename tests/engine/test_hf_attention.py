"""The ways to compute attention give the same, wherever in the pool a sequence lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome, Piece, Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfSettings
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier
from helpers.engines import TOKENS, evaluate, exported

pytestmark = pytest.mark.slow

FLASH, PLAIN = AttentionTier.FLASH, AttentionTier.PLAIN
OTHERS = TOKENS[::-1].copy()
FAMILIES = [
    "llama",
    "mistral",  # a window
    "deepseek_v3",  # values of another width than keys
    pytest.param("gemma2", marks=pytest.mark.slow),  # only the plain tier can limit scores
    pytest.param("gpt_oss", marks=pytest.mark.slow),  # or has sinks
]


@pytest.fixture(params=FAMILIES, scope="module")
def engine_of_family(request, hf_model):
    settings = HfSettings(context=256, cells=512, sequences=4, batch=256, threads=1)
    engine = HfEngine(hf_model(request.param), settings, "digest")
    yield engine
    engine.close()


@pytest.fixture
def engine(engine_of_family):
    empty(engine_of_family)
    return engine_of_family


def empty(engine: Engine) -> None:
    for sequence in range(4):
        engine.trim(sequence, 0)


def in_both(engine: HfEngine, compute) -> bool:
    """Whether both tiers give the same; each begins with an empty engine."""
    results = []
    for tier in (FLASH, PLAIN):
        empty(engine)
        engine.attention.switch(tier)
        results.append(compute())
    return close(*results)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() < 1e-3 * max(1.0, float(np.abs(b).max())))


@contextmanager
def scattered(engine: Engine) -> Iterator[None]:
    """No two free blocks lie together: every second one is in use."""
    guests = range(100, 100 + engine.stats()["pool"]["blocks"])
    assert engine.evaluate([Rows(guest, 0, TOKENS[:1], False) for guest in guests]) is Outcome.DONE
    for guest in guests:
        if engine._tables[guest].blocks[0] % 2:
            engine.trim(guest, 0)
    yield
    for guest in guests:
        engine.trim(guest, 0)


@pytest.mark.parametrize("length", [1, 9, 100])
def test_tiers_agree_on_prompts(engine, length):
    assert in_both(engine, lambda: evaluate(engine, 0, 0, length))


def test_tiers_agree_on_prompts_in_slices_and_decodes_beside_each_other(engine):
    def compute() -> np.ndarray:
        evaluate(engine, 0, 0, 37)
        evaluate(engine, 1, 0, 5, OTHERS)
        batch = [
            Rows(0, 37, TOKENS[37:38], True),
            Rows(1, 5, OTHERS[5:70], True),
            Rows(2, 0, OTHERS[:12], True),
        ]
        assert engine.evaluate(batch) is Outcome.DONE
        return np.stack([engine.logits(index) for index in range(3)])

    assert in_both(engine, compute)


@pytest.mark.parametrize("known", [[(10, 40)], [(0, 59)], [(1, 20), (25, 58)]])
def test_tiers_agree_on_tokens_that_do_not_follow_each_other(engine, known):
    def compute() -> np.ndarray:
        evaluate(engine, 3, 0, 60)
        pieces = [Piece(start, end, exported(engine, 3, start, end), start, start) for start, end in known]
        assert engine.blend(Rows(0, 0, TOKENS[:60], True), pieces, 0.0).outcome is Outcome.DONE
        return engine.logits(0).copy()

    assert in_both(engine, compute)


@pytest.mark.parametrize("known", [[(10, 40)], [(0, 59)], [(1, 20), (25, 58)]])
def test_state_that_was_computed_here_is_as_good_as_evaluating_it(engine, known):
    """Each token sees what it would see in a prompt, however few of them are evaluated."""
    expected = evaluate(engine, 3, 0, 60)
    pieces = [Piece(start, end, exported(engine, 3, start, end), start, start) for start, end in known]
    for tier in (FLASH, PLAIN):
        engine.attention.switch(tier)
        engine.trim(0, 0)
        engine.blend(Rows(0, 0, TOKENS[:60], True), pieces, 0.0)
        assert close(engine.logits(0), expected)


@pytest.mark.parametrize("tier", [FLASH, PLAIN])
def test_scattered_blocks_give_what_neighbouring_ones_give(engine, tier):
    engine.attention.switch(tier)
    expected = evaluate(engine, 0, 0, 70), evaluate(engine, 0, 70, 71)
    empty(engine)
    with scattered(engine):
        actual = evaluate(engine, 0, 0, 70), evaluate(engine, 0, 70, 71)
        assert engine._tables[0].run(0, 71) is None
    assert all(close(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_fastest_tier_is_used_until_another_is_asked_for(hf_model):
    settings = HfSettings(context=64, cells=64, sequences=2, batch=64, threads=1)
    engine = HfEngine(hf_model("llama"), settings, "digest")
    assert engine.attention.available == (FLASH, PLAIN)
    assert engine.attention.tier is FLASH
    engine.attention.switch(PLAIN)
    assert engine.attention.tier is PLAIN


def test_a_tier_that_is_not_here_is_refused_with_those_that_are(open_hf):
    engine = open_hf()
    with pytest.raises(EngineError, match=r"own.*flash, plain"):
        engine.attention.switch(AttentionTier.OWN)
    assert engine.attention.tier is FLASH


def test_switching_in_the_middle_of_an_answer_changes_nothing(open_hf):
    engine = open_hf("mistral")
    evaluate(engine, 0, 0, 50)
    engine.attention.switch(PLAIN)
    evaluate(engine, 0, 50, 70)
    engine.attention.switch(FLASH)
    with_both = evaluate(engine, 0, 70, 71)
    assert close(with_both, evaluate(engine, 1, 0, 71))
