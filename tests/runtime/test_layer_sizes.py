from __future__ import annotations

import pytest

from emberkeep.runtime.placement import layer_sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_sizes_are_told_by_headers_as_they_are_in_memory(tmp_path, family):
    from helpers import tiny_hf

    folder, network = tiny_hf.write(tmp_path / family, family, layers=3), tiny_hf.build(family, layers=3)
    sizes = layer_sizes(folder, "float32")
    assert sizes.all == sum(weight.nbytes for weight in network.parameters())
    assert sizes.layers[1].feed_forward == sum(w.nbytes for w in network.model.layers[1].mlp.parameters())
    assert 2 * layer_sizes(folder, "bfloat16").all == sizes.all


@pytest.mark.slow
def test_four_bits_are_told_by_headers_as_they_are_in_memory(tmp_path):
    from emberkeep.engine.hf.model_loader import HfSource, load_model
    from helpers import tiny_hf
    from helpers.tiny_hf import quantise

    packed, _ = quantise(tiny_hf.write(tmp_path / "tiny"), tmp_path, group=32)
    model = load_model(HfSource(packed), device="cpu", dtype="float32", attention="eager")
    assert layer_sizes(packed, "float32").all == model.weights_bytes
