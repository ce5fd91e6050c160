"""A reusable `llama_batch` whose arrays are numpy's, so that filling it is a few vector assignments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp.api import Batch


class BatchBuffer:
    """Owns the memory that its `llama_batch` points to."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._sequence_counts = np.ones(capacity, np.int32)
        self._sequence_pointers = self._sequences.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._wanted = np.zeros(capacity, np.int8)
        self._batch = Batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._sequence_counts, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, batch: Sequence[Rows]) -> tuple[Batch, list[int]]:
        """The filled batch and, for each of `batch`, the row of its last token."""
        end = 0
        last_rows = []
        for rows in batch:
            begin, end = end, end + len(rows.tokens)
            self._tokens[begin:end] = rows.tokens
            self._positions[begin:end] = np.arange(rows.start, rows.start + end - begin, dtype=np.int32)
            self._sequences[begin:end] = rows.sequence + 1  # 0 is the engine's scratch sequence
            self._wanted[begin:end] = 0
            self._wanted[end - 1] = rows.want_logits
            last_rows.append(end - 1)
        self._batch.n_tokens = end
        return self._batch, last_rows


def _pointer(array: np.ndarray[tuple[int], np.dtype[np.generic]], to: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(to))
