"""How the state of a sequence lies in the bytes that llama.cpp writes: what is taken apart, put together and
checked here.

    u32 magic, u32 sequence               both constant: exports go through sequence 0
    attention parts                       by range: every layer that sees all tokens
    attention parts                       windows: layers that see the last tokens only
    recurrent part

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
    for each recurrent layer { i32 type, u64 row_bytes, cell_count x row_bytes } R, then for each S

A payload of a range is a state with nothing in the windows and the recurrent part, so that it can go back into
the library as it is. A payload of a snapshot is a state without the first parts. The windows' cells are those
that the last token saw: llama.cpp leaves out what is behind them.

llama.cpp trusts the sizes in a part: its skeleton (all but cells and rows) must be one that this context exported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Payload
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.unsignedinteger]
Chosen = slice | npt.NDArray[np.intp]
"""Which rows: neighbours, or those at these places."""
HEAD_BYTES = 8
"""A state begins with magic and sequence."""
PAIR = struct.Struct("<II")
TENSOR = struct.Struct("<iQ")
TRANSPOSED = struct.Struct("<iII")
RECURRENT_HEAD = struct.Struct("<III")
_RECURRENT_CELL = struct.Struct("<iI")
EMPTY = PAIR.pack(1, 0)
"""A part of attention layers without cells."""
_NUMBER_BYTES = {0: 4, 1: 2, 30: 2}
"""How many a number has, by those of ggml's types whose numbers stand alone: f32, f16, bf16."""
_BLOCK = 64
"""Numbers of a row that are moved at once: more would displace each other from the CPU's cache."""


def cell_count(part: Bytes) -> int:
    """The cells of the part of attention layers that `part` begins with; 0 when that is cut off."""
    return int(PAIR.unpack_from(part)[1]) if len(part) >= PAIR.size else 0


