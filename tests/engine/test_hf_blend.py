"""State from other places: how keys rotate, what is evaluated again, what it costs, what is refused."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Engine, Outcome, Payload, Piece, Rows
from emberkeep.engine.hf.blend import Rotation, learn_rotations
from emberkeep.engine.hf.network import Network, probe
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


def test_pieces_that_cannot_be_what_they_say_are_refused_and_change_nothing(engine):
    whole, good = exported(engine, 3, 0, END), Piece(6, 20, exported(engine, 3, 0, END), 0, 3)
    evaluate(engine, 0, 0, 5)
    wrong = [[Piece(10, 20, whole, 1, 10)], [Piece(10, 20, whole, 0, 55)]]  # which the payload does not hold
    wrong += [[good, Piece(25, 50, each, 20, 25)] for each in broken_payloads(exported(engine, 3, 20, END))]
    for pieces in wrong:
        with pytest.raises(EngineError):
            engine.blend(Rows(0, 5, TOKENS[5:END], True), pieces, 0.1)
    with pytest.raises(EngineError):  # the sequence ends elsewhere
        engine.blend(Rows(0, 6, TOKENS[6:END], True), [good], 0.0)
    assert close(evaluate(engine, 0, 5, 20), evaluate(engine, 1, 0, 20))


def test_without_room_nothing_happens(open_hf):
    engine = open_hf(cells=128, sequences=1)
    evaluate(engine, 0, 0, 100)
    piece = Piece(5, 55, exported(engine, 0, 0, END), 0, 5)
    blended = engine.blend(Rows(1, 0, TOKENS[:END], True), [piece], 0.1)
    assert (blended.outcome, blended.repaired, blended.token_layers) == (Outcome.NO_ROOM, 0, 0)
    engine.trim(0, 0)
    assert engine.blend(Rows(1, 0, TOKENS[:END], True), [piece], 0.1).outcome is Outcome.DONE


# ── how keys rotate ──

WAYS = {
    "llama": {(8, False, False)},
    "phi": {(4, False, False)},  # half of the channels
    "glm4": {(4, True, False)},  # half of them, in pairs of neighbours
    "deepseek_v3": {(4, False, True)},  # the last ones
    "smollm3": {(8, False, False), (0, False, False)},  # one layer in the middle does not rotate
    "gemma3_text": {(8, False, False)},
}
"""Pairs of channels that rotate, whether they are neighbours, and whether they come last; in any layer."""


def way(rotation: Rotation) -> tuple[int, bool, bool]:
    return (0 if rotation.frequencies is None else len(rotation.frequencies), rotation.interleaved, rotation.last)


def keys_at(network: Network, position: int) -> dict[int, torch.Tensor]:
    return probe(network, torch.tensor([77]), torch.tensor([position])).keys


@pytest.mark.parametrize("family", WAYS)
@torch.no_grad()
def test_a_key_that_is_turned_is_the_key_that_the_model_computes_there(hf_model, family):
    """In every layer: a token that stands alone sees nothing but itself, wherever it is."""
    network = Network(hf_model(family).network)
    rotations = learn_rotations(network)
    assert rotations is not None
    assert {way(rotation) for rotation in rotations} == WAYS[family]
    if family == "gemma3_text":
        assert not torch.equal(rotations[0].frequencies, rotations[1].frequencies)  # near and far layers
    for start, end in ((0, 1), (3, 200), (500, 9), (1, 1000)):
        before, after = keys_at(network, start), keys_at(network, end)
        for layer, rotation in enumerate(rotations):
            turned = rotation(before[layer], torch.tensor([end - start]))
            assert torch.allclose(turned, after[layer], atol=2e-4)


@torch.no_grad()
def test_positions_that_are_learned_cannot_be_turned(hf_model):
    assert learn_rotations(Network(hf_model("gpt2").network)) is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_turns_add_up_and_can_be_undone(interleaved, last):
    rotation = Rotation(torch.tensor([1.0, 0.3, 0.01]), interleaved, last)
    keys = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(1))
    by = torch.tensor([0, 1, 7, -3, 400])
    assert torch.allclose(rotation(rotation(keys, by), 2 * by), rotation(keys, 3 * by), atol=1e-4)
    assert torch.allclose(rotation(rotation(keys, by), -by), keys, atol=1e-5)
    assert torch.equal(rotation(keys, by)[0], keys[0])
    untouched = slice(0, 4) if last else slice(6, 10)
    assert torch.equal(rotation(keys, by)[..., untouched], keys[..., untouched])
