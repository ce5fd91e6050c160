"""The parts that llama.cpp's state of one sequence is made of.

Numbers are little-endian. A part of attention layers, which is over after `cell_count` when that is 0:

    u32 n_stream = 1, u32 cell_count
    cell_count x { i32 pos, u32 n_seq_id = 1, [i32 x, i32 y, i32 token,] i32 seq_id }
    u32 v_trans = 0, u32 n_layer [, 8 bytes since release 0.6]
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } K
    n_layer x { i32 type, u64 row_bytes, cell_count x row_bytes } V

Cells have x, y and token where a token has several positions. V is in rows because flash attention is on, and
missing where K holds a latent of both. A part of recurrent layers, whose whole past is one cell:

    u32 cell_count, cell_count x { i32 pos, u32 n_seq_id = 0 }
    u32 s_trans = 0, u32 n_layer of the model
    for each recurrent layer { i32 type, u64 row_bytes, cell_count x row_bytes } R
    for each recurrent layer { i32 type, u64 row_bytes, cell_count x row_bytes } S

llama.cpp trusts the sizes in a part, so one is only passed on when its skeleton (everything but cells and rows)
is that of a part which this very context exported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product

import numpy as np
import numpy.typing as npt

from emberkeep.errors import EngineError

Bytes = npt.NDArray[np.uint8]
Tensor = tuple[int, int]
"""Type and bytes of one row."""

Rows = slice | npt.NDArray[np.intp]

_F16 = 1
_PAIR = struct.Struct("<II")
_TENSOR = struct.Struct("<iQ")
_RECURRENT_HEAD = struct.Struct("<III")
_RECURRENT_CELL = struct.Struct("<iI")
_CELL_BYTES = (12, 24)
VARIANTS = tuple(product((True, False), (0, 8)))
"""Whether a part has values, and how many bytes stand between its head and its tensors."""

UNKNOWN = "llama.cpp exported a state in a layout this version does not know."
EMPTY = _PAIR.pack(1, 0)
"""A part of attention layers without cells."""


@dataclass(frozen=True, slots=True)
class Run:
    """Layers one after the other whose rows have the same type and size."""

    is_key: bool
    kind: int
    """Of ggml's types."""
    row_bytes: int
    count: int

    def stride(self, cells: int) -> int:
        """From the rows of one layer to those of the next, in a part with so many cells."""
        return _TENSOR.size + cells * self.row_bytes


@dataclass(frozen=True, slots=True)
class Attention:
    cell_bytes: int
    layers: int
    tensors: tuple[Tensor, ...]
    """Of each K layer, then of each V layer."""
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
        tensors: list[Tensor] = []
        try:
            _, layers = _PAIR.unpack_from(part, offset)
            begin, offset = offset + _PAIR.size, offset + _PAIR.size + extra
            while len(tensors) < layers * (1 + has_values):
                tensors.append(_TENSOR.unpack_from(part, offset))
                offset += _TENSOR.size + cells * tensors[-1][1]
        except (struct.error, OverflowError):
            return None
        return cls(cell_bytes, layers, tuple(tensors), bytes(part[begin : begin + extra]))

    @property
    def row_bytes(self) -> int:
        return sum(size for _, size in self.tensors)

    @property
    def has_half_rows(self) -> bool:
        return all(kind == _F16 for kind, _ in self.tensors)

    def runs(self, cells: int) -> Iterator[tuple[int, Run]]:
        """What the rows of a part with `cells` cells consist of, each with where its first row begins."""
        offset = 2 * _PAIR.size + len(self.extra) + cells * self.cell_bytes
        rows = ((index < self.layers, *tensor) for index, tensor in enumerate(self.tensors))
        for (is_key, kind, row), same in groupby(rows):
            run = Run(is_key, kind, row, len(list(same)))
            yield offset + _TENSOR.size, run
            offset += run.count * run.stride(cells)

    def size(self, cells: int) -> int:
        skeleton = 2 * _PAIR.size + len(self.extra) + _TENSOR.size * len(self.tensors)
        return skeleton + cells * (self.cell_bytes + self.row_bytes)

    def check(self, part: Bytes, cells: int) -> None:
        """`part` has the size of one with `cells` cells. Raises EngineError unless it is one."""
        places, expected = _skeleton(self, cells)
        if not np.array_equal(part[places], expected):
            raise EngineError("A stored KV payload comes from another model layout.")
        if not (self._cells(part, cells)[:, 1] == 1).all():
            raise EngineError("A stored KV payload belongs to another number of sequences than one.")

    def positions(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        """In the order of the rows."""
        return self._cells(part, cells)[:, 0]

    def pick(self, part: Bytes, cells: int, chosen: Rows, target: Bytes, count: int) -> None:
        """Make `target` a part with only the `count` `chosen` rows of `part`, which has `cells`."""
        for (skeleton, rows), (to, picked) in zip(
            self._blocks(part, cells), self._blocks(target, count), strict=True
        ):
            to[:] = skeleton
            picked[:] = rows[chosen]
        target[: _PAIR.size] = np.frombuffer(_PAIR.pack(1, count), np.uint8)

    def _cells(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        table = part[_PAIR.size : _PAIR.size + cells * self.cell_bytes]
        return _words(table.reshape(cells, self.cell_bytes))

    def _blocks(self, part: Bytes, cells: int) -> Iterator[tuple[Bytes, Bytes]]:
        """A piece of the skeleton and the rows behind it, one after the other."""
        offset = 0
        for skeleton, row in (
            (_PAIR.size, self.cell_bytes),
            (_PAIR.size + len(self.extra), 0),
            *((_TENSOR.size, row) for _, row in self.tensors),
        ):
            begin = offset + skeleton
            end = begin + cells * row
            yield part[offset:begin], part[begin:end].reshape(cells, row)
            offset = end


@lru_cache(maxsize=256)
def _skeleton(attention: Attention, cells: int) -> tuple[npt.NDArray[np.intp], Bytes]:
    """Where the bytes of the skeleton stand in a part with so many cells, and what they are.

    Found once per number of cells: the check of every chunk that is loaded is then one comparison.
    """
    pieces = [
        (_PAIR.pack(1, cells), attention.cell_bytes),
        (_PAIR.pack(0, attention.layers) + attention.extra, 0),
        *((_TENSOR.pack(*tensor), tensor[1]) for tensor in attention.tensors),
    ]
    places, offset = [], 0
    for piece, row in pieces:
        places.append(np.arange(offset, offset + len(piece)))
        offset += len(piece) + cells * row
    return np.concatenate(places), np.frombuffer(b"".join(piece for piece, _ in pieces), np.uint8)


@dataclass(frozen=True, slots=True)
class Recurrent:
    layers: int
    """Of the model, recurrent or not."""
    tensors: tuple[Tensor, ...]
    """Of each R layer, then of each S layer."""

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
    """Of the part of attention layers that `part` begins with; 0 when that is cut off."""
    return int(_PAIR.unpack_from(part)[1]) if len(part) >= _PAIR.size else 0


def _words(table: Bytes) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(table).view("<i4")
