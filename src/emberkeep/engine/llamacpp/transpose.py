"""State that was computed with flash attention for a context without it, and the other way round.

Both have the same parts in the same sizes, and differ in how V lies in them (see `kv_state`): it is moved about,
and no number changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from emberkeep.engine.llamacpp.kv_state import (
    EMPTY,
    HEAD_BYTES,
    Attention,
    Bytes,
    LayerTensor,
    Layout,
    cell_count,
)
from emberkeep.values import dataclass

_NUMBER_BYTES = {0: 4, 1: 2, 30: 2}
"""Of those of ggml's types whose numbers stand alone: f32, f16, bf16."""
_BLOCK = 64
"""Numbers of a row that are moved at once: more would displace each other from the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of one model's state, in the context as it is and in one with the other kind of attention."""

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
