"""Weights that are read part by part are those that transformers reads as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from emberkeep.engine.hf.checkpoint import Checkpoint, place_layers
from emberkeep.engine.hf.residency import Placing
from emberkeep.errors import ModelBroken
from emberkeep.types.models import Residency
from helpers import tiny_hf
from helpers.tiny_hf import quantise

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "gemma2", "gpt2", "gpt_oss", "mamba", "bloom"]
"""Between them: biases, tied weights, weights of other shapes, buffers in the files and beside them."""


def tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}


def placed(folder: Path, placing: Placing, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    checkpoint = Checkpoint(folder)
    network = checkpoint.build(AutoConfig.from_pretrained(folder), dtype, "eager")
    place_layers(network, CPU, placing, checkpoint)
    return network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_that_is_filled_layer_by_layer_is_the_one_that_transformers_loads(tmp_path, family, dtype):
    folder = tiny_hf.write(tmp_path / family, family)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    network = placed(folder, Placing(Residency.FULL), dtype)
    given, wanted = tensors(network), tensors(expected)
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert given[name].dtype == tensor.dtype, name
        assert torch.equal(given[name], tensor), name
    if family == "gemma2":  # what is tied is one tensor
        assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


class WatchedCheckpoint(Checkpoint):
    """Counts, whenever a part was filled, the memory that the layers' weights are in."""

    network: torch.nn.Module

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.counts: list[int] = []

    def fill(self, modules: Iterable[tuple[str, torch.nn.Module]], converting: torch.device) -> None:
        super().fill(modules, converting)
        weights = [layer.mlp.up_proj.weight for layer in self.network.model.layers]
        self.counts.append(len({weight.untyped_storage().data_ptr() for weight in weights if not weight.is_meta}))


def test_only_one_layer_at_a_time_is_in_ram_besides_what_was_taken(tmp_path):
    folder = tiny_hf.write(tmp_path / "llama", layers=6)
    checkpoint = WatchedCheckpoint(folder)
    checkpoint.network = checkpoint.build(AutoConfig.from_pretrained(folder), torch.bfloat16, "eager")
    place_layers(checkpoint.network, CPU, Placing(Residency.STREAM), checkpoint)
    assert checkpoint.counts == [1, 2, 2, 2, 2, 2, 1]  # a slot, and the layer that was filled


def test_a_model_of_which_transformers_puts_weights_together_has_to_fit_into_ram(tmp_path):
    folder = tiny_hf.write(tmp_path / "experts", "mixtral")
    with pytest.raises(ModelBroken, match="experts has to fit into RAM, because its files have other names"):
        tiny_hf.load(folder, placing=Placing(Residency.STREAM, ram=1))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(None, r"odd lacks weights \(model.layers.1.mlp.up_proj.weight\)"), (torch.zeros(3, 3), "has another shape")],
)
def test_a_weight_that_is_missing_or_has_another_shape_is_refused(tmp_path, weight, reason):
    folder, name = tiny_hf.write(tmp_path / "odd"), "model.layers.1.mlp.up_proj.weight"
    held = load_file(folder / "model.safetensors") | {name: weight}
    save_file({k: t for k, t in held.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelBroken, match=reason):
        placed(folder, Placing())


def test_answers_end_where_the_folder_says(tmp_path):
    packed, _ = quantise(tiny_hf.write(tmp_path / "tiny"), tmp_path, group=32)
    (packed / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = tiny_hf.load(packed)
    assert model.vocab.eog == {7, 9, *tiny_hf.ENDINGS}
