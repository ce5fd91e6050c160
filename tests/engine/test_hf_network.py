"""Models of many families in the Hugging Face engine: what they compute there is what their own code computes,
whichever code computes attention and wherever in the pool a sequence lies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Engine, Outcome, Piece, Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier
from helpers import tiny_hf
from helpers.engines import TOKENS, evaluate, exported

pytestmark = pytest.mark.slow

FLASH, PLAIN = AttentionTier.FLASH, AttentionTier.PLAIN
OTHERS = TOKENS[::-1].copy()
LENGTH = 6 * tiny_hf.WINDOW + 5
NOISE = 1e-3
"""Sums depend a little on the shape of a batch. Another token changes logits by several."""
MOVABLE = [family for family in tiny_hf.PAGED if family != "gpt2"]
PARTICULAR = ["llama", "mistral", "deepseek_v3", "gemma2", "gpt_oss"]
"""To attention: a window, values of another width than keys, limited scores, sinks."""

of_movable = pytest.mark.parametrize("family", MOVABLE, indirect=True, scope="module")
of_particular = pytest.mark.parametrize("family", PARTICULAR, indirect=True, scope="module")


@pytest.fixture(params=tiny_hf.PAGED, scope="module")
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine_of_family(hf_model, family):
    engine = HfEngine(hf_model(family), tiny_hf.settings(), "digest")
    yield engine
    engine.close()


@pytest.fixture
def engine(engine_of_family):
    """Empty: what the test before left in it is gone."""
    empty(engine_of_family)
    engine_of_family.attention.switch(FLASH)
    assert used(engine_of_family)["used_blocks"] == 0
    return engine_of_family


def empty(engine: Engine) -> None:
    for sequence in range(4):
        engine.trim(sequence, 0)


@functools.cache
def reference(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every token of `TOKENS` and of `OTHERS`, computed as the model's authors wrote it."""
    network = tiny_hf.build(family)
    with torch.no_grad():
        batch = torch.from_numpy(np.stack([TOKENS[:LENGTH], OTHERS[:LENGTH]]).astype(np.int64))
        one, other = network(input_ids=batch, use_cache=False).logits.numpy()
    return one, other


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() < NOISE * max(1.0, float(np.abs(b).max())))


def used(engine: Engine) -> dict[str, int]:
    return engine.stats()["pool"]


def rows_of_layer(engine: Engine, sequence: int, start: int, end: int, layer: int = 0) -> list[np.ndarray]:
    """What is stored of a layer: its keys and its values."""
    cells = torch.from_numpy(engine._tables[sequence].cells(start, end))
    return [stream[layer][cells].numpy() for stream in (engine._memory.keys, engine._memory.values)]


def test_slices_beside_other_sequences_give_what_the_model_itself_gives(engine, family):
    borders = [(0, 1), (1, 20), (20, 21), (21, LENGTH)]
    others = [(0, 30), (30, 31), (31, 51), (51, LENGTH)]
    one, other = reference(family)
    for (start, end), (other_start, other_end) in zip(borders, others, strict=True):
        batch = [
            Rows(0, start, TOKENS[start:end], True),
            Rows(2, start, TOKENS[start:end], False),
            Rows(1, other_start, OTHERS[other_start:other_end], True),
        ]
        assert engine.evaluate(batch) is Outcome.DONE
        assert close(engine.logits(0), one[end - 1])
        assert close(engine.logits(2), other[other_end - 1])


def test_state_that_went_out_and_in_is_the_same_to_the_bit(engine):
    evaluate(engine, 0, 0, LENGTH)
    borders = (0, 32, 33, LENGTH)
    payloads = engine.export_kv(0, borders).payloads()
    for start, end, payload in zip(borders, borders[1:], payloads, strict=False):
        assert engine.import_kv(1, start, end, [payload], start) is Outcome.DONE
    assert engine.export_kv(1, borders).payloads() == payloads
    assert np.array_equal(evaluate(engine, 1, LENGTH, LENGTH + 4), evaluate(engine, 0, LENGTH, LENGTH + 4))


