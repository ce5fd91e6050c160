"""The state of single sequences of a llama.cpp context as bytes, in and out.

    u32 magic, u32 sequence               both constant: exports go through sequence 0
    attention parts                       by range: every layer that sees all tokens
    attention parts                       windows: layers that see the last tokens only
    recurrent part                        see `kv_parts` for the bytes of each

A payload of a range is a state with nothing in the windows and the recurrent part, so that it can go back into
the library as it is. A payload of a snapshot is a state without the first parts. The windows' cells are those
that the last token saw: llama.cpp leaves out what is behind them.

llama.cpp trusts the sizes in a part, so one is only passed on when its skeleton (everything but cells and rows)
is that of a part which this very context exported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Payload
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.kv_parts import (
    Attention,
    Bytes,
    LayerRun,
    Recurrent,
    _are_equal,
    _positions,
    cell_count,
)
from emberkeep.engine.llamacpp.shared_library import llama, take_errors
from emberkeep.engine.payload_memory import PayloadMemory
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

Order = npt.NDArray[np.intp] | None
"""Which row is the first by position, the second, ...; None when they are in order."""
HEAD_BYTES = 8
"""Of a state: magic and sequence."""
PROBE = 2
"""Tokens of the sequence that a layout is learned from."""
WHOLE = 0
PARTIAL = 1
"""Without what can be taken apart by range."""


def read_state(context: Handle, sequence: int, flags: int = WHOLE, into: Bytes | None = None) -> Bytes:
    """A copy, in the memory of `into` if that is large enough. Raises EngineError."""
    size = llama().llama_state_seq_get_size_ext(context, sequence, flags)
    state = np.empty(size, np.uint8) if into is None or len(into) < size else into[:size]
    written = llama().llama_state_seq_get_data_ext(context, _bytes_pointer(state), size, sequence, flags)
    if written != size:
        raise EngineError(f"llama.cpp exported {written} bytes instead of {size}.")
    return state


def write_state(context: Handle, sequence: int, state: Bytes, flags: int = WHOLE) -> bool:
    """Replace a sequence's state. False when there is no room: what was to be replaced is then gone.

    llama.cpp trusts the bytes: they must have been checked.
    """
    read = llama().llama_state_seq_set_data_ext(context, _bytes_pointer(state), len(state), sequence, flags)
    if read == 0:
        take_errors()
    return bool(read)


@contextmanager
def share_range(memory: Handle, source: int, target: int, start: int, end: int) -> Iterator[None]:
    """Inside of it the empty sequence `target` shares [start, end) of `source`. No bytes are copied."""
    llama().llama_memory_seq_cp(memory, source, target, start, end)
    try:
        yield
    finally:
        llama().llama_memory_seq_rm(memory, target, -1, -1)


def _bytes_pointer(state: Bytes) -> object:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@dataclass(frozen=True)
class Layout:
    """How a context's state is taken apart. Its `repr` is part of the fingerprint, with `Attention`'s and
    `Recurrent`'s: other names in them would make stored state useless.

    What follows from a layout alone is found once: thousands of chunks may be taken apart and put together in a
    second.
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

    @property
    def empty_snapshot(self) -> Bytes:
        return np.frombuffer(self.head + self.nothing, np.uint8)

    def range_bytes(self, cells: int) -> int:
        return HEAD_BYTES + sum(part.size(cells) for part in self.ranges) + len(self.nothing)

    def snapshot_bytes(self, cells: int) -> int:
        """With `cells` tokens in the windows."""
        recurrent = self.recurrent.size if self.recurrent else 0
        return HEAD_BYTES + sum(part.size(cells) for part in self.windows) + recurrent

    @property
    def has_half_rows(self) -> bool:
        """Whether there are ranges, and every row in them is in 16 bits."""
        return bool(self.ranges) and all(part.has_half_rows for part in self.ranges)

    def runs(self, cells: int) -> Iterator[tuple[int, LayerRun]]:
        """The runs of a range with `cells` cells, each with where its first row begins."""
        offset = HEAD_BYTES
        for part in self.ranges:
            yield from ((offset + begin, run) for begin, run in part.runs(cells))
            offset += part.size(cells)

    def split(self, state: Bytes, borders: Sequence[int]) -> list[Payload]:
        """The ranges between `borders` of a state that llama.cpp has just written for all of them.

        llama.cpp writes rows as they lie in its cells; here they are by position. Raises EngineError.
        """
        begin, cells = borders[0], borders[-1] - borders[0]
        orders = self._orders(state, begin, cells)
        if len(borders) == 2 and not self.nothing and all(order is None for order in orders):
            return [memoryview(state)]
        return [pick() for pick in self._picks(state, cells, orders, borders, _new)]

    def splitting(
        self, state: Bytes, borders: Sequence[int], memory: PayloadMemory
    ) -> list[Callable[[], Payload]]:
        """What `split` does, left to be done by any threads while `state` stays as it is. Raises EngineError."""
        cells = borders[-1] - borders[0]
        return self._picks(state, cells, self._orders(state, borders[0], cells), borders, memory.take)

    def joining(self, states: Sequence[Bytes], into: Bytes) -> tuple[Bytes, list[Callable[[], None]]]:
        """One state, in the memory of `into`, of ranges that were checked and follow each other; it is whole when
        everything was called that comes with it, by any threads."""
        counts = [cell_count(state[HEAD_BYTES:]) for state in states]
        total = sum(counts)
        joined = into[: self.range_bytes(total)]
        joined[:HEAD_BYTES] = np.frombuffer(self.head, np.uint8)
        joined[len(joined) - len(self.nothing) :] = np.frombuffer(self.nothing, np.uint8)
        to = HEAD_BYTES
        for part in self.ranges:
            part.write_skeleton(joined[to:], total)
            to += part.size(total)
        begins = np.cumsum([0, *counts])[:-1].tolist()
        puts = zip(states, counts, begins, strict=True)
        return joined, [partial(self._put, state, count, joined, total, at) for state, count, at in puts]

    def _put(self, state: Bytes, cells: int, joined: Bytes, total: int, at: int) -> None:
        offset = to = HEAD_BYTES
        for part in self.ranges:
            part.copy_cells(state[offset:], cells, 0, joined[to:], total, at, cells)
            offset += part.size(cells)
            to += part.size(total)

    def _picks(
        self,
        state: Bytes,
        cells: int,
        orders: list[Order],
        borders: Sequence[int],
        allocate: Callable[[int], Bytes],
    ) -> list[Callable[[], Payload]]:
        ranges = ((start - borders[0], end - borders[0]) for start, end in pairwise(borders))
        return [partial(self._pick, state, cells, orders, start, end, allocate) for start, end in ranges]

    def renumbered(self, state: Bytes, start: int) -> Bytes:
        """A copy of the state of a range whose positions begin at `start`; nothing in it is rotated."""
        cells, offset, copy = cell_count(state[HEAD_BYTES:]), HEAD_BYTES, state.copy()
        for part in self.ranges:
            part.renumber(copy[offset:], cells, start)
            offset += part.size(cells)
        return copy

    def begins(self, payload: Payload) -> bool:
        """Whether `payload` begins as llama.cpp writes a state; a packed one does not."""
        return bytes(payload[:HEAD_BYTES]) == self.head

    def check_range(self, payload: Payload, start: int) -> int:
        """Where `payload` ends, which must hold the positions `start ..` in order. Raises EngineError."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[HEAD_BYTES:])
        if bytes(state[:HEAD_BYTES]) != self.head or len(state) != self.range_bytes(cells):
            raise EngineError("A stored KV payload has another size than its cell count says.")
        offset = HEAD_BYTES
        for part in self.ranges:
            if not _are_equal(part.check(state[offset:], cells), _positions(start, cells)):
                raise EngineError("A stored KV payload holds other positions than its chunk.")
            offset += part.size(cells)
        if bytes(state[offset:]) != self.nothing:
            raise EngineError("A stored KV payload comes from another model layout.")
        return start + cells

    def check_snapshot(self, payload: Payload, position: int) -> None:
        """Raises EngineError unless `payload` is this context's state after `position` tokens."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[HEAD_BYTES:]) if self.windows else 0
        if bytes(state[:HEAD_BYTES]) != self.head or len(state) != self.snapshot_bytes(cells):
            raise EngineError("A stored snapshot has another size than its model's state.")
        if position < 1 or (self.windows and not 0 < cells <= min(position, self.window)):
            raise EngineError("A stored snapshot holds another number of tokens than the model sees.")
        offset = HEAD_BYTES
        for part in self.windows:
            positions = np.sort(part.check(state[offset:], cells))
            if not _are_equal(positions, _positions(position - cells, cells)):
                raise EngineError("A stored snapshot was taken at another position than its place.")
            offset += part.size(cells)
        if self.recurrent:
            self.recurrent.check(state[offset:], position)

    def _orders(self, state: Bytes, start: int, cells: int) -> list[Order]:
        offset, orders = HEAD_BYTES, []
        for part in self.ranges:
            if cell_count(state[offset:]) != cells:
                raise EngineError(f"llama.cpp exported another number of tokens than {cells} from {start} on.")
            positions = part.positions(state[offset:], cells)
            order = np.argsort(positions, kind="stable")
            if not np.array_equal(positions[order], np.arange(start, start + cells)):
                raise EngineError(f"llama.cpp exported other positions than {cells} from {start} on.")
            orders.append(None if np.array_equal(order, np.arange(cells)) else order)
            offset += part.size(cells)
        return orders

    def _pick(
        self,
        state: Bytes,
        cells: int,
        orders: list[Order],
        start: int,
        end: int,
        allocate: Callable[[int], Bytes],
    ) -> Payload:
        payload = allocate(self.range_bytes(end - start))
        payload[:HEAD_BYTES] = np.frombuffer(self.head, np.uint8)
        offset = to = HEAD_BYTES
        for part, order in zip(self.ranges, orders, strict=True):
            chosen = slice(start, end) if order is None else order[start:end]
            part.pick(state[offset:], cells, chosen, payload[to:], end - start)
            offset += part.size(cells)
            to += part.size(end - start)
        payload[to:] = np.frombuffer(self.nothing, np.uint8)
        return memoryview(payload)


def _new(size: int) -> Bytes:
    return np.empty(size, np.uint8)
