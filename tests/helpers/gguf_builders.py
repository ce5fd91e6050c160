"""Tiny GGUF files with the metadata of every kind of model."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

EMBEDDING = 64
HEADS = 4
KV_HEADS = 2
LAYERS = 2
FEED_FORWARD = 128
VOCAB = 96
PARTS = 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
KV_BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * (EMBEDDING // HEADS) * 2


def tiny_llama(
    path: Path, *, weights: str = "F32", seed: int = 0, tensors_per_part: int = 0, **extra: Any
) -> Path:
    """A complete llama with random weights in the given format; `extra` adds or replaces `llama.*` keys.

    `tensors_per_part`: split it, and return the path of the first part; 0: one file.
    """
    metadata = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": EMBEDDING,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": EMBEDDING // HEADS,
    }
    shape = {"weights": weights, "seed": seed, "tensors_per_part": tensors_per_part}
    return tiny_model(path, "llama", metadata | extra, **shape)


def split_llama(path: Path, *, seed: int = 0, weights: str = "F32") -> list[Path]:
    """A llama in `PARTS` files, by number."""
    first = tiny_llama(path, weights=weights, seed=seed, tensors_per_part=7)
    parts = sorted(first.parent.glob(f"{glob.escape(path.stem)}-*-of-{PARTS:05}.gguf"))
    assert len(parts) == PARTS
    return parts


def tiny_model(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    *,
    weights: str = "F32",
    seed: int = 0,
    tensors_per_part: int = 0,
) -> Path:
    """`metadata` without the architecture's prefix; keys of `general`, `tokenizer` and `split` as they are."""
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_name(f"tiny {architecture}")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for key, value in {"tokenizer.chat_template": TEMPLATE, **metadata}.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        _add(writer, full, value)
    _add_tensors(writer, GGMLQuantizationType[weights], seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_per_part else writer.format_shard_names(path)[0]


def write_mutated(path: Path, header: bytes, size: int) -> None:
    """A file of `size` bytes that begins with `header`; the weights are a hole, which costs no writing."""
    path.write_bytes(header)
    os.truncate(path, size)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tensors(writer: GGUFWriter, weights: GGMLQuantizationType, seed: int) -> None:
    random = np.random.default_rng(seed)
    kv = KV_HEADS * EMBEDDING // HEADS
    matrices = {"token_embd.weight": (VOCAB, EMBEDDING)}
    for layer in range(LAYERS):
        matrices |= {
            f"blk.{layer}.attn_q.weight": (EMBEDDING, EMBEDDING),
            f"blk.{layer}.attn_k.weight": (kv, EMBEDDING),
            f"blk.{layer}.attn_v.weight": (kv, EMBEDDING),
            f"blk.{layer}.attn_output.weight": (EMBEDDING, EMBEDDING),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, EMBEDDING),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, EMBEDDING),
            f"blk.{layer}.ffn_down.weight": (EMBEDDING, FEED_FORWARD),
        }
    for name, shape in matrices.items():
        data = random.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, quants.quantize(data, weights), raw_dtype=weights)
    norms = [f"blk.{layer}.{part}_norm.weight" for layer in range(LAYERS) for part in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        writer.add_tensor(name, np.ones(EMBEDDING, dtype=np.float32))


def charsmap() -> bytes:
    """A table that rewrites A as a, and nothing else."""
    nodes = np.zeros(512, "<u4")
    nodes[0] = 256 << 10  # children of the root are at 256 ^ letter
    leaf = 256 ^ ord("A")
    nodes[leaf] = 3 << 10 | 1 << 8 | ord("A")
    nodes[leaf ^ 3] = 1 << 31  # a leaf: where its text begins
    return (4 * len(nodes)).to_bytes(4, "little") + nodes.tobytes() + b"a\0"
