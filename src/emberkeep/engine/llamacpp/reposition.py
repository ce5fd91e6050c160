"""Whether llama.cpp repositions state rightly.

It says so of models whose keys it then rotates or scales wrongly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.llamacpp.c_api import TYPES, Handle
from emberkeep.engine.llamacpp.context import LlamaSettings, open_context
from emberkeep.engine.llamacpp.kv_state import BatchBuffer, Bytes, Layout, read_state
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.errors import EngineError

_CELLS = 256
_MIXED = 64
"""Heads of multiples of it are mixed."""
_FRESH, _MOVED, _BYSTANDER = range(3)
_FROM, _TO = 90, 2
_TOLERANCE = {"f16": 0.02, "q8_0": 0.05, "q4_0": 0.4}
"""Of the largest number in a key: rotating in 16 bits costs a tenth of that, quantising three times the rest."""
_SCALE_TOLERANCE = 0.1
"""Of all keys together, in which the errors of quantising cancel out."""


def can_reposition(model: LlamaModel, layout: Layout, live: LlamaSettings) -> bool:
    """Tried out in a small context, with a token that stands alone: it sees nothing but itself wherever it is.

    Moved, its keys must be those that the model computes at the new position, and no other sequence's may change.
    """
    if layout.unit is not KvUnit.RANGE or not _survives_trial(model, live.kv_type):
        return False
    settings = replace(live, context=_CELLS, cells=_CELLS, sequences=2, batch=8)
    context = open_context(model, settings, None)
    memory = llama().llama_get_memory(context)
    try:
        if not llama().llama_memory_can_shift(memory):
            return False
        _evaluate(context, _MOVED, _FROM)
        _evaluate(context, _BYSTANDER, _TO)
        before = read_state(context, _BYSTANDER)
        llama().llama_memory_seq_add(memory, _MOVED, -1, -1, _TO - _FROM)
        _evaluate(context, _FRESH, _TO)
        fresh, moved, bystander = (read_state(context, sequence) for sequence in range(3))
    finally:
        llama().llama_free(context)
    return np.array_equal(bystander, before) and _are_close(
        list(_keys(layout, moved)), list(_keys(layout, fresh)), _TOLERANCE[live.kv_type]
    )


def _survives_trial(model: LlamaModel, kv_type: str) -> bool:
    """Whether llama.cpp survives it.

    Its graph for quantised keys is right only where whole heads are rotated and where it has mixed the numbers
    of each head before it quantised them; otherwise it ends the process, and so may a GPU that cannot compute it.
    """
    is_mixed = not os.environ.get("LLAMA_ATTN_ROT_DISABLE")
    return kv_type == "f16" or (is_mixed and not model.offloads and _rotates_whole_heads(model))


def _rotates_whole_heads(model: LlamaModel) -> bool:
    def number(key: str) -> int:
        text = model.metadata(f"{model.metadata('general.architecture')}.{key}") or ""
        return int(text) if text.isdigit() else 0

    heads = max(number("attention.head_count"), 1)
    width = number("attention.key_length") or number("embedding_length") // heads
    return width % _MIXED == 0 and number("rope.dimension_count") in (0, width)


def _evaluate(context: Handle, sequence: int, position: int) -> None:
    BatchBuffer(1).decode(context, Rows(sequence - 1, position, np.zeros(1, np.int32), outputs=0))


def _keys(layout: Layout, state: Bytes) -> Iterator[Numbers]:
    """Of each layer, in the state of a single token."""
    for begin, run in layout.runs(1):
        for offset in range(begin, begin + run.count * run.stride(1), run.stride(1)):
            if run.is_key:
                yield dequantize(state[offset : offset + run.tensor.row_bytes], run.tensor.kind)


def _are_close(moved: Sequence[Numbers], fresh: Sequence[Numbers], tolerance: float) -> bool:
    layers = zip(moved, fresh, strict=True)
    if not all(np.abs(there - here).max() < tolerance * np.abs(here).max() for there, here in layers):
        return False
    there, here = np.concatenate(moved), np.concatenate(fresh)
    return bool(abs(there @ here / (here @ here) - 1) < _SCALE_TOLERANCE)


Numbers = npt.NDArray[np.float32]

BLOCK = 32
"""Numbers that share a scale in quantised types."""


def dequantize(row: Bytes, kind: int) -> Numbers:
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
