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
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.pool import BlockTable, KvMemory, StreamGroup
from emberkeep.engine.packing import BITS, LEAST_STEP, Form, PackedArrays, Streams, is_packed, is_wide
from emberkeep.engine.payload_memory import SLAB, PayloadMemory, slab_count
from emberkeep.errors import EngineError

Bytes = npt.NDArray[np.uint8]
Rows = list[torch.Tensor]
"""Of a range: one `[streams, tokens, heads, width]` per group."""

HEAD = struct.Struct("<4siII")
_MAGIC = b"EKHF"

_TOGETHER = 16
"""Payloads that are gathered or put into place at once, of one length."""
_CHUNK = 128
"""Tokens of the payloads that there are most of: their memory is prepared for fast copies."""


class Transfer:
    """Belongs to the engine's thread."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._bytes_per_token = memory.bytes_per_token
        self._is_cuda = memory.device.type == "cuda"
        self._gathers = self._is_cuda
        """Whether several payloads are put together on the device: elsewhere that is only one copy more."""
        self._packing = Packing(memory)
        self._payloads = PayloadMemory(self._size(_CHUNK))
        if self._is_cuda:
            _prepare(self._payloads)
        self._staging = torch.empty(0, dtype=memory.dtype, device=memory.device)
        self._in_flight: list[Payload] = []

    @property
    def packs(self) -> frozenset[int]:
        return frozenset({16, *self._packing.bits})

    def export(self, table: BlockTable, borders: Sequence[int], bits: int) -> list[Payload]:
        """The ranges between `borders`. Blocks until their bytes are there."""
        payloads: list[Payload] = []
        for span in _alike(borders):
            payloads += self._pack(table, span, bits) if bits != 16 else self._export(table, span)
        if self._is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()
        return payloads

    def _pack(self, table: BlockTable, borders: Sequence[int], bits: int) -> list[Payload]:
        return [
            self._packing.pack(self._memory.read(self._locate(table, start, end)), start, bits)
            for start, end in pairwise(borders)
        ]

    def _export(self, table: BlockTable, borders: Sequence[int]) -> list[Payload]:
        """Of ranges of one length: gathered where they are, so that each is one copy."""
        count, tokens = len(borders) - 1, borders[1] - borders[0]
        buffers = [self._payloads.take(self._size(tokens)) for _ in range(count)]
        targets = [torch.from_numpy(buffer[HEAD.size :]).view(self._memory.dtype) for buffer in buffers]
        staged = self._staged(count, tokens) if self._gathers else None
        rows = self._memory.read(self._locate(table, borders[0], borders[-1]))
        for index, (buffer, target) in enumerate(zip(buffers, targets, strict=True)):
            write_head(memoryview(buffer), borders[index], tokens)
            if staged is None:
                first = index * tokens
                for into, given in zip(rows_of(target, self._memory.groups, tokens), rows, strict=True):
                    into.copy_(given[:, first : first + tokens])
        if staged is not None:
            for into, given in zip(rows_of(staged, self._memory.groups, tokens), rows, strict=True):
                into.copy_(given.unflatten(1, (count, tokens)).transpose(0, 1))
            for target, given in zip(targets, staged, strict=True):
                target.copy_(given, non_blocking=True)
        return [memoryview(buffer) for buffer in buffers]

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
    ) -> None:
        """Put [start, end) of payloads, for which `check` gave `borders`, where the table has room for it."""
        index = 0
        for span in _alike(borders):
            given = payloads[index : index + len(span) - 1]
            index += len(given)
            first, last = max(start, span[0]), min(end, span[-1])
            is_together = self._gathers and len(given) > 1 and not any(is_packed(payload) for payload in given)
            if is_together and first < last:
                self.write(table, first, last, self._together(given, span, first, last))
                continue
            for payload, (begin, until) in zip(given, pairwise(span), strict=True):
                first, last = max(start, begin), min(end, until)
                if first < last:
                    rows = self.rows(payload, begin)
                    self.write(table, first, last, [part[:, first - begin : last - begin] for part in rows])

    def _together(self, payloads: Sequence[Payload], borders: Sequence[int], first: int, last: int) -> Rows:
        """The rows of [first, last) of payloads of one length, on the device: valid until the next call."""
        tokens = borders[1] - borders[0]
        staged = self._staged(len(payloads), tokens)
        for there, payload in zip(staged, payloads, strict=True):
            there.copy_(as_tensor(payload, self._memory.dtype, HEAD.size), non_blocking=True)
        self._in_flight += payloads
        begin = borders[0]
        return [
            part.transpose(0, 1).flatten(1, 2)[:, first - begin : last - begin]
            for part in rows_of(staged, self._memory.groups, tokens)
        ]

    def _staged(self, count: int, tokens: int) -> torch.Tensor:
        """Memory of the device for so many payloads without their heads. The device uses it in order."""
        size = tokens * self._bytes_per_token // self._memory.dtype.itemsize
        if len(self._staging) < count * size:
            self._staging = torch.empty(count * size, dtype=self._memory.dtype, device=self._memory.device)
        return self._staging[: count * size].view(count, size)

    def rows(self, payload: Payload, start: int) -> list[torch.Tensor]:
        """The rows of a payload that begins at `start`, one tensor per group, on the device. Raises EngineError.

        They are valid until the next call, and may share the payload's memory, which must not be written.
        """
        if is_packed(payload):
            return self._packing.unpack(payload, start)
        tokens = self._check(payload, start)
        data = as_tensor(payload, self._memory.dtype, HEAD.size)
        return rows_of(self._to_device(data, payload), self._memory.groups, tokens)

    def _check(self, payload: Payload, start: int) -> int:
        tokens = read_head(payload, start)
        if len(payload) != self._size(tokens):
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        return tokens

    def _to_device(self, data: torch.Tensor, payload: Payload) -> torch.Tensor:
        """Valid until the next call. On CUDA nothing is waited for, and the device does it all in order."""
        if not self._is_cuda:
            return data.to(self._memory.device)
        self._in_flight.append(payload)
        (there,) = self._staged(1, len(data) * data.element_size() // self._bytes_per_token)
        there.copy_(data, non_blocking=True)
        return there

    def finish_loads(self) -> None:
        """Everything that was on its way is there."""
        self._in_flight.clear()

    def read(self, table: BlockTable, start: int, end: int) -> list[torch.Tensor]:
        """Copies of the rows of [start, end)."""
        return [part.clone() for part in self._memory.read(self._locate(table, start, end))]

    def write(self, table: BlockTable, start: int, end: int, rows: Sequence[torch.Tensor]) -> None:
        """Put rows of [start, end) where the table has room for them."""
        self._memory.write(self._locate(table, start, end), rows)

    def _locate(self, table: BlockTable, start: int, end: int) -> slice | torch.Tensor:
        begin = table.run(start, end)
        if begin is not None:
            return slice(begin, begin + end - start)
        return torch.from_numpy(table.cells(start, end)).to(self._memory.device, non_blocking=True)

    def _size(self, tokens: int) -> int:
        return HEAD.size + tokens * self._bytes_per_token


def _prepare(memory: PayloadMemory) -> None:
    """Pinned: made once, since making it holds up everything else on the device."""
    for _ in range(slab_count()):
        # In slabs of a power of two: torch would round every single piece up to one.
        memory.add(torch.empty(SLAB, dtype=torch.uint8, pin_memory=True).numpy())


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


def _alike(borders: Sequence[int]) -> Iterator[Sequence[int]]:
    """Neighbouring ranges of one length, at most `_TOGETHER`."""
    first = 0
    while first < len(borders) - 1:
        last = first + 1
        while (
            last < len(borders) - 1
            and last - first < _TOGETHER
            and borders[last + 1] - borders[last] == borders[first + 1] - borders[first]
        ):
            last += 1
        yield borders[first : last + 1]
        first = last
