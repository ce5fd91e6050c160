"""What the state of one sequence of a context looks like, and how it is taken apart into payloads.

    u32 magic, u32 sequence               both constant: exports go through sequence 0
    attention parts                       by range: every layer that sees all tokens
    attention parts                       windows: layers that see the last tokens only
    recurrent part

A payload of a range is a state with nothing in the windows and the recurrent part, so that it can go back into
the library as it is. A payload of a snapshot is a state without the first parts. The windows' cells are those
that the last token saw: llama.cpp leaves out what is behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import KvUnit, Payload
from emberkeep.engine.llamacpp.blob import EMPTY, UNKNOWN, VARIANTS, Attention, Bytes, Recurrent, Run, cell_count
from emberkeep.errors import EngineError

Order = npt.NDArray[np.intp] | None
"""Which row is the first by position, the second, ...; None when they are in order."""

_HEAD = 8
PROBE = 2
"""Tokens of the sequence that a layout is learned from."""


@dataclass(frozen=True, slots=True)
class Exports:
    """Two exports of one sequence: all of it, and what llama.cpp cannot take apart by range."""

    whole: Bytes
    partial: Bytes


@dataclass(frozen=True, slots=True)
class Layout:
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

    @property
    def row_bytes(self) -> int:
        """Of one token, by range."""
        return sum(part.row_bytes for part in self.ranges)

    @property
    def empty_snapshot(self) -> Bytes:
        return np.frombuffer(self.head + self.nothing, np.uint8)

    def range_bytes(self, cells: int) -> int:
        return _HEAD + sum(part.size(cells) for part in self.ranges) + len(self.nothing)

    def snapshot_bytes(self, cells: int) -> int:
        """With `cells` tokens in the windows."""
        recurrent = self.recurrent.size if self.recurrent else 0
        return _HEAD + sum(part.size(cells) for part in self.windows) + recurrent

    @property
    def has_half_rows(self) -> bool:
        """Whether there are ranges, and every row in them is in 16 bits."""
        return bool(self.ranges) and all(part.has_half_rows for part in self.ranges)

    def runs(self, cells: int) -> Iterator[tuple[int, Run]]:
        """The runs of a range with `cells` cells, each with where its first row begins."""
        offset = _HEAD
        for part in self.ranges:
            yield from ((offset + begin, run) for begin, run in part.runs(cells))
            offset += part.size(cells)

    def cut(self, state: Bytes, borders: Sequence[int]) -> list[Payload]:
        """The ranges between `borders` of a state that llama.cpp has just written for all of them.

        llama.cpp writes rows as they lie in its cells; here they are by position. Raises EngineError.
        """
        begin, cells = borders[0], borders[-1] - borders[0]
        orders = self._orders(state, begin, cells)
        if len(borders) == 2 and not self.nothing and all(order is None for order in orders):
            return [memoryview(state)]
        return [self._pick(state, cells, orders, start - begin, end - begin) for start, end in pairwise(borders)]

    def check_range(self, payload: Payload, start: int) -> int:
        """Where `payload` ends, which must hold the positions `start ..` in order. Raises EngineError."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[_HEAD:])
        if bytes(state[:_HEAD]) != self.head or len(state) != self.range_bytes(cells):
            raise EngineError("A stored KV payload has another size than its cell count says.")
        offset = _HEAD
        for part in self.ranges:
            part.check(state[offset:], cells)
            if not np.array_equal(part.positions(state[offset:], cells), np.arange(start, start + cells)):
                raise EngineError("A stored KV payload holds other positions than its chunk.")
            offset += part.size(cells)
        if bytes(state[offset:]) != self.nothing:
            raise EngineError("A stored KV payload comes from another model layout.")
        return start + cells

    def check_snapshot(self, payload: Payload, position: int) -> None:
        """Raises EngineError unless `payload` is this context's state after `position` tokens."""
        state = np.frombuffer(payload, np.uint8)
        cells = cell_count(state[_HEAD:]) if self.windows else 0
        if bytes(state[:_HEAD]) != self.head or len(state) != self.snapshot_bytes(cells):
            raise EngineError("A stored snapshot has another size than its model's state.")
        if position < 1 or (self.windows and not 0 < cells <= min(position, self.window)):
            raise EngineError("A stored snapshot holds another number of tokens than the model sees.")
        offset = _HEAD
        for part in self.windows:
            part.check(state[offset:], cells)
            positions = np.sort(part.positions(state[offset:], cells))
            if not np.array_equal(positions, np.arange(position - cells, position)):
                raise EngineError("A stored snapshot was taken at another position than its place.")
            offset += part.size(cells)
        if self.recurrent:
            self.recurrent.check(state[offset:], position)

    def _orders(self, state: Bytes, start: int, cells: int) -> list[Order]:
        offset, orders = _HEAD, []
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

    def _pick(self, state: Bytes, cells: int, orders: list[Order], start: int, end: int) -> Payload:
        payload = np.empty(self.range_bytes(end - start), np.uint8)
        payload[:_HEAD] = np.frombuffer(self.head, np.uint8)
        offset = to = _HEAD
        for part, order in zip(self.ranges, orders, strict=True):
            chosen = slice(start, end) if order is None else order[start:end]
            part.pick(state[offset:], cells, chosen, payload[to:], end - start)
            offset += part.size(cells)
            to += part.size(end - start)
        payload[to:] = np.frombuffer(self.nothing, np.uint8)
        return memoryview(payload)


