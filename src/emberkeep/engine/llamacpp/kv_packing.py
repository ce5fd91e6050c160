"""Payloads of ranges with their rows packed, and everything else in them as llama.cpp wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Payload
from emberkeep.engine.llamacpp.kv_state import Bytes, Layout
from emberkeep.engine.llamacpp.transpose import Layouts
from emberkeep.engine.packing import BITS, Floats, Group, Packed, Streams, pack
from emberkeep.errors import EngineError


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
