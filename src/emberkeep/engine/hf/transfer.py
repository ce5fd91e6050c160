"""Payloads: state on its way between the pool and the store's memory.

The bytes of a token range are

    0   magic "EKHF", i32 first position, u32 tokens, u32 0
    16  for each group of streams: rows [streams, tokens, heads * width] in the model's dtype

Their number follows from the model's shape, so that anything else is refused before it is looked at. A packed
payload (`engine.packing`, computed here where the state is) has this head at its end, where an engine keeps what
is not rows.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.pool import BlockTable, Cells, KvMemory, StreamGroup
from emberkeep.engine.hf.staging import DeviceStaging, HostMemory, Mark, SideStream
from emberkeep.engine.packing import BITS, LEAST_STEP, Form, PackedArrays, Streams, is_packed, is_wide
from emberkeep.engine.payload_memory import PayloadMemory
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

Bytes = npt.NDArray[np.uint8]
Rows = list[torch.Tensor]
"""A range has one `[streams, tokens, heads, width]` per group."""
HEAD = struct.Struct("<4siII")
_MAGIC = b"EKHF"
_TOGETHER, _TOGETHER_BYTES = 8, 64 << 20
"""Payloads of one length that are gathered, or put into place, at once, and no more than have so many bytes:
the device holds four such groups."""
_Place = slice | Cells
"""Where a range is in the pool: as cells that lie one after the other, or anywhere."""
_Where = TypeVar("_Where", slice, Cells, torch.Tensor)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Blocks of the pool that are read until `mark`."""

    mark: Mark
    blocks: frozenset[int]