def learn(empty: Exports, probe: Exports, window: int) -> Layout:
    """The layout of a context, from exports of a sequence without tokens and of one with `PROBE` of them.

    Raises EngineError when it is none that this version knows.
    """
    attention, recurrent = _inventory(empty.whole)
    windows, partial_recurrent = _inventory(empty.partial)
    if recurrent != partial_recurrent:
        raise EngineError(UNKNOWN)
    if len(empty.whole) == len(empty.partial) and not recurrent:
        windows = 0  # what has only ranges is never partial
    has_rest = windows or recurrent
    rest = probe.partial[_HEAD:] if has_rest else probe.partial[:0]
    layout = Layout(
        head=bytes(empty.whole[:_HEAD]),
        ranges=_read_parts(probe.whole[_HEAD : len(probe.whole) - len(rest)], attention - windows),
        windows=_read_parts(rest[: len(rest) - (recurrent.size if recurrent else 0)], windows),
        window=window,
        recurrent=recurrent,
        nothing=bytes(empty.partial[_HEAD:]) if has_rest else b"",
    )
    _check(layout, probe)
    return layout


def _check(layout: Layout, probe: Exports) -> None:
    if not layout.ranges and not layout.unit.has_snapshots:
        raise EngineError(UNKNOWN)
    for payload in layout.cut(probe.whole, (0, PROBE)) if layout.ranges else ():
        layout.check_range(payload, 0)
    if layout.unit.has_snapshots:
        layout.check_snapshot(memoryview(probe.partial), PROBE)


def _inventory(empty: Bytes) -> tuple[int, Recurrent | None]:
    """How many attention parts a state without cells has, and its recurrent part."""
    count, rest = 0, empty[_HEAD:]
    while bytes(rest[: len(EMPTY)]) == EMPTY:
        count, rest = count + 1, rest[len(EMPTY) :]
    return count, Recurrent.read(rest) if len(rest) else None


def _read_parts(state: Bytes, count: int) -> tuple[Attention, ...]:
    """The `count` parts that `state` consists of, from first to last byte."""
    if count == 0 and len(state) == 0:
        return ()
    for has_values, extra in VARIANTS if count else ():
        part = Attention.read(state, PROBE, has_values=has_values, extra=extra)
        if part is not None and part.size(PROBE) <= len(state):
            with suppress(EngineError):
                return part, *_read_parts(state[part.size(PROBE) :], count - 1)
    raise EngineError(UNKNOWN)
