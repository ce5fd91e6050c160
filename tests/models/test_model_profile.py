from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder_builders import write_folder
from gguf import GGUFWriter

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import ModelKind, ModelProfile, is_model_folder, profile, profile_of
from helpers.chance import seed, times
from helpers.gguf_builders import (
    HEADS,
    KV_BYTES_PER_TOKEN,
    KV_HEADS,
    LAYERS,
    TEMPLATE,
    VOCAB,
    tiny_llama,
    tiny_model,
    write_mutated,
)

BASE = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def _profile(tmp_path: Path, architecture: str, **metadata: Any) -> ModelProfile:
    return profile(read_header(tiny_model(tmp_path / "m.gguf", architecture, {**BASE, **metadata})))


def test_a_dense_model(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", weights="Q4_1")
    found = profile(read_header(path))
    assert (found.architecture, found.name, found.kind) == ("llama", "tiny llama", ModelKind.DENSE)
    assert (found.layers, found.kv_heads) == (LAYERS, (KV_HEADS,) * LAYERS)
    assert (found.key_length, found.value_length) == (16, 16)
    assert found.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert found.quantisation == "Q4_1"
    assert found.size == path.stat().st_size
    assert found.parameters == sum(t.elements for t in read_header(path).tensors) > 60_000
    assert (found.context_length, found.vocab_size) == (256, VOCAB)
    assert found.chat_template == TEMPLATE
    assert (found.sliding_window, found.expert_count) == (None, 0)


def test_every_head_keeps_kv_when_the_file_names_no_kv_heads(tmp_path: Path) -> None:
    metadata = {key: value for key, value in BASE.items() if key != "attention.head_count_kv"}
    found = profile(read_header(tiny_model(tmp_path / "m.gguf", "llama", metadata)))
    assert found.kv_heads == (HEADS,) * 4


LATENT = {
    "expert_count": 64,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
}


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        (
            "gemma3",
            {"attention.key_length": 256, "attention.value_length": 128},
            {"key_length": 256, "value_length": 128, "kv_bytes_per_token": 4 * 2 * (256 + 128) * 2},
        ),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 2}, {"kind": ModelKind.MOE, "expert_count": 8}),
        (
            "gpt-oss",
            {"expert_count": 32, "attention.sliding_window": 128},
            {"kind": ModelKind.SLIDING_WINDOW, "sliding_window": 128, "expert_count": 32},
        ),
        (
            "mamba",
            {"attention.head_count": 0, "attention.head_count_kv": 0, "ssm.state_size": 16, "ssm.conv_kernel": 4},
            {"kind": ModelKind.RECURRENT, "kv_bytes_per_token": 0},
        ),
        (
            "jamba",
            {"ssm.state_size": 16, "attention.head_count_kv": [0, 2, 0, 2]},
            {"kind": ModelKind.HYBRID, "kv_heads": (0, 2, 0, 2), "kv_bytes_per_token": 2 * 2 * (16 + 16) * 2},
        ),
        (
            "qwen3next",
            {"full_attention_interval": 4, "ssm.state_size": 16},
            {"kind": ModelKind.HYBRID, "kv_heads": (0, 0, 0, 2)},
        ),
        ("gemma3n", {"attention.shared_kv_layers": 3}, {"kv_heads": (2, 0, 0, 0)}),
        ("deepseek2", LATENT, {"kind": ModelKind.MLA, "kv_bytes_per_token": 4 * 576 * 2}),
        ("llama", {"tokenizer.chat_template": ""}, {"chat_template": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_model_keeps_is_read_from_its_metadata(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = _profile(tmp_path, architecture, **metadata)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_projector_is_not_a_language_model(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "clip", {"vision.block_count": 4})
    with pytest.raises(ModelBroken, match=r"clip\.block_count"):
        profile(read_header(path))


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in BASE.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(ModelBroken, match="no weights"):
        profile(read_header(path))


def test_weights_that_are_links_to_nothing_make_no_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    assert not is_model_folder(folder)
    with pytest.raises(ModelBroken, match="holds no weights"):
        profile_of(folder)


def test_an_absurd_layer_count_is_refused_before_it_costs_memory(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="4000000000 layers"):
        _profile(tmp_path, "llama", block_count=4_000_000_000)


def test_flipped_bytes_give_a_profile_or_a_refusal(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    header = read_header(path)
    data = path.read_bytes()[: header.data_offset]
    chance = random.Random(seed(11))
    refused = 0
    for _ in range(times(250)):
        mutated = bytearray(data)
        mutated[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        write_mutated(path, mutated, header.file_size)
        try:
            assert profile(read_header(path)).layers <= 4096
        except ModelBroken:
            refused += 1
    assert refused > times(20)


@pytest.mark.parametrize(("given", "expected"), [({"rope.scaling.original_context_length": 128}, 128), ({}, 512)])
def test_a_model_with_two_sets_of_rope_factors(tmp_path: Path, given: dict[str, int], expected: int) -> None:
    header = read_header(tiny_model(tmp_path / "m.gguf", "phi3", {**BASE, **given}))
    assert profile(header).short_rope_context is None
    longer = replace(header.tensors[0], name="rope_factors_long.weight")
    assert profile(replace(header, tensors=(*header.tensors, longer))).short_rope_context == expected
