"""The parts of a state that llama.cpp writes: what the layers of one kind have stored.

Numbers are little-endian. A part of attention layers, which is over after `cell_count` when that is 0:

    u32 n_stream = 1, u32 cell_count
    cell_count x { i32 pos, u32 n_seq_id = 1, [i32 x, i32 y, i32 token,] i32 seq_id }
    u32 v_trans, u32 n_layer [, 8 bytes since release 0.6]
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } K
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } V                           if v_trans is 0
    n_layer x { i32 type, u32 number_bytes, u32 width, width x cell_count x number_bytes } V  if it is 1

Cells have x, y and token where a token has several positions. V is transposed (for each of its numbers, that of
all cells) unless flash attention is on, and missing where K holds a latent of both. A part of recurrent layers,
whose whole past is one cell:

    u32 cell_count, cell_count x { i32 pos, u32 n_seq_id = 0 }
    u32 s_trans = 0, u32 n_layer of the model
    for each recurrent layer { i32 type, u64 row_bytes, cell_count x row_bytes } R
    for each recurrent layer { i32 type, u64 row_bytes, cell_count x row_bytes } S
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import groupby, product
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep.errors import EngineError
from emberkeep.values import dataclass

Bytes = npt.NDArray[np.uint8]
_TensorRow = tuple[int, int]
"""Type and bytes of one row, of recurrent layers."""
_Chosen = slice | npt.NDArray[np.intp]
_F16 = 1
_PAIR = struct.Struct("<II")
_TENSOR = struct.Struct("<iQ")
_TRANSPOSED = struct.Struct("<iII")
_RECURRENT_HEAD = struct.Struct("<III")
_RECURRENT_CELL = struct.Struct("<iI")
_CELL_BYTES = (12, 24)
_NUMBER_BYTES = (2, 4)
VARIANTS = tuple(product((True, False), (0, 8)))
"""Whether a part has values, and how many bytes stand between its head and its tensors."""
UNKNOWN = "llama.cpp exported a state in a layout this version does not know."
EMPTY = _PAIR.pack(1, 0)
"""A part of attention layers without cells."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """The keys or the values of one layer, in a part of any number of cells."""

    kind: int
    """One of ggml's types."""
    row_bytes: int
    """Bytes of one cell, which stand together unless it is transposed."""
    number_bytes: int | None = None
    """Bytes of one number, if it is transposed."""

    @classmethod
    def read(cls, part: Bytes, offset: int, *, is_transposed: bool) -> LayerTensor:
        """Raises struct.error."""
        if not is_transposed:
            return cls(*_TENSOR.unpack_from(part, offset))
        kind, number_bytes, width = _TRANSPOSED.unpack_from(part, offset)
        if number_bytes not in _NUMBER_BYTES:
            raise struct.error
        return cls(kind, number_bytes * width, number_bytes)

    @property
    def head(self) -> bytes:
        if self.number_bytes is None:
            return _TENSOR.pack(self.kind, self.row_bytes)
        return _TRANSPOSED.pack(self.kind, self.number_bytes, self.row_bytes // self.number_bytes)

    def rows(self, data: Bytes, cells: int) -> npt.NDArray[np.unsignedinteger]:
        """A view of `data` that is indexed by cell, however the tensor lies in it."""
        if self.number_bytes is None:
            return data.reshape(cells, self.row_bytes)
        numbers = data.view(f"<u{self.number_bytes}")
        return numbers.reshape(self.row_bytes // self.number_bytes, cells).T


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers one after the other whose rows have the same type and size."""

    is_key: bool
    tensor: LayerTensor
    count: int

    def stride(self, cells: int) -> int:
        """From one layer to the next, in a part with so many cells."""
        return _TENSOR.size + cells * self.tensor.row_bytes

    def rows(self, part: Bytes, begin: int, cells: int, first: int, count: int) -> npt.NDArray[Any]:
        """A view of `count` cells of every layer, from `first` on, in which the run's first row is at `begin`."""
        size, stride, each = self.tensor.row_bytes, self.stride(cells), self.tensor.number_bytes
        if each is None:
            return np.ndarray((self.count, count * size), np.uint8, part.data, begin + first * size, (stride, 1))
        shape, strides = (self.count, size // each, count), (stride, cells * each, each)
        return np.ndarray(shape, f"<u{each}", part.data, begin + first * each, strides)


@dataclass(frozen=True)
class Attention:
    cell_bytes: int
    layers: int
    tensors: tuple[LayerTensor, ...]
    """One for each K layer, then one for each V layer."""
    is_transposed: bool
    """Whether V is, or would be if there were any."""
    extra: bytes = b""
    """What stands between the head and the tensors."""

    @classmethod
    def read(cls, part: Bytes, cells: int, *, has_values: bool, extra: int) -> Attention | None:
        """What `part` begins with, if that can be a part with `cells` cells at positions 0 .."""
        if bytes(part[: _PAIR.size]) != _PAIR.pack(1, cells):
            return None
        positions = np.arange(cells, dtype=np.int32)
        for size in _CELL_BYTES:
            table = part[_PAIR.size :][: cells * size]
            if len(table) == cells * size and np.array_equal(_words(table.reshape(cells, size))[:, 0], positions):
                return cls._read_tensors(part, cells, size, has_values, extra)
        return None

    @classmethod
    def _read_tensors(
        cls, part: Bytes, cells: int, cell_bytes: int, has_values: bool, extra: int
    ) -> Attention | None:
        offset = _PAIR.size + cells * cell_bytes
        tensors: list[LayerTensor] = []
        try:
            transposed, layers = _PAIR.unpack_from(part, offset)
            begin, offset = offset + _PAIR.size, offset + _PAIR.size + extra
            while transposed < 2 and len(tensors) < layers * (1 + has_values):
                is_transposed = bool(transposed) and len(tensors) >= layers
                tensors.append(LayerTensor.read(part, offset, is_transposed=is_transposed))
                offset += _TENSOR.size + cells * tensors[-1].row_bytes
        except (struct.error, OverflowError):
            return None
        return cls(cell_bytes, layers, tuple(tensors), bool(transposed), bytes(part[begin : begin + extra]))

    @cached_property
    def row_bytes(self) -> int:
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def has_half_rows(self) -> bool:
        return all(tensor.kind == _F16 for tensor in self.tensors)

    def runs(self, cells: int) -> Iterator[tuple[int, LayerRun]]:
        """What the rows of a part with `cells` cells consist of, each with where its first row begins."""
        offset = 2 * _PAIR.size + len(self.extra) + cells * self.cell_bytes
        for run in self._runs:
            yield offset + _TENSOR.size, run
            offset += run.count * run.stride(cells)

    @cached_property
    def _runs(self) -> tuple[LayerRun, ...]:
        rows = ((index < self.layers, tensor) for index, tensor in enumerate(self.tensors))
        return tuple(LayerRun(is_key, tensor, len(list(same))) for (is_key, tensor), same in groupby(rows))

    def size(self, cells: int) -> int:
        skeleton = 2 * _PAIR.size + len(self.extra) + _TENSOR.size * len(self.tensors)
        return skeleton + cells * (self.cell_bytes + self.row_bytes)

    def value_bytes(self, cells: int) -> int:
        """Bytes of V, with what is said of it: the end of a part with `cells` cells."""
        return sum(_TENSOR.size + cells * tensor.row_bytes for tensor in self.tensors[self.layers :])

    def check(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        """`part` has the size of one with `cells` cells: its positions, in the order of the rows. Raises
        EngineError unless it is one."""
        offsets, expected = self.skeleton(cells)
        if not _are_equal(part[offsets], expected):
            raise EngineError("A stored KV payload comes from another model layout.")
        table = self._cells(part, cells)
        if np.count_nonzero(table[:, 1] == 1) != cells:
            raise EngineError("A stored KV payload belongs to another number of sequences than one.")
        return table[:, 0]

    def positions(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        """In the order of the rows."""
        return self._cells(part, cells)[:, 0]

    def renumber(self, part: Bytes, cells: int, start: int) -> None:
        """In place."""
        table = part[_PAIR.size : _PAIR.size + cells * self.cell_bytes].reshape(cells, self.cell_bytes)
        table[:, :4] = np.arange(start, start + cells, dtype="<i4").view(np.uint8).reshape(cells, 4)

    @cached_property
    def skeleton(self) -> Callable[[int], tuple[npt.NDArray[np.intp], Bytes]]:
        """Where the bytes of the skeleton stand in a part with so many cells, and what they are.

        Found once per number of cells: the check of every chunk that is loaded is then one comparison.
        """
        return lru_cache(maxsize=256)(self._find_skeleton)

    def _find_skeleton(self, cells: int) -> tuple[npt.NDArray[np.intp], Bytes]:
        pieces = [
            (_PAIR.pack(1, cells), self.cell_bytes),
            (_PAIR.pack(self.is_transposed, self.layers) + self.extra, 0),
            *((tensor.head, tensor.row_bytes) for tensor in self.tensors),
        ]
        offsets, offset = [], 0
        for piece, row in pieces:
            offsets.append(np.arange(offset, offset + len(piece)))
            offset += len(piece) + cells * row
        return np.concatenate(offsets), np.frombuffer(b"".join(piece for piece, _ in pieces), np.uint8)

    def write_skeleton(self, part: Bytes, cells: int) -> None:
        offsets, skeleton = self.skeleton(cells)
        part[offsets] = skeleton

    def copy_cells(
        self, part: Bytes, cells: int, first: int, target: Bytes, target_cells: int, at: int, count: int
    ) -> None:
        """`count` cells of `part`, from `first` on, to `target`, from `at` on."""
        size = self.cell_bytes
        table, to = part[_PAIR.size :], target[_PAIR.size :]
        to[at * size : (at + count) * size] = table[first * size : (first + count) * size]
        for (begin, run), (target_begin, _) in zip(self.runs(cells), self.runs(target_cells), strict=True):
            taken = run.rows(target, target_begin, target_cells, at, count)
            taken[:] = run.rows(part, begin, cells, first, count)

    def pick(self, part: Bytes, cells: int, chosen: _Chosen, target: Bytes, count: int) -> None:
        """Make `target` a part with only the `count` `chosen` rows of `part`, which has `cells`."""
        if isinstance(chosen, slice):
            self.write_skeleton(target, count)
            self.copy_cells(part, cells, chosen.start, target, count, 0, count)
            return
        for (skeleton, rows), (to, picked) in zip(
            self._blocks(part, cells), self._blocks(target, count), strict=True
        ):
            to[:] = skeleton
            picked[:] = rows[chosen]
        target[: _PAIR.size] = np.frombuffer(_PAIR.pack(1, count), np.uint8)

    def _cells(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        table = part[_PAIR.size : _PAIR.size + cells * self.cell_bytes]
        return _words(table.reshape(cells, self.cell_bytes))

    def _blocks(self, part: Bytes, cells: int) -> Iterator[tuple[Bytes, npt.NDArray[np.unsignedinteger]]]:
        """A piece of the skeleton and the rows behind it, one after the other."""
        cell = LayerTensor(0, self.cell_bytes)
        nothing = LayerTensor(0, 0)
        offset = 0
        for skeleton, tensor in (
            (_PAIR.size, cell),
            (_PAIR.size + len(self.extra), nothing),
            *((_TENSOR.size, tensor) for tensor in self.tensors),
        ):
            begin = offset + skeleton
            end = begin + cells * tensor.row_bytes
            yield part[offset:begin], tensor.rows(part[begin:end], cells)
            offset = end


@dataclass(frozen=True, slots=True)
class Recurrent:
    layers: int
    """Of the model, recurrent or not."""
    tensors: tuple[_TensorRow, ...]
    """One for each R layer, then one for each S layer."""

    @classmethod
    def read(cls, part: Bytes) -> Recurrent:
        """From a part without cells. Raises EngineError."""
        head, tensors = part[: _RECURRENT_HEAD.size], part[_RECURRENT_HEAD.size :]
        if len(head) < _RECURRENT_HEAD.size or len(tensors) % _TENSOR.size:
            raise EngineError(UNKNOWN)
        cells, transposed, layers = _RECURRENT_HEAD.unpack(head)
        if cells or transposed:
            raise EngineError(UNKNOWN)
        return cls(layers, tuple(_TENSOR.iter_unpack(tensors)))

    @property
    def size(self) -> int:
        rows = sum(_TENSOR.size + row for _, row in self.tensors)
        return _RECURRENT_HEAD.size + _RECURRENT_CELL.size + rows

    def check(self, part: Bytes, position: int) -> None:
        """`part` has this size. Raises EngineError unless it is the state after `position` tokens."""
        count, last, sequences, transposed, layers = struct.unpack_from("<IiIII", part)
        if last != position - 1:
            raise EngineError("A stored snapshot was taken at another position than its place.")
        good = (count, sequences, transposed, layers) == (1, 0, 0, self.layers)
        offset = _RECURRENT_HEAD.size + _RECURRENT_CELL.size
        for tensor in self.tensors:
            good = good and _TENSOR.unpack_from(part, offset) == tensor
            offset += _TENSOR.size + tensor[1]
        if not good:
            raise EngineError("A stored snapshot comes from another model layout.")


def cell_count(part: Bytes) -> int:
    """The cells of the part of attention layers that `part` begins with; 0 when that is cut off."""
    return int(_PAIR.unpack_from(part)[1]) if len(part) >= _PAIR.size else 0


def _positions(start: int, count: int) -> npt.NDArray[np.int32]:
    return np.arange(start, start + count, dtype="<i4")


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """For small arrays of one type: in a third of numpy's time."""
    return one.tobytes() == other.tobytes()


def _words(table: Bytes) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(table).view("<i4")