def test_a_copy_shares_blocks_until_one_of_them_writes(engine, family):
    evaluate(engine, 0, 0, 40)
    before = used(engine)
    engine.copy_kv(0, 1, 36)
    assert used(engine)["used_blocks"] == before["used_blocks"]
    assert used(engine)["shared_blocks"] == 2
    one, other = reference(family)
    assert close(evaluate(engine, 0, 40, LENGTH), one[LENGTH - 1])
    assert used(engine)["copied_blocks"] == before["copied_blocks"] + 1
    engine.trim(1, 0)
    engine.copy_kv(0, 1, LENGTH)
    engine.trim(1, 0)
    assert used(engine)["shared_blocks"] == 0
    assert close(evaluate(engine, 1, 0, LENGTH, OTHERS), other[LENGTH - 1])


def test_what_was_trimmed_is_forgotten(engine, family):
    evaluate(engine, 0, 0, 20)
    evaluate(engine, 0, 20, 50, OTHERS)
    engine.trim(0, 20)
    assert close(evaluate(engine, 0, 20, LENGTH), reference(family)[0][LENGTH - 1])


@of_movable
def test_what_moves_up_is_as_if_it_had_been_computed_there(engine):
    """In the first layer, whose keys depend on nothing but the token and where it stands."""
    evaluate(engine, 0, 0, LENGTH)
    assert engine.splice(0, 5, 30, OTHERS[:3]) is Outcome.DONE
    shorter = np.concatenate([TOKENS[:5], OTHERS[:3], TOKENS[30:]])
    evaluate(engine, 1, 0, LENGTH - 22, shorter)
    for moved, fresh in zip(*(rows_of_layer(engine, s, 0, LENGTH - 22) for s in (0, 1)), strict=True):
        assert close(moved, fresh)
    assert np.isfinite(evaluate(engine, 0, LENGTH - 22, LENGTH, shorter)).all()


@of_movable
def test_a_piece_of_which_all_is_evaluated_again_is_as_fresh(engine, family):
    evaluate(engine, 3, 0, LENGTH, OTHERS)
    piece = Piece(10, 40, exported(engine, 3, 4, 50), 4, 12)
    assert engine.evaluate([Rows(0, 0, TOKENS[:3], False)]) is Outcome.DONE
    blended = engine.blend(Rows(0, 3, TOKENS[3:LENGTH], True), [piece], 1.0)
    assert (blended.outcome, blended.repaired) == (Outcome.DONE, 30)
    assert close(engine.logits(0), reference(family)[0][LENGTH - 1])
    assert close(evaluate(engine, 0, LENGTH, LENGTH + 5), evaluate(engine, 1, 0, LENGTH + 5))


@of_movable
def test_a_piece_that_is_only_moved_has_its_keys_where_it_stands(engine):
    evaluate(engine, 3, 0, LENGTH)
    tokens = np.concatenate([OTHERS[:10], TOKENS[20:40], OTHERS[30:40]])
    piece = Piece(10, 30, exported(engine, 3, 15, 50), 15, 20)
    blended = engine.blend(Rows(0, 0, tokens, True), [piece], 0.0)
    assert (blended.repaired, blended.token_layers) == (0, 20 * engine.capabilities.layers)
    evaluate(engine, 1, 0, 40, tokens)
    for moved, fresh in zip(*(rows_of_layer(engine, s, 0, 40) for s in (0, 1)), strict=True):
        assert close(moved, fresh)