# ── the parts of a state: the `repr` of these classes is in the fingerprint ──


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """The keys or the values of one layer, in a part of any number of cells."""

    kind: int
    """One of ggml's types."""
    row_bytes: int
    """Bytes of one cell, which stand together unless it is transposed."""
    number_bytes: int | None = None
    """Bytes of one number, if it is transposed."""

    @property
    def head(self) -> bytes:
        if self.number_bytes is None:
            return TENSOR.pack(self.kind, self.row_bytes)
        return TRANSPOSED.pack(self.kind, self.number_bytes, self.row_bytes // self.number_bytes)

    def size(self, cells: int) -> int:
        return TENSOR.size + cells * self.row_bytes


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers one after the other whose rows have the same type and size."""

    is_key: bool
    tensor: LayerTensor
    count: int

    def rows(self, part: Bytes, begin: int, cells: int) -> Numbers:
        """A view into `part`, in which the first layer is at `begin`, by layer, cell and number; by layer, cell
        and byte where numbers do not stand alone."""
        row, each = self.tensor.row_bytes, self.tensor.number_bytes
        strides = (row, _NUMBER_BYTES.get(self.tensor.kind, 1)) if each is None else (each, cells * each)
        each = each or strides[1]
        shape = (self.count, cells, row // each)
        return np.ndarray(shape, f"<u{each}", part, begin + TENSOR.size, (self.tensor.size(cells), *strides))


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

    @cached_property
    def row_bytes(self) -> int:
        return sum(tensor.row_bytes for tensor in self.tensors)

    def size(self, cells: int) -> int:
        skeleton = 2 * PAIR.size + len(self.extra) + TENSOR.size * len(self.tensors)
        return skeleton + cells * (self.cell_bytes + self.row_bytes)

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        rows = ((index < self.layers, tensor) for index, tensor in enumerate(self.tensors))
        return tuple(LayerRun(is_key, tensor, len(list(same))) for (is_key, tensor), same in groupby(rows))

    def rows(self, part: Bytes, cells: int) -> Iterator[tuple[LayerRun, Numbers]]:
        """Views of the rows of each run in a part with `cells` cells."""
        offset = 2 * PAIR.size + len(self.extra) + cells * self.cell_bytes
        for run in self.runs:
            yield run, run.rows(part, offset, cells)
            offset += run.count * run.tensor.size(cells)

    def cells(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        """A view of what is said of each cell; its position comes first."""
        table = part[PAIR.size : PAIR.size + cells * self.cell_bytes]
        return table.view("<i4").reshape(cells, self.cell_bytes // 4)

    def check(self, part: Bytes, cells: int) -> npt.NDArray[np.int32]:
        """`part` has the size of one with `cells` cells: its positions, in the order of the rows. Raises
        EngineError unless it is one."""
        offsets, expected = self.skeleton(cells)
        if part[offsets].tobytes() != expected.tobytes():
            raise EngineError("A stored KV payload comes from another model layout.")
        table = self.cells(part, cells)
        if np.count_nonzero(table[:, 1] == 1) != cells:
            raise EngineError("A stored KV payload belongs to another number of sequences than one.")
        return table[:, 0]

    @cached_property
    def skeleton(self) -> Callable[[int], tuple[npt.NDArray[np.intp], Bytes]]:
        """Where the bytes of the skeleton stand in a part with so many cells, and what they are: found once per
        number of cells, so that the check of a chunk that is loaded is one comparison."""
        return lru_cache(maxsize=256)(self._find_skeleton)

    def _find_skeleton(self, cells: int) -> tuple[npt.NDArray[np.intp], Bytes]:
        pieces = [
            (PAIR.pack(1, cells), self.cell_bytes),
            (PAIR.pack(self.is_transposed, self.layers) + self.extra, 0),
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
        self, part: Bytes, cells: int, chosen: Chosen, target: Bytes, target_cells: int, at: slice
    ) -> None:
        """The `chosen` ones of the `cells` of `part` become those `at` some place of `target`."""
        self.cells(target, target_cells)[at] = self.cells(part, cells)[chosen]
        for (_, rows), (_, copied) in zip(self.rows(part, cells), self.rows(target, target_cells), strict=True):
            if isinstance(chosen, slice):
                copied[:, at] = rows[:, chosen]
                continue
            for layer, picked in zip(rows, copied, strict=True):
                picked[at] = layer[chosen]  # all layers at once take three times as long

    @cached_property
    def counterpart(self) -> Attention | None:
        """The same part with the other kind of attention: its V lies in the other way. None if V's numbers do not
        stand alone."""
        keys, values = self.tensors[: self.layers], self.tensors[self.layers :]
        if any(tensor.kind not in _NUMBER_BYTES for tensor in values):
            return None
        turned = (
            replace(tensor, number_bytes=None if self.is_transposed else _NUMBER_BYTES[tensor.kind])
            for tensor in values
        )
        return replace(self, tensors=(*keys, *turned), is_transposed=not self.is_transposed)

    def rearrange(self, part: Bytes, cells: int, source: Attention, other: Bytes) -> None:
        """Make `part` of `other`, which is a part of the counterpart `source`."""
        self.write_skeleton(part, cells)
        self.cells(part, cells)[:] = source.cells(other, cells)
        for (run, rows), (_, turned) in zip(source.rows(other, cells), self.rows(part, cells), strict=True):
            width = rows.shape[2] if run.is_key else _BLOCK
            for numbers, moved in zip(rows, turned, strict=True):
                for begin in range(0, rows.shape[2], width):
                    moved[:, begin : begin + width] = numbers[:, begin : begin + width]


@dataclass(frozen=True, slots=True)
class Recurrent:
    layers: int
    """All that the model has, recurrent or not."""
    tensors: tuple[tuple[int, int], ...]
    """Type and bytes of one row: one for each R layer, then one for each S layer."""

    @property
    def size(self) -> int:
        rows = sum(TENSOR.size + row for _, row in self.tensors)
        return RECURRENT_HEAD.size + _RECURRENT_CELL.size + rows

    def check(self, part: Bytes, position: int) -> None:
        """`part` has this size. Raises EngineError unless it is the state after `position` tokens."""
        count, last, sequences, transposed, layers = struct.unpack_from("<IiIII", part)
        if last != position - 1:
            raise EngineError("A stored snapshot was taken at another position than its place.")
        good = (count, sequences, transposed, layers) == (1, 0, 0, self.layers)
        offset = RECURRENT_HEAD.size + _RECURRENT_CELL.size
        for tensor in self.tensors:
            good = good and TENSOR.unpack_from(part, offset) == tensor
            offset += TENSOR.size + tensor[1]
        if not good:
            raise EngineError("A stored snapshot comes from another model layout.")


@dataclass(frozen=True)
class Layout:
    """How a context's state is taken apart. Its `repr` is part of the fingerprint, with those of its parts: other
    names in them would make stored state useless. What follows from a layout alone is found once: thousands of
    chunks may be taken apart and put together in a second.
    """

    head: bytes
    ranges: tuple[Attention, ...]
    windows: tuple[Attention, ...]
    window: int
    """Tokens that a layer with a window sees."""
    recurrent: Recurrent | None
    nothing: bytes
    """Windows and recurrent part without cells, as they stand at the end of a range."""

    @property
    def unit(self) -> KvUnit:
        if not self.windows and self.recurrent is None:
            return KvUnit.RANGE
        return KvUnit.BOTH if self.ranges else KvUnit.SNAPSHOT

    @cached_property
    def row_bytes(self) -> int:
        """Bytes by range of one token."""
        return sum(part.row_bytes for part in self.ranges)

    def range_bytes(self, cells: int) -> int:
        return HEAD_BYTES + sum(part.size(cells) for part in self.ranges) + len(self.nothing)

    def snapshot_bytes(self, cells: int) -> int:
        """With `cells` tokens in the windows."""
        recurrent = self.recurrent.size if self.recurrent else 0
        return HEAD_BYTES + sum(part.size(cells) for part in self.windows) + recurrent

    def parts(self, state: Bytes, cells: int) -> Iterator[tuple[Attention, Bytes]]:
        """Those of a range with `cells` cells, each with its bytes in `state`."""
        return _parts(self.ranges, state, cells)

    def rows(self, state: Bytes, cells: int) -> Iterator[tuple[LayerRun, Numbers]]:
        """Views of the rows of each run of layers, in a range with `cells` cells."""
        for part, data in self.parts(state, cells):
            yield from part.rows(data, cells)

    def split(self, state: Bytes, borders: Sequence[int]) -> list[Payload]:
        """The ranges between `borders` of a state that llama.cpp has just written for all of them; that one is
        used for a payload if it is one. Raises EngineError."""
        if len(borders) == 2 and not self.nothing and all(order is None for order in self._orders(state, borders)):
            return [memoryview(state)]
        return [cut() for cut in self.cuts(state, borders, lambda size: np.empty(size, np.uint8))]

    def cuts(
        self,
        state: Bytes,
        borders: Sequence[int],
        allocate: Callable[[int], Bytes],
        rows: npt.NDArray[np.intp] | None = None,
    ) -> list[Callable[[], Payload]]:
        """What makes the ranges between `borders`, by any threads while `state` stays as it is. `rows`: which of
        its rows they are, where it has others. llama.cpp writes rows as they lie in its cells; here they are by
        position. Raises EngineError."""
        cells = borders[-1] - borders[0] if rows is None else cell_count(state[HEAD_BYTES:])
        orders = list(self._orders(state, borders)) if rows is None else [rows] * len(self.ranges)

        def cut(start: int, end: int) -> Payload:
            payload, count = allocate(self.range_bytes(end - start)), end - start
            self._begin(payload, count)
            sources, targets = self.parts(state, cells), self.parts(payload, count)
            for order, (part, source), (_, target) in zip(orders, sources, targets, strict=True):
                chosen = slice(start, end) if order is None else order[start:end]
                part.copy_cells(source, cells, chosen, target, count, slice(0, count))
            return memoryview(payload)

        return [partial(cut, start - borders[0], end - borders[0]) for start, end in pairwise(borders)]

    def joining(self, states: Sequence[Bytes], into: Bytes) -> tuple[Bytes, list[Callable[[], None]]]:
        """One state, in the memory of `into`, of ranges that were checked and follow each other; it is whole when
        everything was called that comes with it, by any threads."""
        counts = [cell_count(state[HEAD_BYTES:]) for state in states]
        total = sum(counts)
        joined = into[: self.range_bytes(total)]
        self._begin(joined, total)

        def put(state: Bytes, cells: int, begin: int) -> None:
            for (part, source), (_, target) in zip(
                self.parts(state, cells), self.parts(joined, total), strict=True
            ):
                part.copy_cells(source, cells, slice(0, cells), target, total, slice(begin, begin + cells))

        begins = np.cumsum([0, *counts])[:-1].tolist()
        return joined, [partial(put, *each) for each in zip(states, counts, begins, strict=True)]

    def _begin(self, state: Bytes, cells: int) -> None:
        """Make `state` a range of which only cells and rows are missing."""
        state[:HEAD_BYTES] = np.frombuffer(self.head, np.uint8)
        for part, data in self.parts(state, cells):
            part.write_skeleton(data, cells)
        state[len(state) - len(self.nothing) :] = np.frombuffer(self.nothing, np.uint8)

    def _orders(self, state: Bytes, borders: Sequence[int]) -> Iterator[npt.NDArray[np.intp] | None]:
        """For each part which row is the first by position, the second, ...; None when they are in order. Raises
        EngineError."""
        start, cells = borders[0], borders[-1] - borders[0]
        for part, data in self.parts(state, cells):
            if cell_count(data) != cells:
                raise EngineError(f"llama.cpp exported another number of tokens than {cells} from {start} on.")
            positions = part.cells(data, cells)[:, 0]
            order = np.argsort(positions, kind="stable")
            if not np.array_equal(positions[order], np.arange(start, start + cells)):
                raise EngineError(f"llama.cpp exported other positions than {cells} from {start} on.")
            yield None if np.array_equal(order, np.arange(cells)) else order

    def begins(self, payload: Payload) -> bool:
        """Whether `payload` begins as llama.cpp writes a state; a packed one does not."""
        return bytes(payload[:HEAD_BYTES]) == self.head

    def check_range(self, payload: Payload, start: int) -> int:
        """Where `payload` ends, which must hold the positions `start ..` in order. Raises EngineError."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[HEAD_BYTES:])
        if not self.begins(payload) or len(state) != self.range_bytes(cells):
            raise EngineError("A stored KV payload has another size than its cell count says.")
        for part, data in self.parts(state, cells):
            if part.check(data, cells).tobytes() != _positions(start, cells):
                raise EngineError("A stored KV payload holds other positions than its chunk.")
        if bytes(state[len(state) - len(self.nothing) :]) != self.nothing:
            raise EngineError("A stored KV payload comes from another model layout.")
        return start + cells

    def check_snapshot(self, payload: Payload, position: int) -> None:
        """Raises EngineError unless `payload` is this context's state after `position` tokens."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[HEAD_BYTES:]) if self.windows else 0
        if not self.begins(payload) or len(state) != self.snapshot_bytes(cells):
            raise EngineError("A stored snapshot has another size than its model's state.")
        if position < 1 or (self.windows and not 0 < cells <= min(position, self.window)):
            raise EngineError("A stored snapshot holds another number of tokens than the model sees.")
        for part, data in _parts(self.windows, state, cells):
            if np.sort(part.check(data, cells)).tobytes() != _positions(position - cells, cells):
                raise EngineError("A stored snapshot was taken at another position than its place.")
        if self.recurrent:
            self.recurrent.check(state[len(state) - self.recurrent.size :], position)


def _parts(parts: Iterable[Attention], state: Bytes, cells: int) -> Iterator[tuple[Attention, Bytes]]:
    offset = HEAD_BYTES
    for part in parts:
        end = offset + part.size(cells)
        yield part, state[offset:end]
        offset = end


def _positions(start: int, count: int) -> bytes:
    """Small arrays are compared as bytes: in a third of numpy's time."""
    return np.arange(start, start + count, dtype="<i4").tobytes()


# ── the two kinds of attention ──


@dataclass(frozen=True, slots=True)
class Layouts:
    """How one model's state lies, in the context as it is and in one with the other kind of attention.

    Both have the same parts in the same sizes: V is moved about, and no number changes.
    """

    own: Layout
    other: Layout | None = None
    """None where there is to be no other."""

    def of(self, state: Bytes) -> Layout:
        """In which of both `state` says that it is. The state itself may be anything."""
        parts = self.own.ranges or self.own.windows
        if self.other is None or not parts:
            return self.own
        offset = HEAD_BYTES + len(EMPTY) + cell_count(state[HEAD_BYTES:]) * parts[0].cell_bytes
        is_transposed = bool(len(state) > offset and state[offset])
        return self.own if is_transposed == parts[0].is_transposed else self.other

    def rearrange(self, state: Bytes, *, is_snapshot: bool = False) -> Bytes:
        """`state`, all of it, a range or a snapshot, checked: as the own context would have written it."""
        source = self.of(state)
        if source is self.own:
            return state
        copy, offset = np.empty_like(state), HEAD_BYTES
        copy[:offset] = state[:offset]
        layouts = ((() if is_snapshot else each.ranges) + each.windows for each in (source, self.own))
        for theirs, ours in zip(*layouts, strict=True):
            cells = cell_count(state[offset:])
            end = offset + (ours.size(cells) if cells else len(EMPTY))
            if cells:
                ours.rearrange(copy[offset:end], cells, theirs, state[offset:end])
            else:
                copy[offset:end] = state[offset:end]
            offset = end
        copy[offset:] = state[offset:]
        return copy


def counterpart(layout: Layout) -> Layout | None:
    """What the layout must be with the other kind of attention; None if V's numbers do not stand alone."""
    ranges = [turned for part in layout.ranges if (turned := part.counterpart) is not None]
    windows = [turned for part in layout.windows if (turned := part.counterpart) is not None]
    is_whole = (len(ranges), len(windows)) == (len(layout.ranges), len(layout.windows))
    return replace(layout, ranges=tuple(ranges), windows=tuple(windows)) if is_whole else None
