"""Rows of one sequence, picked out of a state of several.

Sequences that write answers side by side get cells in turns. llama.cpp copies each run of neighbouring cells from
a GPU by itself, layer by layer: thousands of copies for one chunk. So what lies between is read along, in few
copies. Whose rows these are llama.cpp says where it writes the state of a whole context, which begins with

    u32 length, the name of the architecture
    u32 n_stream = 1, u32 cell_count
    cell_count x { i32 pos, u32 n_seq_id, n_seq_id x i32 seq_id }

and of which no more is asked for. Rows are only used if positions and numbers agree with what is known of them.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import read_state, share_ranges
from emberkeep.engine.llamacpp.kv_layout import HEAD_BYTES, Bytes, Layout, cell_count
from emberkeep.engine.llamacpp.live_context import SCRATCH, LiveContext
from emberkeep.engine.llamacpp.shared_library import llama, take_errors
from emberkeep.errors import EngineError

Ints = npt.NDArray[np.intp]
_NAME_BYTES = 64
"""The name of an architecture is shorter."""
_MOST_BETWEEN = 64
"""Times the wanted cells that are read along, at most."""
_BLOCK = 1024


def is_mixed(context: LiveContext, sequence: int, start: int, end: int) -> bool:
    """Whether others got cells between those of [start, end)."""
    numbers = context.cells.numbers(sequence)[start:end]
    between = int(numbers.max() - numbers.min()) + 1
    return 1.5 * len(numbers) <= between <= _MOST_BETWEEN * len(numbers)


def read_mixed(
    context: LiveContext, layout: Layout, sequence: int, start: int, end: int, into: Bytes
) -> tuple[Bytes, Ints]:
    """A state with the rows of [start, end) and of others, in the memory of `into` if that is large enough, and
    which rows those of [start, end) are. Raises EngineError where that cannot be told."""
    numbers = context.cells.numbers(sequence)[start:end]
    spans = context.cells.allocated(int(numbers.min()), int(numbers.max()))
    with share_ranges(context.memory, SCRATCH, [(other + 1, *span) for other, span in spans]):
        state = read_state(context.handle, SCRATCH, into=into)
        count = cell_count(state[HEAD_BYTES:])
        positions, ids, cells = _read_owners(context.handle, context.cells.used, context.cells.entries + count)
    together = cells[ids == SCRATCH]
    own = cells[ids == sequence + 1]
    own = own[(positions[own] >= start) & (positions[own] < end)]
    own = own[np.argsort(positions[own], kind="stable")]
    rows = np.searchsorted(together, own)
    told = next(part.cells(data, count)[:, 0] for part, data in layout.parts(state, count))
    is_known = np.array_equal(positions[together], told) and np.array_equal(positions[own], np.arange(start, end))
    if not is_known or not np.array_equal(together[np.minimum(rows, len(together) - 1)], own):
        raise EngineError("llama.cpp does not tell whose its cells are")
    return state, rows


def _read_owners(context: Handle, used: int, entries: int) -> tuple[Ints, Ints, Ints]:
    """The position of each of the `used` cells, as they lie; and for each of all `entries` the sequence, and which
    cell it has. Raises EngineError."""
    size = _NAME_BYTES + 4 * (3 + 2 * used + entries)
    data = np.zeros(size, np.uint8)
    llama().llama_state_get_data(context, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size)
    take_errors()  # there is no room for more
    length = int(data[:4].view("<u4")[0])
    if length > _NAME_BYTES - 4:
        raise EngineError("llama.cpp begins a state in another way")
    words = data[4 + length : 4 + length + 4 * (2 + 2 * used + entries)].copy().view("<i4").astype(np.intp)
    if words[0] != 1 or words[1] != used:
        raise EngineError("llama.cpp has another number of cells")
    return _take_apart(words[2:], used)


def _take_apart(words: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """Cells with as many sequences as their neighbours are taken apart at once."""
    positions, ids, cells = [], [], []
    done = at = 0
    while done < count:
        each = int(words[at + 1]) if at + 1 < len(words) else -1
        most = min(count - done, _BLOCK, (len(words) - at) // (2 + each) if each >= 0 else 0)
        table = words[at : at + most * (2 + each)].reshape(most, 2 + each)
        differs = table[:, 1] != each
        alike = int(differs.argmax()) if differs.any() else most
        if not alike:
            raise EngineError("llama.cpp writes its cells in another way")
        table = table[:alike]
        positions.append(table[:, 0])
        ids.append(table[:, 2:].ravel())
        cells.append(np.repeat(np.arange(done, done + alike), each))
        done, at = done + alike, at + alike * (2 + each)
    return np.concatenate(positions), np.concatenate(ids), np.concatenate(cells)
