"""State in other forms than the one that a context writes: as it lies with the other kind of attention, and
packed.

With flash attention and without, a state has the same parts in the same sizes; they differ in how V lies in
them (see `kv_parts`): it is moved about, and no number changes. A packed payload has its rows in fewer bits,
and everything else as llama.cpp wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Payload
from emberkeep.engine.llamacpp.kv_parts import EMPTY, Attention, Bytes, LayerTensor, cell_count
from emberkeep.engine.llamacpp.kv_state import HEAD_BYTES, Layout
from emberkeep.engine.packing import BITS, Floats, Group, Packed, Streams, pack
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

_NUMBER_BYTES = {0: 4, 1: 2, 30: 2}
"""Of those of ggml's types whose numbers stand alone: f32, f16, bf16."""
_BLOCK = 64
"""Numbers of a row that are moved at once: more would displace each other from the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How one model's state lies, in the context as it is and in one with the other kind of attention."""

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

    def rearrange(self, state: Bytes) -> Bytes:
        """`state`, all of it or a range, which was checked: as the own context would have written it."""
        return self._rearrange(state, ((*layout.ranges, *layout.windows) for layout in (self.of(state), self.own)))

    def rearrange_snapshot(self, state: Bytes) -> Bytes:
        return self._rearrange(state, (layout.windows for layout in (self.of(state), self.own)))

    def _rearrange(self, state: Bytes, parts: Iterator[tuple[Attention, ...]]) -> Bytes:
        if self.of(state) is self.own:
            return state
        copy, copied, offset = np.empty_like(state), 0, HEAD_BYTES
        for source, target in zip(*parts, strict=True):
            cells = cell_count(state[offset:])
            end = offset + (source.size(cells) if cells else len(EMPTY))
            if cells:
                values = end - source.value_bytes(cells)
                copy[copied:values] = state[copied:values]
                _rearrange_part(source, state[offset:end], target, copy[offset:end], cells)
                copied = end
            offset = end
        copy[copied:] = state[copied:]
        return copy


def counterpart(layout: Layout) -> Layout | None:
    """What the layout must be with the other kind of attention; None if V's numbers do not stand alone."""
    parts = (*layout.ranges, *layout.windows)
    if not all(tensor.kind in _NUMBER_BYTES for part in parts for tensor in part.tensors[part.layers :]):
        return None
    return replace(
        layout,
        ranges=tuple(_flipped(part) for part in layout.ranges),
        windows=tuple(_flipped(part) for part in layout.windows),
    )


def _flipped(part: Attention) -> Attention:
    values = (
        replace(tensor, number_bytes=None if part.is_transposed else _NUMBER_BYTES[tensor.kind])
        for tensor in part.tensors[part.layers :]
    )
    tensors = (*part.tensors[: part.layers], *values)
    return replace(part, tensors=tensors, is_transposed=not part.is_transposed)


def _rearrange_part(source: Attention, state: Bytes, target: Attention, copy: Bytes, cells: int) -> None:
    """`copy` is one of `state` but for V: it becomes what `target` says."""
    offsets, said = target.skeleton(cells)
    copy[offsets] = said
    values = zip(_values(source, state, cells), _values(target, copy, cells), strict=True)
    for numbers, rearranged in values:
        for begin in range(0, numbers.shape[1], _BLOCK):
            rearranged[:, begin : begin + _BLOCK] = numbers[:, begin : begin + _BLOCK]


def _values(part: Attention, state: Bytes, cells: int) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """A view of each layer's V, by cell and number."""
    for begin, run in part.runs(cells):
        if not run.is_key:
            for layer in range(run.count):
                offset = begin + layer * run.stride(cells)
                yield _numbers(run.tensor, state[offset : offset + cells * run.tensor.row_bytes], cells)


def _numbers(tensor: LayerTensor, data: Bytes, cells: int) -> npt.NDArray[np.unsignedinteger]:
    numbers = data.view(f"<u{_NUMBER_BYTES[tensor.kind]}")
    return numbers.reshape(cells, -1) if tensor.number_bytes is None else numbers.reshape(-1, cells).T


def packs(layout: Layout | None) -> frozenset[int]:
    """Bits in which the rows of this layout can be packed; 16 is as they are."""
    streams = list(_streams(layout)) if layout and layout.has_half_rows else []
    return frozenset({16, *(bits for bits in BITS if streams and all(each.packs(bits) for each in streams))})


def pack_range(layout: Layout, payload: Payload, cells: int, bits: int) -> Payload:
    """`payload` was exported just now, with `cells` cells. Raises EngineError."""
    state = np.frombuffer(payload, np.uint8)
    rows = zip(_streams(layout), _rows(layout, state, cells), strict=True)
    return pack([Group(streams, array) for streams, array in rows], bits, state[_beside_rows(layout, cells)])


def unpack_range(layouts: Layouts, payload: Payload) -> Payload:
    """As llama.cpp wrote it; only the rows' sizes have been checked. Raises EngineError."""
    layout = layouts.own
    packed = Packed(payload, tuple(_streams(layout)))
    beside = _beside_rows(layout, packed.tokens)
    if len(beside) != len(packed.rest):
        raise EngineError("A stored KV payload has another size than its cell count says.")
    state = np.empty(layout.range_bytes(packed.tokens), np.uint8)
    state[beside] = packed.rest
    packed.unpack(list(_rows(layouts.of(state), state, packed.tokens)))
    return memoryview(state)


def _streams(layout: Layout) -> Iterator[Streams]:
    for _, run in layout.runs(0):
        yield Streams(run.is_key, run.tensor.row_bytes // 2, run.count)


def _rows(layout: Layout, state: Bytes, cells: int) -> Iterator[Floats]:
    """Views into `state`, one for each of `_streams`."""
    for offset, run in layout.runs(cells):
        shape = (run.count, cells, run.tensor.row_bytes // 2)
        strides = (2, 2 * cells) if run.tensor.number_bytes else (run.tensor.row_bytes, 2)
        yield np.ndarray(shape, "<f2", state, offset, (run.stride(cells), *strides))


@lru_cache(maxsize=16)
def _beside_rows(layout: Layout, cells: int) -> npt.NDArray[np.intp]:
    """Where the bytes are that belong to no row."""
    mask = np.ones(layout.range_bytes(cells), np.uint8)
    for rows in _rows(layout, mask, cells):
        rows[:] = 0
    return np.flatnonzero(mask)