def test_state_whose_keys_do_not_turn_is_not_moved(open_hf):
    engine = open_hf("gpt2")
    evaluate(engine, 0, 0, 40)
    assert not engine.capabilities.can_shift
    assert not engine.capabilities.can_blend
    with pytest.raises(EngineError):
        engine.splice(0, 5, 10, TOKENS[:1])
    with pytest.raises(EngineError):
        engine.blend(Rows(1, 0, TOKENS[:30], True), [Piece(5, 15, exported(engine, 0, 0, 40), 0, 10)], 0.0)
    assert close(evaluate(engine, 0, 40, LENGTH), reference("gpt2")[0][LENGTH - 1])


# ── the ways to compute attention ──


@of_particular
def test_tiers_agree_on_prompts_slices_and_decodes_beside_each_other(engine):
    results = []
    for tier in (FLASH, PLAIN):
        empty(engine)
        engine.attention.switch(tier)
        found = [evaluate(engine, 0, 0, 1), evaluate(engine, 0, 1, 10), evaluate(engine, 1, 0, 100, OTHERS)]
        batch = [
            Rows(0, 10, TOKENS[10:11], True),
            Rows(1, 100, OTHERS[100:165], True),
            Rows(2, 0, OTHERS[:12], True),
        ]
        assert engine.evaluate(batch) is Outcome.DONE
        results.append(np.stack([*found, *(engine.logits(index) for index in range(3))]))
    assert close(*results)


@of_particular
@pytest.mark.parametrize("known", [[(10, 40)], [(0, 59)], [(1, 20), (25, 58)]])
def test_state_that_was_computed_here_is_as_good_as_evaluating_it(engine, known):
    """Each token sees what it would see in a prompt, however few of them are evaluated."""
    expected = evaluate(engine, 3, 0, 60)
    pieces = [Piece(start, end, exported(engine, 3, start, end), start, start) for start, end in known]
    for tier in (FLASH, PLAIN):
        engine.attention.switch(tier)
        engine.trim(0, 0)
        assert engine.blend(Rows(0, 0, TOKENS[:60], True), pieces, 0.0).outcome is Outcome.DONE
        assert close(engine.logits(0), expected)


@contextmanager
def scattered(engine: Engine) -> Iterator[None]:
    """No two free blocks lie together: every second one is in use."""
    guests = range(100, 100 + used(engine)["blocks"])
    assert engine.evaluate([Rows(guest, 0, TOKENS[:1], False) for guest in guests]) is Outcome.DONE
    for guest in guests:
        if engine._tables[guest].blocks[0] % 2:
            engine.trim(guest, 0)
    yield
    for guest in guests:
        engine.trim(guest, 0)


@of_particular
@pytest.mark.parametrize("tier", [FLASH, PLAIN])
def test_scattered_blocks_give_what_neighbouring_ones_give(engine, tier):
    engine.attention.switch(tier)
    expected = evaluate(engine, 0, 0, 70), evaluate(engine, 0, 70, 71)
    empty(engine)
    with scattered(engine):
        actual = evaluate(engine, 0, 0, 70), evaluate(engine, 0, 70, 71)
        assert engine._tables[0].run(0, 71) is None
    assert all(close(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_fastest_tier_is_used_until_another_is_asked_for_that_is_here(hf_model):
    engine = HfEngine(hf_model("llama"), tiny_hf.settings(), "digest")
    assert engine.attention.available == (FLASH, PLAIN)
    assert engine.attention.tier is FLASH
    with pytest.raises(EngineError, match=r"own.*flash, plain"):
        engine.attention.switch(AttentionTier.OWN)
    assert engine.attention.tier is FLASH
    engine.attention.switch(PLAIN)
    assert engine.attention.tier is PLAIN


def test_switching_in_the_middle_of_an_answer_changes_nothing(open_hf):
    engine = open_hf("mistral")
    evaluate(engine, 0, 0, 50)
    engine.attention.switch(PLAIN)
    evaluate(engine, 0, 50, 70)
    engine.attention.switch(FLASH)
    with_both = evaluate(engine, 0, 70, 71)
    assert close(with_both, evaluate(engine, 1, 0, 71))
