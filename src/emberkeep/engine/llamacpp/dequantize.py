"""Rows of keys and values as numbers, whatever llama.cpp holds them in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkeep.engine.llamacpp.api import TYPES
from emberkeep.engine.llamacpp.blob import Bytes
from emberkeep.errors import EngineError

Numbers = npt.NDArray[np.float32]

BLOCK = 32
"""Numbers that share a scale in quantised types."""


def dequantized(row: Bytes, kind: int) -> Numbers:
    """Raises EngineError for a type that live state never has."""
    if kind == TYPES["f16"]:
        return row.view(np.float16).astype(np.float32)
    if kind == TYPES["q8_0"]:
        scales, rest = _blocks(row, BLOCK)
        return (rest.view(np.int8) * scales).ravel()
    if kind == TYPES["q4_0"]:
        scales, rest = _blocks(row, BLOCK // 2)
        numbers = np.concatenate([rest & 15, rest >> 4], axis=1).astype(np.float32) - 8
        return (numbers * scales).ravel()
    raise EngineError(f"State of ggml's type {kind} cannot be read.")


def _blocks(row: Bytes, size: int) -> tuple[Numbers, Bytes]:
    """The scale of each block, and the `size` bytes behind it."""
    blocks = row.reshape(-1, 2 + size)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32), np.ascontiguousarray(blocks[:, 2:])
