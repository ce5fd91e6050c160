"""LoRA adapters are looked at before llama.cpp is: what it would die of, or compute nonsense with, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.models.checks import check_adapter
from emberkeep.models.gguf import GgufHeader, read_header
from emberkeep.models.profile import profile
from helpers import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return read_header(tiny_gguf.dense(tmp_path_factory.mktemp("model") / "dense.gguf"))


def refusal(path: Path, model: GgufHeader) -> str:
    with pytest.raises(ModelBroken) as caught:
        check_adapter(path, model)
    return str(caught.value)


def written(path: Path, tensors: dict[str, np.ndarray], *, alpha: str = "float32", type: str = "adapter") -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_type(type)
    writer.add_string("adapter.type", "lora")
    getattr(writer, f"add_{alpha}")("adapter.lora.alpha", 8)
    for name, weights in tensors.items():
        whole = np.issubdtype(weights.dtype, np.integer)
        writer.add_tensor(name, weights, raw_dtype=GGMLQuantizationType.I32 if whole else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair(name: str, *, rank: int = 4, a: int = 64, b: int = 64, inner: int | None = None) -> dict[str, np.ndarray]:
    return {
        f"{name}.lora_a": np.ones((rank, a), np.float32),
        f"{name}.lora_b": np.ones((b, inner or rank), np.float32),
    }


def test_an_adapter_of_the_model_is_taken(model: GgufHeader, tmp_path: Path) -> None:
    header = check_adapter(tiny_gguf.lora(tmp_path / "a.gguf"), model)
    assert len(header.tensors) == 8


def test_embeddings_and_norms_may_be_in_it(model: GgufHeader, tmp_path: Path) -> None:
    embeddings = {
        "token_embd.weight.lora_a": np.ones((tiny_gguf.VOCAB, 4), np.float32),
        "token_embd.weight.lora_b": np.ones((64, 4), np.float32),
    }
    norm = {"blk.0.attn_norm.weight": np.ones(64, np.float32)}
    check_adapter(written(tmp_path / "a.gguf", embeddings | norm), model)


def test_a_file_that_is_not_there_is_said(model: GgufHeader, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        check_adapter(tmp_path / "none.gguf", model)


def test_a_model_is_no_adapter(model: GgufHeader, tmp_path: Path) -> None:
    assert "m.gguf is no LoRA adapter" in refusal(tiny_gguf.dense(tmp_path / "m.gguf"), model)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="give it with --lora beside the model it is for"):
        profile(read_header(tiny_gguf.lora(tmp_path / "a.gguf")))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ({"kind": "control"}, "a.gguf is no LoRA adapter"),
        ({"invoked_by": (5, 6)}, "a.gguf is an activated LoRA"),
        ({"architecture": "qwen2"}, "a.gguf is for models of the architecture qwen2, and this one is llama."),
        ({"inner": 128}, "a.gguf is for another model: blk.0.attn_q.weight"),
    ],
)
def test_adapters_for_something_else_are_refused(
    model: GgufHeader, tmp_path: Path, made: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(tiny_gguf.lora(tmp_path / "a.gguf", **made), model)


@pytest.mark.parametrize(
    "tensors",
    [
        pair("blk.7.attn_q.weight"),
        pair("blk.0.attn_q.weight", a=32),
        pair("blk.0.attn_q.weight", b=32),
        pair("blk.0.attn_q.weight", inner=8),
        pair("blk.0.attn_k.weight"),
        pair("token_embd.weight"),
    ],
    ids=["no such layer", "input", "output", "rank", "keys are narrower", "embeddings"],
)
def test_shapes_that_do_not_fit_together_are_refused(
    model: GgufHeader, tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    assert "is for another model" in refusal(written(tmp_path / "a.gguf", tensors), model)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"blk.0.attn_q.weight.lora_a": np.ones((4, 64), np.float32)},
        {"blk.0.attn_q.weight": np.ones((64, 64), np.float32)},
        {"blk.0.attn_norm.weight": np.ones(64, np.float32)},
    ],
    ids=["nothing", "half a pair", "whole weights", "norms alone"],
)
def test_what_changes_nothing_is_broken(model: GgufHeader, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    assert "a.gguf is broken" in refusal(written(tmp_path / "a.gguf", tensors), model)


@pytest.mark.parametrize("kind", ["uint32", "float64"])
def test_a_strength_of_another_type_is_refused(model: GgufHeader, tmp_path: Path, kind: str) -> None:
    """llama.cpp ends the process over it."""
    path = written(tmp_path / "a.gguf", pair("blk.0.attn_q.weight"), alpha=kind)
    assert "its adapter.lora.alpha is not of the type f32" in refusal(path, model)


def test_whole_numbers_are_no_weights(model: GgufHeader, tmp_path: Path) -> None:
    tensors = {name: weights.astype(np.int32) for name, weights in pair("blk.0.attn_q.weight").items()}
    assert "in a format that adapters cannot be computed in" in refusal(
        written(tmp_path / "a.gguf", tensors), model
    )
