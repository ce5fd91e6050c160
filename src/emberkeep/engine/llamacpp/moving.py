"""Whether llama.cpp moves state rightly: it says so of models whose keys it then rotates or scales wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.llamacpp import binding
from emberkeep.engine.llamacpp.api import Handle
from emberkeep.engine.llamacpp.blob import Bytes
from emberkeep.engine.llamacpp.context import LlamaSettings, open_context
from emberkeep.engine.llamacpp.layout import Layout
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.rows import BatchBuffer
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.state import read_state
from emberkeep.errors import EngineError

_CELLS = 256
_FRESH, _MOVED, _BYSTANDER = range(3)
_FROM, _TO = 90, 2
_TOLERANCE = 0.02
"""Of the largest number in a key: rotating in 16 bits costs a tenth of that."""


def moves_rightly(model: LlamaModel, layout: Layout, threads: int | None) -> bool:
    """Tried out in a small context, with a token that stands alone: it sees nothing but itself wherever it is.

    Moved, its keys must be those that the model computes at the new place, and nobody else's may have changed.
    """
    if layout.unit is not KvUnit.RANGE:
        return False
    settings = LlamaSettings(_CELLS, _CELLS, sequences=2, batch=8, threads=threads)
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
    return np.array_equal(bystander, before) and all(map(_is_close, _keys(layout, moved), _keys(layout, fresh)))


def _evaluate(context: Handle, sequence: int, position: int) -> None:
    rows = Rows(sequence - 1, position, np.zeros(1, np.int32), want_logits=False)
    batch, _ = BatchBuffer(1).fill([rows])
    if llama().llama_decode(context, batch):
        raise EngineError(f"llama.cpp could not evaluate a token: {binding.take_errors()}.")


def _keys(layout: Layout, state: Bytes) -> Iterator[npt.NDArray[np.float32]]:
    """Of each layer, in the state of a single token."""
    for begin, run in layout.runs(1):
        for offset in range(begin, begin + run.count * run.stride(1), run.stride(1)):
            if run.is_key:
                yield state[offset : offset + run.row_bytes].view(np.float16).astype(np.float32)


def _is_close(moved: npt.NDArray[np.float32], fresh: npt.NDArray[np.float32]) -> bool:
    return bool(np.abs(moved - fresh).max() < _TOLERANCE * np.abs(fresh).max())
