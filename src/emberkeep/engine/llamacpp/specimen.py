"""A model that means nothing, which libraries are tried with."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_ALIGNMENT = 32
_WIDTH, LAYERS = 256, 2
_UINT32, _INT32, _FLOAT32, _TEXT, _ARRAY = 4, 5, 6, 8, 9


class _Format(NamedTuple):
    """ggml's number for it; the values in a block, its bytes, and where in it the scales in 16 bits stand."""

    number: int
    values: int
    size: int
    scales: tuple[int, ...]


_F32, _F16 = _Format(0, 1, 4, ()), _Format(1, 1, 2, ())
_Q4_0, _Q8_0 = _Format(2, 32, 18, (0,)), _Format(8, 32, 34, (0,))
_Q4_K, _Q5_K = _Format(12, 256, 144, (0, 2)), _Format(13, 256, 176, (0, 2))
_Q6_K, _IQ4_XS = _Format(14, 256, 210, (208,)), _Format(23, 256, 136, (0,))
_FORMATS = (_Q4_0, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS, _F16)


def write_specimen(path: Path) -> None:
    """Random weights in every format that CPUs have kernels of their own for, always the same; small enough to be
    written and run within a second."""
    random, width, ones = np.random.default_rng(0), _WIDTH, np.ones(_WIDTH, "<f4").tobytes()
    tensors: list[tuple[str, tuple[int, ...], _Format, bytes]] = []

    def matrix(name: str, inputs: int, outputs: int) -> None:
        format = _FORMATS[len(tensors) % len(_FORMATS)]
        tensors.append((name, (inputs, outputs), format, _weights(random, inputs * outputs, format)))

    matrix("token_embd.weight", width, len(_TOKENS))
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", width, width)
        matrix(f"blk.{layer}.ffn_gate.weight", width, 2 * width)
        matrix(f"blk.{layer}.ffn_up.weight", width, 2 * width)
        matrix(f"blk.{layer}.ffn_down.weight", 2 * width, width)
        tensors += [(f"blk.{layer}.{part}_norm.weight", (width,), _F32, ones) for part in ("attn", "ffn")]
    matrix("output.weight", width, len(_TOKENS))
    tensors.append(("output_norm.weight", (width,), _F32, ones))
    path.write_bytes(_file(_metadata(), tensors))


def _metadata() -> list[bytes]:
    kinds = (2, 3, 3, *[6] * 256)  # unknown, control, control, bytes
    numbers = {
        "context_length": 4096,
        "embedding_length": _WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 2 * _WIDTH,
        "attention.head_count": _WIDTH // 64,
        "rope.dimension_count": 64,
    }
    return [
        _entry("general.architecture", _TEXT, _string("llama")),
        _entry("tokenizer.ggml.model", _TEXT, _string("llama")),
        _array("tokenizer.ggml.tokens", _TEXT, [_string(token) for token in _TOKENS]),
        _array("tokenizer.ggml.scores", _FLOAT32, [bytes(4)] * len(_TOKENS)),
        _array("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for kind in kinds]),
        _entry("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
        *(_entry(f"llama.{key}", _UINT32, struct.pack("<I", value)) for key, value in numbers.items()),
    ]


def _weights(random: np.random.Generator, count: int, format: _Format) -> bytes:
    if format is _F16:
        return random.normal(0, 0.02, count).astype("<f2").tobytes()
    blocks: npt.NDArray[np.uint8] = random.integers(0, 256, (count // format.values, format.size), np.uint8)
    for place in format.scales:
        blocks[:, place : place + 2] = np.frombuffer(np.float16(0.0005).tobytes(), np.uint8)
    return blocks.tobytes()


def _file(metadata: list[bytes], tensors: list[tuple[str, tuple[int, ...], _Format, bytes]]) -> bytes:
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata)), *metadata]
    offset = 0
    for name, shape, format, data in tensors:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += [_string(name), dimensions, struct.pack("<IQ", format.number, offset)]
        offset += len(_pad(data))
    return _pad(b"".join(head)) + b"".join(_pad(data) for *_, data in tensors)


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _array(key: str, kind: int, values: list[bytes]) -> bytes:
    return _entry(key, _ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
