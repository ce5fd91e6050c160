"""The state of single sequences of a llama.cpp context as bytes, in and out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from emberkeep.engine.llamacpp import binding
from emberkeep.engine.llamacpp.api import Handle
from emberkeep.engine.llamacpp.blob import Bytes
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.errors import EngineError

WHOLE = 0
PARTIAL = 1
"""Without what can be taken apart by range."""


def read_state(context: Handle, sequence: int, flags: int = WHOLE) -> Bytes:
    """A copy. Raises EngineError."""
    size = llama().llama_state_seq_get_size_ext(context, sequence, flags)
    state = np.empty(size, np.uint8)
    written = llama().llama_state_seq_get_data_ext(context, _pointer(state), size, sequence, flags)
    if written != size:
        raise EngineError(f"llama.cpp exported {written} bytes instead of {size}.")
    return state


def write_state(context: Handle, sequence: int, state: Bytes, flags: int = WHOLE) -> bool:
    """Replace a sequence's state. False when there is no room: what was to be replaced is then gone.

    llama.cpp trusts the bytes: they must have been checked.
    """
    read = llama().llama_state_seq_set_data_ext(context, _pointer(state), len(state), sequence, flags)
    if read == 0:
        binding.take_errors()
    return bool(read)


@contextmanager
def shared(memory: Handle, source: int, target: int, start: int, end: int) -> Iterator[None]:
    """Inside of it the empty sequence `target` shares [start, end) of `source`. No bytes are copied."""
    llama().llama_memory_seq_cp(memory, source, target, start, end)
    try:
        yield
    finally:
        llama().llama_memory_seq_rm(memory, target, -1, -1)


def _pointer(state: Bytes) -> object:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
