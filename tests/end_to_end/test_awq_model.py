"""A real model in AWQ's four bits gives the tokens of the same weights in full, whether they stay or pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.library.emberkeep import Emberkeep
from helpers.tiny_hf import quantise

pytestmark = pytest.mark.slow

GROUP = 64
PROMPT = "The five largest oceans of the world are"


@pytest.fixture(scope="module")
def folders(smollm2: Path, tmp_path_factory) -> tuple[Path, Path]:
    """In four bits, and the same numbers in 32."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("real")
    whole = folder / "smollm2"
    given = {"gguf_file": smollm2.name, "local_files_only": True}
    PreTrainedTokenizerFast.from_pretrained(smollm2.parent, **given).save_pretrained(whole)
    network = AutoModelForCausalLM.from_pretrained(smollm2.parent, **given)
    tensors = {
        name: tensor.contiguous() for name, tensor in network.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    config = network.config.to_dict()
    config.pop("quantization_config", None)
    (whole / "config.json").write_text(json.dumps(config, default=str))
    return quantise(whole, folder, group=GROUP)


def answer(folder: Path, data: Path, **settings: str) -> str:
    fixed = {"device": "cpu", "dtype": "float32", "ctx": 512, "parallel": 1, "disk_budget": 0}
    with Emberkeep.open(Config(model=str(folder), data_dir=data, **fixed, **settings)) as opened:
        return opened.generate(PROMPT, temperature=0, max_tokens=12).text


def test_a_real_model_in_four_bits_answers_as_the_same_weights_in_full(folders, tmp_path):
    packed, whole = folders
    expected = answer(whole, tmp_path / "a")
    assert len(expected) > 20
    assert answer(packed, tmp_path / "b") == expected
    assert answer(packed, tmp_path / "c", residency="stream") == expected
