"""Rows of one sequence, picked out of a state of several.

Sequences that write answers side by side get cells in turns. llama.cpp copies each run of neighbouring cells from
a GPU by itself, layer by layer: thousands of copies for one chunk. So what lies between is read along, in few
copies. Whose rows these are llama.cpp says where it writes the state of a whole context, which begins with

    u32 length, the name of the architecture
    u32 n_stream = 1, u32 cell_count
    cell_count x { i32 pos, u32 n_seq_id, n_seq_id x i32 seq_id }

and of which no more is asked for. Rows are only used if all positions agree.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import read_state, share_ranges
from emberkeep.engine.llamacpp.kv_layout import HEAD_BYTES, Bytes, Layout, cell_count
from emberkeep.engine.llamacpp.live_context import SCRATCH, LiveContext
from emberkeep.engine.llamacpp.shared_library import llama, take_errors
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

Ints = npt.NDArray[np.intp]
_NAME_BYTES = 64
"""The name of an architecture is shorter."""
_COPY_S, _BYTE_S, _SHARE_S = 10e-6, 1e-10, 100e-6
"""What llama.cpp takes for a copy from a GPU, for each byte of it, and to let one sequence share a range."""
_MOST_BYTES = 512 << 20
_BLOCK = 1024


def read_mixed(
    context: LiveContext, layout: Layout, sequence: int, start: int, end: int, into: Bytes
) -> tuple[Bytes, Ints | None]:
    """The state of [start, end), in the memory of `into` if that is large enough; where it lies scattered, with
    rows of others, and then which rows are its own. Raises EngineError where that cannot be told."""
    mixed = _find_mixed(context, layout, sequence, start, end)
    spans = mixed.spans if mixed else [(sequence + 1, start, end)]
    with share_ranges(context.memory, SCRATCH, spans):
        state = read_state(context.handle, SCRATCH, into=into)
    if mixed is None:
        return state, None
    part, data = next(layout.parts(state, count := cell_count(state[HEAD_BYTES:])))
    if not np.array_equal(part.cells(data, count)[:, 0], mixed.positions):
        raise EngineError("llama.cpp does not tell whose its cells are")
    return state, mixed.own


class _Mixed(NamedTuple):
    """Cells to be read together."""

    spans: list[tuple[int, int, int]]
    """Sequences, from where to where."""
    positions: Ints
    own: Ints
    """Which of them were asked for, by position."""


def _find_mixed(context: LiveContext, layout: Layout, sequence: int, start: int, end: int) -> _Mixed | None:
    """None where [start, end) are read as quickly alone. Raises EngineError."""
    if context.cells.used == context.cells[sequence].end:
        return None
    copies_s = _COPY_S * sum(run.count for part in layout.ranges for run in part.runs)
    cell_s = _BYTE_S * layout.row_bytes
    owners = _read_owners(context.handle, context.cells.used, context.cells.entries)
    own = owners.cells_of(sequence + 1, start, end)
    together = _together(np.sort(own), int(copies_s / cell_s))
    spans = owners.spans(together)
    more_s = cell_s * (len(together) - len(own)) + _SHARE_S * (len(spans) - 1)
    is_quicker = more_s < copies_s * (_count_runs(own) - _count_runs(together))
    if not is_quicker or len(together) * layout.row_bytes > _MOST_BYTES:
        return None
    return _Mixed(spans, owners.positions[together], np.searchsorted(together, own))


def _together(own: Ints, most: int) -> Ints:
    """These cells, which are in order, and those between neighbours, where there are not more than so many."""
    gaps = np.diff(own, append=own[-1] + 1)
    gaps[gaps > max(most, 1)] = 1
    ends = np.cumsum(gaps)
    together: Ints = np.repeat(own - (ends - gaps), gaps) + np.arange(ends[-1])
    return together


def _count_runs(cells: Ints) -> int:
    return 1 + int((np.diff(np.sort(cells)) != 1).sum())


@dataclass(frozen=True, slots=True)
class _Owners:
    """Whose the cells in use are, as they lie."""

    positions: Ints
    ids: Ints
    """Sequences, each with one of the `cells`: a cell may have several."""
    cells: Ints

    def cells_of(self, sequence: int, start: int, end: int) -> Ints:
        """Those of [start, end), by position. Raises EngineError."""
        own = self.cells[self.ids == sequence]
        own = own[(self.positions[own] >= start) & (self.positions[own] < end)]
        own = np.asarray(own[np.argsort(self.positions[own], kind="stable")], np.intp)
        if not np.array_equal(self.positions[own], np.arange(start, end)):
            raise EngineError("llama.cpp has other cells than it should")
        return own

    def spans(self, cells: Ints) -> list[tuple[int, int, int]]:
        """The sequences that have these cells, and from where to where."""
        firsts = np.flatnonzero(np.diff(self.cells, prepend=-1))  # one sequence of each cell
        ids = self.ids[firsts][np.searchsorted(self.cells[firsts], cells)]
        found: list[tuple[int, int, int]] = []
        for sequence in np.unique(ids).tolist():
            places = np.sort(self.positions[cells[ids == sequence]])
            for part in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
                found.append((sequence, int(part[0]), int(part[-1]) + 1))
        return found


def _read_owners(context: Handle, used: int, entries: int) -> _Owners:
    """`used` cells, which sequences have `entries` times. Raises EngineError."""
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


def _take_apart(words: Ints, count: int) -> _Owners:
    """Cells with as many sequences as their neighbours are taken apart at once."""
    positions, ids, cells = [], [], []
    done = at = 0
    while done < count:
        each = int(words[at + 1]) if at + 1 < len(words) else 0
        most = min(count - done, _BLOCK, (len(words) - at) // (2 + each)) if each > 0 else 0
        if not most:
            raise EngineError("llama.cpp writes its cells in another way")
        table = words[at : at + most * (2 + each)].reshape(most, 2 + each)
        differs = table[:, 1] != each
        alike = int(differs.argmax()) if differs.any() else most
        table = table[:alike]
        positions.append(table[:, 0])
        ids.append(table[:, 2:].ravel())
        cells.append(np.repeat(np.arange(done, done + alike), each))
        done, at = done + alike, at + alike * (2 + each)
    return _Owners(np.concatenate(positions), np.concatenate(ids), np.concatenate(cells))
