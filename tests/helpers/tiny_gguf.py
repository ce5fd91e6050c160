"""Tiny models with random weights that llama.cpp really loads: dense, sliding-window and recurrent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

LAYERS = 2
WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD = WIDTH // HEADS
INNER = 128
STATE = 16
CONV = 4
TIME_RANK = 8
WINDOW = 16

_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁,.!"]
VOCAB = len(_PIECES)

_KINDS = [
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.CONTROL,
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * (VOCAB - 259),
]

Shapes = Mapping[str, tuple[int, ...]]


def dense(path: Path, *, seed: int = 0, template: str | None = None) -> Path:
    return _write(path, "llama", _attention_metadata(), _attention_shapes(), seed, template)


def sliding_window(path: Path, *, seed: int = 0) -> Path:
    """Gemma 2's shape: every second layer sees only the last `WINDOW` tokens."""
    metadata = {
        **_attention_metadata(),
        "attention.sliding_window": WINDOW,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    norms = {
        f"blk.{layer}.{part}.weight": (WIDTH,)
        for layer in range(LAYERS)
        for part in ("post_attention_norm", "post_ffw_norm")
    }
    return _write(path, "gemma2", metadata, _attention_shapes() | norms, seed)


def recurrent(path: Path, *, seed: int = 0) -> Path:
    """Mamba's shape: a state instead of keys and values."""
    metadata = {
        "block_count": LAYERS,
        "context_length": 1024,
        "embedding_length": WIDTH,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": TIME_RANK,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCAB, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.ssm_in.weight": (2 * INNER, WIDTH),
            f"blk.{layer}.ssm_conv1d.weight": (INNER, CONV),
            f"blk.{layer}.ssm_conv1d.bias": (INNER,),
            f"blk.{layer}.ssm_x.weight": (TIME_RANK + 2 * STATE, INNER),
            f"blk.{layer}.ssm_dt.weight": (INNER, TIME_RANK),
            f"blk.{layer}.ssm_dt.bias": (INNER,),
            f"blk.{layer}.ssm_a": (INNER, STATE),
            f"blk.{layer}.ssm_d": (INNER,),
            f"blk.{layer}.ssm_out.weight": (WIDTH, INNER),
        }
    return _write(path, "mamba", metadata, shapes, seed)


def _attention_metadata() -> dict[str, int | float]:
    return {
        "block_count": LAYERS,
        "context_length": 1024,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
    }


def _attention_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_norm.weight": (WIDTH,),
            f"blk.{layer}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
            f"blk.{layer}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate.weight": (INNER, WIDTH),
            f"blk.{layer}.ffn_up.weight": (INNER, WIDTH),
            f"blk.{layer}.ffn_down.weight": (WIDTH, INNER),
        }
    return shapes


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, int | float],
    shapes: Shapes,
    seed: int,
    template: str | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)  # type: ignore[arg-type]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_PIECES)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types(_KINDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(name, _weights(name, shape, random))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(random.standard_normal(shape, dtype=np.float32))
    # Wide enough that every token of the context changes the logits noticeably.
    scale = 1.0 if len(shape) == 1 else 2.0 / np.sqrt(shape[-1])
    return (scale * random.standard_normal(shape)).astype(np.float32)
