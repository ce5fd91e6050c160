from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from emberkeep.errors import EngineError, ModelBroken
from helpers import tiny_gguf, tiny_hf
from helpers.engines import TOKENS, evaluate

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_hf.write(tmp_path / "tiny")


def change(path: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_folder_becomes_a_model_for_inference(folder: Path) -> None:
    model = tiny_hf.load(folder)
    assert (model.architecture, model.device, model.dtype) == ("llama", "cpu", "float32")
    assert (model.context_length, model.chat_template) == (tiny_hf.CONTEXT, tiny_hf.TEMPLATE)
    assert model.parameters == sum(weight.numel() for weight in tiny_hf.build("llama").parameters())
    assert model.weights_bytes == 4 * model.parameters
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert model.vocab.size == tiny_hf.VOCAB
    assert model.vocab.eog == set(tiny_hf.ENDINGS)
    assert not model.network.training
    assert not any(weight.requires_grad for weight in model.network.parameters())


def test_a_gguf_file_computes_what_it_computes_in_llamacpp(tmp_path: Path, open_engine: Callable) -> None:
    model = tiny_hf.load(tiny_gguf.dense(tmp_path / "dense.gguf"))
    tokens = TOKENS[:40]
    with torch.no_grad():
        ours = model.network(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1].numpy()
    theirs = evaluate(open_engine("dense"), 0, 0, len(tokens))
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_numbers_are_what_was_asked_for(folder: Path) -> None:
    model = tiny_hf.load(folder, dtype="bfloat16")
    assert (model.dtype, model.weights_bytes) == ("bfloat16", 2 * model.parameters)
    assert {weight.dtype for weight in model.network.parameters()} == {torch.bfloat16}


def test_a_device_that_is_not_here_or_is_out_of_memory_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.raises(EngineError, match="There is no device cuda:77 here: choose --device auto"):
        tiny_hf.load(folder, device="cuda:77")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", run_out)
    with pytest.raises(EngineError, match="tiny does not fit into the memory of cpu"):
        tiny_hf.load(folder)


def test_endings_may_be_a_list(folder: Path) -> None:
    change(folder / "generation_config.json", lambda config: config.update(eos_token_id=[7, 9]))
    assert tiny_hf.load(folder).vocab.eog == {7, 9, *tiny_hf.ENDINGS}


def test_the_default_of_several_templates_is_taken_and_without_one_there_is_none(folder: Path) -> None:
    for template, expected in (
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
        (None, None),
    ):
        change(folder / "tokenizer_config.json", lambda config, given=template: config.update(chat_template=given))
        assert tiny_hf.load(folder).chat_template == expected


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    change(folder / "config.json", lambda config: config.update(num_hidden_layers=4))
    with pytest.raises(ModelBroken, match=r"tiny lacks weights \(model.layers.3"):
        tiny_hf.load(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 16.0}
        | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        {"rope_type": "dynamic", "original_max_position_embeddings": 64, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_context_ends_where_positions_would_change(
    folder: Path, rope: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / "config.json", lambda config: config.update(rope_parameters={"rope_theta": 1e4, **rope}))
    assert tiny_hf.load(folder).context_length == 64
    assert "limited to 64 tokens" in caplog.text


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def bring_code(folder: Path) -> None:
    (folder / "mine.py").write_text("raise SystemExit('this must not run')")
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    change(folder / "config.json", lambda config: config.update(model_type="mine", auto_map=auto))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("spoil", [cut_weights, pickle_weights, bring_code, break_config, lose_tokenizer])
def test_what_cannot_be_loaded_is_one_sentence(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    with pytest.raises(ModelBroken, match=r"^transformers cannot load tiny: [^\n]+\.$"):
        tiny_hf.load(folder)


def test_a_cut_gguf_file_is_one_sentence(tmp_path: Path) -> None:
    path = tiny_gguf.dense(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelBroken, match=r"^transformers cannot load cut.gguf: [^\n]+\.$"):
        tiny_hf.load(path)


def test_loading_is_silent(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_hf.load(folder)
    tiny_hf.load(tiny_gguf.dense(tmp_path / "dense.gguf"))
    assert capfd.readouterr() == ("", "")
