"""How keys rotate with their position is found out, for whatever way a model has."""

from __future__ import annotations

import pytest
import torch

from emberkeep.engine.hf.blend import Rotation, learn_rotations
from emberkeep.engine.hf.network import Network, probe

pytestmark = pytest.mark.slow

WAYS = {
    "llama": {(8, False, False)},
    "phi": {(4, False, False)},  # half of the channels
    "glm4": {(4, True, False)},  # half of them, in pairs of neighbours
    "deepseek_v3": {(4, False, True)},  # the last ones
    "smollm3": {(8, False, False), (0, False, False)},  # one layer in the middle does not rotate
    "gemma3_text": {(8, False, False)},
}
"""Pairs of channels that rotate, whether they are neighbours, and whether they come last; in any layer."""


def network_of(hf_model, family: str) -> Network:
    return Network(hf_model(family).network)


def way(rotation: Rotation) -> tuple[int, bool, bool]:
    return (0 if rotation.frequencies is None else len(rotation.frequencies), rotation.interleaved, rotation.last)


def keys_at(network: Network, position: int) -> dict[int, torch.Tensor]:
    return probe(network, torch.tensor([77]), torch.tensor([position])).keys


@pytest.mark.parametrize("family", WAYS)
@torch.no_grad()
def test_a_key_that_is_turned_is_the_key_that_the_model_computes_there(hf_model, family):
    """In every layer: a token that stands alone sees nothing but itself, wherever it is."""
    network = network_of(hf_model, family)
    rotations = learn_rotations(network)
    assert rotations is not None
    assert {way(rotation) for rotation in rotations} == WAYS[family]
    for start, end in ((0, 1), (3, 200), (500, 9), (1, 1000)):
        before, after = keys_at(network, start), keys_at(network, end)
        for layer, rotation in enumerate(rotations):
            turned = rotation(before[layer], torch.tensor([end - start]))
            assert torch.allclose(turned, after[layer], atol=2e-4)


@torch.no_grad()
def test_layers_that_turn_at_another_pace_are_told_apart(hf_model):
    near, far, _ = learn_rotations(network_of(hf_model, "gemma3_text"))
    assert not torch.equal(near.frequencies, far.frequencies)


@torch.no_grad()
def test_positions_that_are_learned_cannot_be_turned(hf_model):
    assert learn_rotations(network_of(hf_model, "gpt2")) is None


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