class Transfer:
    """Belongs to the engine's thread. What moves does so beside the device's steps (`SideStream`): who uses state
    that is loaded, or cells that are given back, has to wait for it."""

    def __init__(self, memory: KvMemory, chunk: int = 128) -> None:
        """`chunk`: tokens of most payloads."""
        self._memory = memory
        self._bytes_per_token = memory.bytes_per_token
        self._gathers = memory.device.type == "cuda"
        """Whether payloads are put together on the device: elsewhere that is only one copy more."""
        self._packing = Packing(memory)
        self.whole = self._size(chunk) if self._gathers else 0
        """Bytes of most payloads, where smaller ones pass through memory for those."""
        self._payloads = PayloadMemory(self._size(chunk))
        self._stores, self._loads = SideStream(memory.device), SideStream(memory.device)
        self._outgoing, self._incoming = DeviceStaging(memory), DeviceStaging(memory)
        self._readings: deque[_Reading] = deque()
        """In the order in which the device does them."""

    @property
    def packs(self) -> frozenset[int]:
        return frozenset({16, *self._packing.bits})

    def prepare(self) -> None:
        """Begin to make memory ready that payloads are copied to and from at full speed: not before steps are
        recorded, which that would disturb."""
        if self._memory.device.type == "cuda":
            host = HostMemory(is_pinned=True)
            self._payloads.start(lambda size: host.allocate(size).numpy())

    def payload_buffer(self, size: int) -> memoryview | None:
        """See `Engine`."""
        piece = self._payloads.take_whole(size)
        return None if piece is None else memoryview(piece)

    def export(self, table: BlockTable, borders: Sequence[int], bits: int) -> tuple[list[Payload], Mark]:
        """The ranges between `borders`, and when their bytes are there. Those smaller than `whole` lie in memory
        for whole ones, and should be moved out of it."""
        if bits != 16:
            return [self._pack(table, start, end, bits) for start, end in pairwise(borders)], Mark()
        place, first, mark = table.place(borders[0], borders[-1]), borders[0], Mark()
        buffers: list[Bytes] = []
        self._outgoing.begin()
        for span in self._alike(borders):
            tokens = span[1] - span[0]
            new = [self._new_payload(start, tokens) for start in span[:-1]]
            here = _part(place, span[0] - first, span[-1] - first)
            mark = self._stores.run(partial(self._gather, here, tokens, new), held=new)
            buffers += new
        reading = _Reading(mark, frozenset(table.blocks_of(first, borders[-1])))
        self._readings.append(reading)
        self._forget_readings()
        return [memoryview(buffer) for buffer in buffers], mark

    def _pack(self, table: BlockTable, start: int, end: int, bits: int) -> Payload:
        return self._packing.pack(self._memory.read(self._cells(table.place(start, end))), start, bits)

    def _new_payload(self, start: int, tokens: int) -> Bytes:
        size = self._size(tokens)
        buffer = self._payloads.take(size, is_brief=size < self.whole)
        write_head(memoryview(buffer), start, tokens)
        return buffer

    def _gather(self, place: _Place, tokens: int, buffers: Sequence[Bytes]) -> None:
        """Copy what is at `place` into payloads of so many tokens each: on a GPU it is put together there, so that
        each is one copy."""
        groups = self._memory.groups
        targets = [torch.from_numpy(buffer[HEAD.size :]).view(self._memory.dtype) for buffer in buffers]
        if not self._gathers:
            cells = self._cells(place)
            for index, target in enumerate(targets):
                piece = _part(cells, index * tokens, (index + 1) * tokens)
                self._memory.read_ranges(piece, rows_of(target[None], groups, tokens))
            return
        half = self._outgoing.take(len(targets), tokens)

        def gather() -> None:
            self._memory.read_ranges(self._cells(place), rows_of(half.data, groups, tokens))

        with self._outgoing.leaving(half, gather):
            for target, data in zip(targets, half.data, strict=True):
                target.copy_(data, non_blocking=True)

    def before_overwriting(self, blocks: Sequence[int]) -> None:
        """A table gives these back: what the device is told next waits for exports that still read them."""
        self._forget_readings()
        lost = frozenset(blocks)
        # Who waits for the last of them has waited for all.
        for reading in reversed(self._readings):
            if lost & reading.blocks:
                reading.mark.hold_back()
                return

    def _forget_readings(self) -> None:
        """Those that have passed."""
        while self._readings and self._readings[0].mark.has_passed:
            self._readings.popleft()

    def check(self, payloads: Sequence[Payload], start: int) -> list[int]:
        """Where payloads begin that follow each other from `start` on, and where the last ends. Raises
        EngineError."""
        borders = [start]
        for payload in payloads:
            check = self._packing.check if is_packed(payload) else self._check
            borders.append(borders[-1] + check(payload, borders[-1]))
        return borders

    def load(
        self, table: BlockTable, start: int, end: int, payloads: Sequence[Payload], borders: Sequence[int]
    ) -> Mark:
        """Put [start, end) of payloads, for which `check` gave `borders`, where the table has room for it; returns
        when it is there."""
        place = table.place(start, end)
        return self._loads.run(partial(self._scatter, place, start, end, payloads, borders), held=payloads)

    def _scatter(
        self, place: _Place, start: int, end: int, payloads: Sequence[Payload], borders: Sequence[int]
    ) -> None:
        cells, left = self._cells(place), iter(payloads)
        self._incoming.begin()
        for span in self._alike(borders):
            given = list(islice(left, len(span) - 1))
            if not self._gathers or any(is_packed(payload) for payload in given):
                rows = [self.rows(payload, begin) for payload, begin in zip(given, span, strict=False)]
                self._place(cells, start, end, span, rows)
            else:
                self._load_half(cells, start, end, span, given)

    def _load_half(
        self,
        cells: slice | torch.Tensor,
        start: int,
        end: int,
        span: Sequence[int],
        payloads: Sequence[Payload],
    ) -> None:
        tokens, groups = span[1] - span[0], self._memory.groups
        half = self._incoming.take(len(payloads), tokens)

        def place() -> None:
            if start <= span[0] and span[-1] <= end:
                # At once: telling the device about each of them takes as long as it takes to copy it.
                here = _part(cells, span[0] - start, span[-1] - start)
                self._memory.write_ranges(here, rows_of(half.data, groups, tokens))
            else:
                self._place(cells, start, end, span, [rows_of(there, groups, tokens) for there in half.data])

        with self._incoming.entering(half, place):
            for there, payload in zip(half.data, payloads, strict=True):
                there.copy_(as_tensor(payload, self._memory.dtype, HEAD.size), non_blocking=True)

    def _place(
        self, cells: slice | torch.Tensor, start: int, end: int, span: Sequence[int], rows: Sequence[Rows]
    ) -> None:
        """What of the ranges of `span` is within [start, end), whose cells are given."""
        for (begin, until), parts in zip(pairwise(span), rows, strict=True):
            first, last = max(start, begin), min(end, until)
            if first < last:
                wanted = [part[:, first - begin : last - begin] for part in parts]
                self._memory.write(_part(cells, first - start, last - start), wanted)

    def rows(self, payload: Payload, start: int) -> list[torch.Tensor]:
        """The rows of a payload that begins at `start`, one tensor per group, on the device. Raises EngineError.

        They may share the payload's memory, which must not be written.
        """
        if is_packed(payload):
            return self._packing.unpack(payload, start)
        tokens = self._check(payload, start)
        data = as_tensor(payload, self._memory.dtype, HEAD.size).to(self._memory.device)
        return rows_of(data, self._memory.groups, tokens)

    def _check(self, payload: Payload, start: int) -> int:
        tokens = read_head(payload, start)
        if len(payload) != self._size(tokens):
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        return tokens

    def let_go(self) -> None:
        """Let go of payloads that have arrived."""
        self._stores.let_go()
        self._loads.let_go()

    def close(self) -> None:
        """Blocks until nothing moves any more."""
        self._payloads.close()
        self._stores.close()
        self._loads.close()

    def read(self, table: BlockTable, start: int, end: int) -> list[torch.Tensor]:
        """Copies of the rows of [start, end)."""
        return [part.clone() for part in self._memory.read(self._cells(table.place(start, end)))]

    def write(self, table: BlockTable, start: int, end: int, rows: Sequence[torch.Tensor]) -> None:
        """Put rows of [start, end) where the table has room for them."""
        self._memory.write(self._cells(table.place(start, end)), rows)

    def _cells(self, place: _Place) -> slice | torch.Tensor:
        """On the device, for the stream that is used now."""
        if isinstance(place, slice):
            return place
        return torch.from_numpy(place).to(self._memory.device, non_blocking=True)

    def _alike(self, borders: Sequence[int]) -> Iterator[Sequence[int]]:
        """Neighbouring ranges of one length, so many that they may be moved at once."""
        first = 0
        while first < len(borders) - 1:
            tokens, last = borders[first + 1] - borders[first], first + 1
            most = min(_TOGETHER, max(_TOGETHER_BYTES // self._size(tokens), 1))
            while last < len(borders) - 1 and last - first < most and borders[last + 1] - borders[last] == tokens:
                last += 1
            yield borders[first : last + 1]
            first = last

    def _size(self, tokens: int) -> int:
        return HEAD.size + tokens * self._bytes_per_token


def _part(cells: _Where, start: int, end: int) -> _Where:
    return slice(cells.start + start, cells.start + end) if isinstance(cells, slice) else cells[start:end]


class Packing:
    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._streams = [
            Streams(is_key, g.shape.channels, sum(k is is_key for _, k in g.streams))
            for g in memory.groups
            for is_key in (True, False)
            if any(k is is_key for _, k in g.streams)
        ]
        self.bits = [bits for bits in BITS if all(streams.packs(bits) for streams in self._streams)]

    def pack(self, rows: list[torch.Tensor], start: int, bits: int) -> Payload:
        """The rows of a range that begins at `start`, one `[streams, tokens, heads, width]` per group.

        Raises EngineError for rows that hold something else than numbers.
        """
        parts = [part.float() for part in self._split(rows)]
        ranges = [_range(part, streams) for part, streams in zip(parts, self._streams, strict=True)]
        wide = [is_wide(float(least.min()), float(greatest.max())) for least, greatest in ranges]
        form = Form(bits, rows[0].shape[1], tuple(zip(self._streams, wide, strict=True)))
        payload = np.zeros(form.end + HEAD.size, np.uint8)
        payload[: form.head_bytes] = np.frombuffer(form.head(), np.uint8)
        sections = form.sections(payload)
        for part, range_, streams, section in zip(parts, ranges, self._streams, sections, strict=True):
            _encode(part, *range_, streams, bits, section)
        write_head(memoryview(payload)[form.end :], start, form.tokens)
        return memoryview(payload)

    def unpack(self, payload: Payload, start: int) -> list[torch.Tensor]:
        """The rows of every group. Raises EngineError."""
        form = self._form(payload, start)
        sections = form.sections(np.frombuffer(payload, np.uint8))
        parts = [
            _decode(section, streams, form.bits, self._memory)
            for section, streams in zip(sections, self._streams, strict=True)
        ]
        return self._join(parts)

    def check(self, payload: Payload, start: int) -> int:
        """How many tokens it has. Raises EngineError."""
        return self._form(payload, start).tokens

    def _form(self, payload: Payload, start: int) -> Form:
        form = Form.read(payload, self._streams)
        if len(payload) != form.end + HEAD.size or read_head(payload[form.end :], start) != form.tokens:
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        return form

    def _split(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values of every group apart, as `[count, tokens, channels]`."""
        parts: list[torch.Tensor] = []
        for g, part in zip(self._memory.groups, rows, strict=True):
            keys = sum(is_key for _, is_key in g.streams)
            parts += (half.flatten(2) for half in (part[:keys], part[keys:]) if len(half))
        return parts

    def _join(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inverse of `_split`."""
        rows, left = [], list(parts)
        for g in self._memory.groups:
            halves = [left.pop(0)]
            if len(halves[0]) < len(g.streams):
                halves.append(left.pop(0))
            rows.append(torch.cat(halves).unflatten(2, (g.shape.heads, g.shape.width)))
        return rows


def _spread(rows: torch.Tensor, streams: Streams) -> torch.Tensor:
    """`[count, tokens, channels]` so that `low` and `step`, seen by `_over`, reach over it."""
    return rows if streams.is_key else rows.unflatten(2, (-1, streams.width))


def _over(shared: torch.Tensor, streams: Streams) -> torch.Tensor:
    return shared[:, None] if streams.is_key else shared[..., None]


def _range(rows: torch.Tensor, streams: Streams) -> tuple[torch.Tensor, torch.Tensor]:
    spread, dim = _spread(rows, streams), 1 if streams.is_key else -1
    return spread.amin(dim), spread.amax(dim)


def _encode(
    rows: torch.Tensor,
    least: torch.Tensor,
    greatest: torch.Tensor,
    streams: Streams,
    bits: int,
    section: PackedArrays,
) -> None:
    dtype = torch.float32 if section.low.dtype == np.float32 else torch.float16
    levels = 2**bits - 1
    low = _round_down(least, dtype)
    step = -_round_down(-(greatest / levels - low.float() / levels).clamp_min(LEAST_STEP), dtype)
    scaled = (_spread(rows, streams) - _over(low.float(), streams)) * _over(1 / step.float(), streams)
    codes = (scaled + 0.5).to(torch.uint8).view(rows.shape)
    if bits == 4:
        half = streams.channels // 2
        codes = codes[..., :half] | codes[..., half:] << 4
    for target, given in ((section.low, low), (section.step, step), (section.codes, codes)):
        target[:] = given.cpu().numpy()


def _decode(section: PackedArrays, streams: Streams, bits: int, memory: KvMemory) -> torch.Tensor:
    low, step, codes = (
        torch.from_numpy(np.array(array)).to(memory.device) for array in (section.low, section.step, section.codes)
    )
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    spread = _spread(codes.float(), streams)
    rows = torch.addcmul(_over(low.float(), streams), spread, _over(step.float(), streams))
    return rows.reshape(codes.shape).to(memory.dtype)


def _round_down(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `engine.packing`."""
    nearest = values.to(dtype).float()
    below = nearest - nearest.abs() * 2**-10 - 2**-24
    return torch.where(nearest > values, below, nearest).to(dtype)


def write_head(buffer: memoryview, start: int, tokens: int) -> None:
    HEAD.pack_into(buffer, 0, _MAGIC, start, tokens, 0)


def read_head(payload: Payload, start: int) -> int:
    """How many tokens a payload has that must begin at `start`. Raises EngineError."""
    if len(payload) < HEAD.size:
        raise EngineError("A stored KV payload is shorter than its head.")
    magic, begin, tokens, rest = HEAD.unpack_from(payload)
    if magic != _MAGIC or rest:
        raise EngineError("A stored KV payload is of another kind.")
    if begin != start or not tokens:
        raise EngineError("A stored KV payload holds other positions than its chunk.")
    return int(tokens)


def as_tensor(payload: Payload, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """The same bytes from `offset` on, which must not be written to. Valid while `payload` is held."""
    if payload.readonly:
        # torch warns about every buffer that is read-only; this one it cannot tell.
        address = np.frombuffer(payload, np.uint8).ctypes.data
        return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype, offset=offset)
    return torch.frombuffer(payload, dtype=dtype, offset=offset)


def rows_of(data: torch.Tensor, groups: Sequence[StreamGroup], tokens: int) -> Rows:
    """Views of a range's rows, one `[streams, tokens, heads, width]` per group, of flat `data` without a head; of
    several ranges, if `data` has a dimension for them, that comes first."""
    rows, offset = [], 0
    for g in groups:
        size = len(g.streams) * tokens * g.shape.channels
        shape = (len(g.streams), tokens, g.shape.heads, g.shape.width)
        rows.append(data[..., offset : offset + size].unflatten(-1, shape))
        offset += size
    return rows
