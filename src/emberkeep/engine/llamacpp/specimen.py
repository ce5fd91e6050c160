"""A GGUF model that means nothing, for trying out a library: random weights in every format that CPUs have
kernels of their own for, small enough to be written and run within a second.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep.values import dataclass

# ── the model that means nothing ──

_TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6
VOCABULARY = len(_TOKENS)
_ALIGNMENT = 32
_WIDTH, _LAYERS = 256, 2
_UINT32, _INT32, _FLOAT32, _TEXT, _ARRAY = 4, 5, 6, 8, 9
_Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Format:
    number: int
    """ggml's."""
    values: int
    """In one block."""
    size: int
    """Bytes of one block."""
    scales: tuple[int, ...]
    """Where the numbers in 16 bits stand in it that all others are multiplied with."""


_F32, _F16 = _Format(0, 1, 4, ()), _Format(1, 1, 2, ())
_FORMATS = {
    "Q4_0": _Format(2, 32, 18, (0,)),
    "Q8_0": _Format(8, 32, 34, (0,)),
    "Q4_K": _Format(12, 256, 144, (0, 2)),
    "Q5_K": _Format(13, 256, 176, (0, 2)),
    "Q6_K": _Format(14, 256, 210, (208,)),
    "IQ4_XS": _Format(23, 256, 136, (0,)),
    "F16": _F16,
}


def write_specimen(path: Path) -> None:
    """Write one to `path`, always the same."""
    random = np.random.default_rng(0)
    width, layers, formats = _WIDTH, _LAYERS, list(_FORMATS.values())
    tensors: list[tuple[str, tuple[int, ...], _Format, bytes]] = []

    def matrix(name: str, inputs: int, outputs: int) -> None:
        format = formats[len(tensors) % len(formats)]
        tensors.append((name, (inputs, outputs), format, _weights(random, inputs * outputs, format)))

    def ones(name: str) -> None:
        tensors.append((name, (width,), _F32, np.ones(width, "<f4").tobytes()))

    matrix("token_embd.weight", width, VOCABULARY)
    for layer in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", width, width)
        matrix(f"blk.{layer}.ffn_gate.weight", width, 2 * width)
        matrix(f"blk.{layer}.ffn_up.weight", width, 2 * width)
        matrix(f"blk.{layer}.ffn_down.weight", 2 * width, width)
        ones(f"blk.{layer}.attn_norm.weight")
        ones(f"blk.{layer}.ffn_norm.weight")
    matrix("output.weight", width, VOCABULARY)
    ones("output_norm.weight")
    path.write_bytes(_file(_metadata(width, layers), tensors))


def _metadata(width: int, layers: int) -> list[bytes]:
    kinds = (_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256)
    numbers = {
        "context_length": 4096,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 2 * width,
        "attention.head_count": width // 64,
        "rope.dimension_count": 64,
    }
    return [
        _entry("general.architecture", _TEXT, _string("llama")),
        _entry("tokenizer.ggml.model", _TEXT, _string("llama")),
        _array("tokenizer.ggml.tokens", _TEXT, [_string(token) for token in _TOKENS]),
        _array("tokenizer.ggml.scores", _FLOAT32, [bytes(4)] * VOCABULARY),
        _array("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for kind in kinds]),
        _entry("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
        *(_entry(f"llama.{key}", _UINT32, struct.pack("<I", value)) for key, value in numbers.items()),
    ]


def _weights(random: np.random.Generator, count: int, format: _Format) -> bytes:
    if format is _F16:
        return random.normal(0, 0.02, count).astype("<f2").tobytes()
    blocks: _Blocks = random.integers(0, 256, (count // format.values, format.size), np.uint8)
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
