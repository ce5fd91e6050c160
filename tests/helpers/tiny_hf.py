"""Tiny models with random weights of many families, in the folders that transformers loads."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from emberkeep.engine.hf.model_loader import HfModel, HfSettings, HfSource, load_model

WINDOW = 8
CONTEXT = 1024
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS)
ENDINGS = (256, 258)
"""Tokens that end an answer."""
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
UNPRINTABLE = [place for place, letter in enumerate(_LETTERS) if not ("!" <= letter <= "~" or letter == "Ġ")]
"""Tokens that are no text by themselves."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT: Mapping[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
PAGED: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "phi3": {},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": CONTEXT},
    "glm4": {"head_dim": 16},
    "cohere2": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo2": {},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {},
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "granite": {},
    "nemotron": {},
    "ernie4_5": {"head_dim": 16},
}
"""Whose state is keys and values only, and whose attention is a function of transformers."""
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "mamba": {"state_size": 8, "conv_kernel": 4, "expand": 2},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 16,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "bloom": {"n_layer": 3, "n_head": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "gptj": {"n_layer": 3, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_positions": CONTEXT},
    "falcon": {"alibi": True, "num_kv_heads": 2, "new_decoder_architecture": True},
}
"""Whose state is more than that, or whose attention is code of their own."""
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": {
        **_EXPERTS,
        "head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""More that choose experts."""
FAMILIES = {**PAGED, **WHOLE, **MIXTURES}


@functools.cache
def build(family: str, seed: int = 0, layers: int = 3) -> PreTrainedModel:
    """As its authors wrote it, with weights so wide that every token of the context changes the logits."""
    transformers_logging.set_verbosity_error()
    config = AutoConfig.for_model(family, **{**_BASE, "num_hidden_layers": layers, **FAMILIES[family]})
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in network.named_parameters():
            if weights.ndim > 1:
                weights.normal_(0, _width(name, weights), generator=random)
            elif "norm" not in name and "ln_" not in name and "layernorm" not in name:
                weights.normal_(0, 0.5, generator=random)
    return network.eval()


def _width(name: str, weights: torch.Tensor) -> float:
    if "embed" in name:
        return 1.0
    return (6.0 if "lm_head" in name else 1.5) * weights.shape[-1] ** -0.5


def write(
    folder: Path, family: str = "llama", *, seed: int = 0, layers: int = 3, template: str | None = TEMPLATE
) -> Path:
    build(family, seed, layers).save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def load(path: Path, *, device: str = "cpu", dtype: str = "auto", **how: Any) -> HfModel:
    """A folder or a GGUF file."""
    source = HfSource(path) if path.is_dir() else HfSource(path.parent, path.name)
    return load_model(source, device=device, dtype=dtype, **{"attention": "eager", **how})


def settings(
    context: int = 256, cells: int = 512, sequences: int = 4, batch: int = 256, **more: Any
) -> HfSettings:
    return HfSettings(context, cells, sequences, batch, **{"threads": 1, **more})


def tokenizer() -> Tokenizer:
    """A token for every byte, and three that no text contains."""
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(_LETTERS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


def quantise(folder: Path, target: Path, *, group: int, version: str = "gemm") -> tuple[Path, Path]:
    """(the checkpoint in four bits, one of the same numbers in 32). Every matrix of a layer is rounded."""
    packed, whole = target / "awq", target / "dequantised"
    for each in (packed, whole):
        shutil.copytree(folder, each)
        for file in each.glob("*.safetensors*"):
            file.unlink()
    tensors = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    full: dict[str, torch.Tensor] = {}
    small: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = ".layers." in name and name.endswith("_proj.weight")
        if not is_matrix:
            full[name] = small[name] = tensor
            continue
        codes, zeros, scales = _round(tensor.float(), group)
        each = scales.shape[1]
        full[name] = ((codes.unflatten(1, (each, -1)) - zeros[..., None]) * scales[..., None].float()).flatten(1)
        prefix = name.removesuffix("weight")
        small |= {prefix + n: t for n, t in _pack(codes, zeros, scales, version, group).items()}
    save_file(small, packed / "model.safetensors", {"format": "pt"})
    save_file(full, whole / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return packed, whole


def _round(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes by output and input; zeros and scales by output and group."""
    groups = weight.unflatten(1, (-1, group))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).clamp_min(1e-5).half()
    zeros = (-least / scales.float()).round().clamp(0, 15).int()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).int()
    return codes.flatten(1), zeros, scales


def _pack(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, version: str, group: int
) -> dict[str, torch.Tensor]:
    if version == "gemm":
        words = [_words(part.T, GEMM_ORDER) for part in (codes, zeros)]
        return {"qweight": words[0], "qzeros": words[1], "scales": scales.T.contiguous()}
    # Zeros are padded to whole words, of which smaller groups have several at a time.
    together = {64: 2, 32: 4}.get(group, 1)
    width = -(-zeros.shape[1] // _PER_WORD)
    width = -(-width // together) * together
    spare = width * _PER_WORD - zeros.shape[1]
    zeros, scales = (torch.nn.functional.pad(part, (0, spare)) for part in (zeros, scales))
    order = range(_PER_WORD)
    return {"qweight": _words(codes, order), "qzeros": _words(zeros, order), "scales": scales.contiguous()}


def _words(numbers: torch.Tensor, order: tuple[int, ...] | range) -> torch.Tensor:
    """Eight to an int32, in this order."""
    words = torch.zeros(len(numbers), numbers.shape[1] // _PER_WORD, dtype=torch.int64)
    for place, number in enumerate(order):
        words |= numbers[:, number::_PER_WORD].long() << 4 * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()
