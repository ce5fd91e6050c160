"""State from other places: what is evaluated again, what it costs, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome, Payload, Piece, Rows
from emberkeep.errors import EngineError
from helpers.engines import TOKENS, broken_payloads, close, evaluate, exported

pytestmark = pytest.mark.slow

OTHERS = TOKENS[::-1].copy()
END = 60


@pytest.fixture
def engine(open_hf):
    """Sequence 3 holds the tokens that pieces are taken of."""
    engine = open_hf(sequences=4)
    evaluate(engine, 3, 0, END)
    return engine


def with_noise(engine: Engine, payload: Payload, tokens: Iterable[int]) -> Payload:
    """As if the state of these tokens had been computed after quite another text."""
    count = len(payload) - 16
    rows = np.frombuffer(bytes(payload)[16:], np.float32).copy()
    rows = rows.reshape(2 * engine.capabilities.layers, END, -1)
    rows[:, list(tokens)] += np.random.default_rng(5).standard_normal(rows.shape[2], dtype=np.float32)
    assert rows.nbytes == count
    return memoryview(bytes(payload)[:16] + rows.tobytes())


def test_the_tokens_that_differ_most_are_evaluated_again(engine):
    """Three tokens came with a wrong state; once they are repaired, all is as if it were fresh."""
    wrong = [11, 25, 26]
    piece = Piece(5, 55, with_noise(engine, exported(engine, 3, 0, END), wrong), 0, 5)
    expected = evaluate(engine, 1, 0, END)
    blended = engine.blend(Rows(0, 0, TOKENS[:END], True), [piece], 3 / 50)
    assert (blended.outcome, blended.repaired) == (Outcome.DONE, 3)
    assert close(engine.logits(0), expected)
    engine.trim(0, 0)
    assert engine.blend(Rows(0, 0, TOKENS[:END], True), [piece], 2 / 50).repaired == 2
    assert not close(engine.logits(0), expected)


@pytest.mark.parametrize(("ratio", "repaired"), [(0.0, 0), (0.01, 1), (0.15, 8), (1.0, 50)])
def test_the_cost_is_counted_in_tokens_times_layers(engine, ratio, repaired):
    piece = Piece(5, 55, exported(engine, 3, 0, END), 0, 5)
    blended = engine.blend(Rows(0, 0, TOKENS[:END], True), [piece], ratio)
    outside = END - 50
    first, rest = 2, engine.capabilities.layers - 2
    through = (END if repaired else outside) * first + (outside + repaired) * rest
    assert (blended.repaired, blended.token_layers) == (repaired, through)


def test_several_pieces_come_from_several_places(engine):
    evaluate(engine, 2, 0, END, OTHERS)
    tokens = np.concatenate([TOKENS[40:50], OTHERS[10:30], TOKENS[2:22], OTHERS[:4]])
    pieces = [
        Piece(0, 10, exported(engine, 3, 35, 52), 35, 40),
        Piece(10, 30, exported(engine, 2, 10, 30), 10, 10),
        Piece(30, 50, exported(engine, 3, 0, 50), 0, 2),
    ]
    blended = engine.blend(Rows(0, 0, tokens, True), pieces, 0.5)
    assert blended.repaired == 25
    after = engine.logits(0).copy()
    expected = evaluate(engine, 1, 0, 54, tokens)
    other = evaluate(engine, 1, 54, 55, tokens[-1:].repeat(55))
    assert np.corrcoef(after, expected)[0, 1] > np.corrcoef(after, other)[0, 1] + 0.1


def test_a_blended_sequence_goes_on_like_any_other(engine):
    piece = Piece(0, 50, exported(engine, 3, 0, END), 0, 0)
    assert engine.blend(Rows(0, 0, TOKENS[:50], False), [piece], 0.0).token_layers == 0
    assert np.array_equal(evaluate(engine, 0, 50, 60), evaluate_after_import(engine))


def evaluate_after_import(engine: Engine) -> np.ndarray:
    engine.import_kv(1, 0, 50, [exported(engine, 3, 0, 50)], 0)
    return evaluate(engine, 1, 50, 60)


@pytest.mark.parametrize(("payload_start", "source", "start", "end"), [(1, 10, 10, 20), (0, 55, 10, 20)])
def test_a_piece_that_its_payload_does_not_hold_is_refused_and_changes_nothing(
    engine, payload_start, source, start, end
):
    evaluate(engine, 0, 0, 5)
    piece = Piece(start, end, exported(engine, 3, 0, END), payload_start, source)
    with pytest.raises(EngineError):
        engine.blend(Rows(0, 5, TOKENS[5:END], True), [piece], 0.1)
    assert close(evaluate(engine, 0, 5, 20), evaluate(engine, 1, 0, 20))


def test_broken_payloads_are_refused_and_change_nothing(engine):
    evaluate(engine, 0, 0, 5)
    good = Piece(6, 20, exported(engine, 3, 0, END), 0, 3)
    for payload in broken_payloads(exported(engine, 3, 20, END)):
        with pytest.raises(EngineError):
            engine.blend(Rows(0, 5, TOKENS[5:END], True), [good, Piece(25, 50, payload, 20, 25)], 0.1)
    assert close(evaluate(engine, 0, 5, 20), evaluate(engine, 1, 0, 20))


def test_a_sequence_that_ends_elsewhere_is_not_extended(engine):
    with pytest.raises(EngineError):
        engine.blend(Rows(0, 5, TOKENS[5:END], True), [Piece(10, 20, exported(engine, 3, 0, END), 0, 10)], 0.0)


def test_without_room_nothing_happens(open_hf):
    engine = open_hf(cells=128, sequences=1)
    evaluate(engine, 0, 0, 100)
    piece = Piece(5, 55, exported(engine, 0, 0, END), 0, 5)
    blended = engine.blend(Rows(1, 0, TOKENS[:END], True), [piece], 0.1)
    assert (blended.outcome, blended.repaired, blended.token_layers) == (Outcome.NO_ROOM, 0, 0)
    engine.trim(0, 0)
    assert engine.blend(Rows(1, 0, TOKENS[:END], True), [piece], 0.1).outcome is Outcome.DONE
