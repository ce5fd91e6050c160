"""The layout of llama.cpp's sequence state, checked before the library sees a stored byte.

    u32 magic, u32 sequence                                       both constant: exports go through sequence 0
    u32 n_stream = 1, u32 cell_count
    cell_count x { i32 pos, u32 n_seq_id, n_seq_id x i32 }        n_seq_id is 0 or 1 in an export of one sequence
    u32 v_trans, u32 n_layer
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } K
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } V, rows again because flash attention is on

llama.cpp trusts the sizes in a blob, so a payload is only passed on when its skeleton equals that of a
blob this very context exported (its `Shape`) and its positions are the ones asked for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberkeep.errors import EngineError

_HEAD = struct.Struct("<II")
_TENSOR = struct.Struct("<iQ")
_CELLS_AT = 2 * _HEAD.size


@dataclass(frozen=True, slots=True)
class Shape:
    """What every blob of one context has in common."""

    head: bytes
    cell_bytes: int
    v_trans: int
    tensors: tuple[tuple[int, int], ...]
    """(type, row bytes) of each K layer, then of each V layer."""

    @property
    def row_bytes(self) -> int:
        return sum(size for _, size in self.tensors)

    def blob_bytes(self, cells: int) -> int:
        skeleton = _CELLS_AT + _HEAD.size + _TENSOR.size * len(self.tensors)
        return skeleton + cells * (self.cell_bytes + self.row_bytes)


def read_shape(blob: memoryview) -> Shape:
    """The shape of a blob that llama.cpp has just written (and that is therefore trusted)."""
    n_stream, cells = _HEAD.unpack_from(blob, _HEAD.size)
    if n_stream != 1 or cells == 0:
        raise EngineError("llama.cpp exported a KV state in a layout this version does not know.")
    cell_bytes = 8 + 4 * struct.unpack_from("<I", blob, _CELLS_AT + 4)[0]
    offset = _CELLS_AT + cells * cell_bytes
    v_trans, layers = _HEAD.unpack_from(blob, offset)
    offset += _HEAD.size
    tensors = []
    for _ in range(2 * layers):
        kind, row = _TENSOR.unpack_from(blob, offset)
        tensors.append((kind, row))
        offset += _TENSOR.size + cells * row
    if offset != len(blob) or v_trans:
        raise EngineError("llama.cpp exported a KV state in a layout this version does not know.")
    return Shape(bytes(blob[: _HEAD.size]), cell_bytes, v_trans, tuple(tensors))


def in_order(blob: memoryview, shape: Shape) -> memoryview:
    """A blob that llama.cpp has just written, its rows by position: it writes them as they lie in its cells."""
    _, cells = _HEAD.unpack_from(blob, _HEAD.size)
    order = np.argsort(_cell_table(blob, shape, cells)[:, 0], kind="stable")
    if np.array_equal(order, np.arange(cells)):
        return blob
    data = np.frombuffer(blob, np.uint8).copy()
    offset = _CELLS_AT
    for skipped, row in (
        (0, shape.cell_bytes),
        (_HEAD.size, 0),
        *((_TENSOR.size, row) for _, row in shape.tensors),
    ):
        offset += skipped
        rows = data[offset : offset + cells * row].reshape(cells, row)
        rows[:] = rows[order]
        offset += cells * row
    return memoryview(data)


def check_blob(blob: memoryview, shape: Shape, start: int) -> int:
    """The number of cells in `blob`, which must hold positions `start ..` in order. Raises EngineError."""
    if len(blob) < _CELLS_AT:
        raise EngineError("A stored KV payload is too short.")
    n_stream, cells = _HEAD.unpack_from(blob, _HEAD.size)
    if n_stream != 1 or blob[: _HEAD.size] != shape.head or len(blob) != shape.blob_bytes(cells):
        raise EngineError("A stored KV payload has another size than its cell count says.")
    _check_cells(blob, shape, cells, start)
    offset = _CELLS_AT + cells * shape.cell_bytes
    if _HEAD.unpack_from(blob, offset) != (shape.v_trans, len(shape.tensors) // 2):
        raise EngineError("A stored KV payload comes from another model layout.")
    offset += _HEAD.size
    for tensor in shape.tensors:
        if _TENSOR.unpack_from(blob, offset) != tensor:
            raise EngineError("A stored KV payload comes from another model layout.")
        offset += _TENSOR.size + cells * tensor[1]
    return int(cells)


def _check_cells(blob: memoryview, shape: Shape, cells: int, start: int) -> None:
    table = _cell_table(blob, shape, cells)
    consecutive = np.array_equal(table[:, 0], np.arange(start, start + cells, dtype=np.int32))
    if not consecutive or not (table[:, 1] == (shape.cell_bytes - 8) // 4).all():
        raise EngineError("A stored KV payload holds other positions than its chunk.")


def _cell_table(blob: memoryview, shape: Shape, cells: int) -> npt.NDArray[np.int32]:
    words = np.frombuffer(blob, dtype="<i4", count=cells * shape.cell_bytes // 4, offset=_CELLS_AT)
    return words.reshape(cells, shape.cell_bytes // 4)
