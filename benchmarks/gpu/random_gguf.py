"""A GGUF file with random weights of a given shape, written without ever being in RAM as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from benchmarks.baseline import Shape

_ARCHITECTURE = "qwen2"
_REPEATED = 1 << 24
"""Random numbers that there are; they repeat, which no speed depends on."""


def write_random_gguf(path: Path, shape: Shape) -> Path:
    """Weights in 16 bits. Blocks for as long as the disk takes."""
    writer = GGUFWriter(path, _ARCHITECTURE)
    config = shape.config()
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("llama")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    # A blank is a token of its own, as in all such vocabularies.
    writer.add_token_list([*pieces, "▁", *(f"t{number}" for number in range(257, shape.vocab))])
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types([int(TokenType.BYTE)] * 256 + [int(TokenType.NORMAL)] * (shape.vocab - 256))
    tensors = list(_tensors(shape))
    for name, sizes, is_matrix in tensors:
        dtype = np.dtype(np.float16 if is_matrix else np.float32)
        kind = GGMLQuantizationType.F16 if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor_info(name, sizes, dtype, int(np.prod(sizes)) * dtype.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0).standard_normal(_REPEATED, np.float32)
    for name, sizes, is_matrix in tensors:
        writer.write_tensor_data(_weights(random, name, sizes, is_matrix=is_matrix))
    writer.close()
    return path


def _weights(
    random: npt.NDArray[np.float32], name: str, sizes: tuple[int, ...], *, is_matrix: bool
) -> npt.NDArray[np.floating]:
    if not is_matrix:
        return np.full(sizes, 1.0 if "norm" in name else 0.0, np.float32)
    scaled = (random / np.sqrt(sizes[-1])).astype(np.float16)
    return np.resize(scaled, sizes)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, sizes, and whether it is a matrix."""
    config = shape.config()
    hidden, wide = shape.hidden, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    yield "token_embd.weight", (shape.vocab, hidden), True
    yield "output_norm.weight", (hidden,), False
    for layer in range(shape.layers):
        for name, sizes in (
            ("attn_q", (hidden, hidden)),
            ("attn_k", (kv, hidden)),
            ("attn_v", (kv, hidden)),
            ("attn_output", (hidden, hidden)),
            ("ffn_gate", (wide, hidden)),
            ("ffn_up", (wide, hidden)),
            ("ffn_down", (hidden, wide)),
        ):
            yield f"blk.{layer}.{name}.weight", sizes, True
            if name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.bias", sizes[:1], False
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (hidden,), False
