"""Attention state in 8 or 4 bits: the format of packed payloads, and the numpy implementation of it.

A payload packs groups of streams. A stream is `[tokens, channels]`, the keys or the values of one layer (or
head); the streams of a group have the same shape and kind. Numbers are little-endian, and every array begins at
a multiple of 16 bytes, with zeros between:

    4s "EKpk", u16 version = 1, u16 bits = 8 | 4, u32 tokens, u32 groups
    groups x { u8 is_key, u8 wide, u16 width, u32 channels, u32 count, u32 0 }
    for each group three arrays:
      keys:    low[count, channels]                   values:  low[count, tokens, channels / width]
               step[count, channels]                           step[count, tokens, channels / width]
               codes[count, tokens, channels]                  codes[count, tokens, channels]
    whatever the engine keeps beside the rows, up to the end

A value is `low + code * step`. Keys share low and step over the tokens of a channel, because some channels are
large in all tokens; their width is 0. Values share them over `width` neighbouring channels of a token: the
largest number up to 64 that divides their channels. Codes take one byte each; with 4 bits channel i and channel
i + channels / 2 share one, and the first of them has its low half.

`low` and `step` are f16, or f32 (wide = 1) in a group with a magnitude above 2**15. They are chosen, in f32,
from the least and the greatest value of what shares them, so that no value is further than half a step from its
code:

    low  = least, rounded down to f16
    step = max(greatest / levels - low / levels, 2**-24), rounded up to f16;  levels = 2**bits - 1
    code = floor((value - low) / step + 1/2)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Payload
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

BITS = (8, 4)
_MAGIC = b"EKpk"
_VERSION = 1
_HEAD = struct.Struct("<4sHHII")
_GROUP = struct.Struct("<BBHIII")
_ALIGN = 16
_WIDTH = 64
_NARROW_LIMIT = 2.0**15
_LIMIT = 2.0**127
LEAST_STEP = 2.0**-24

Floats = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]
Buffer = bytes | Bytes


@dataclass(frozen=True, slots=True)
class Streams:
    """`count` streams of the same shape."""

    is_key: bool
    channels: int
    count: int

    @property
    def width(self) -> int:
        """How many neighbouring channels of a token share their step; 0 for keys."""
        if self.is_key:
            return 0
        return next(width for width in range(min(_WIDTH, self.channels), 0, -1) if self.channels % width == 0)

    def packs(self, bits: int) -> bool:
        return bits in BITS and self.channels * bits % 8 == 0

    def shared_shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of `low` and `step`."""
        return (self.count, self.channels) if self.is_key else (self.count, tokens, self.channels // self.width)


@dataclass(frozen=True, slots=True)
class Group:
    streams: Streams
    rows: Floats
    """`[count, tokens, channels]`, contiguous or not, of any float type."""

    def spread(self, array: Floats) -> Floats:
        """`[count, tokens, channels]` as an array that `low` and `step`, seen by `over`, reach over."""
        return array if self.streams.is_key else array.reshape(*array.shape[:2], -1, self.streams.width)

    def over(self, shared: Floats) -> Floats:
        return shared[:, None, :] if self.streams.is_key else shared[..., None]


def is_packed(payload: Payload) -> bool:
    return bytes(payload[: len(_MAGIC)]) == _MAGIC


def pack(groups: Sequence[Group], bits: int, rest: Buffer = b"") -> Payload:
    """The rows of `groups`, all of the same tokens, in fewer bits, and `rest` behind them.

    Raises EngineError for rows that hold something else than numbers.
    """
    ranges = [_range(group) for group in groups]
    form = Form(
        bits,
        groups[0].rows.shape[1],
        tuple(
            (group.streams, is_wide(float(range_[0].min()), float(range_[1].max())))
            for group, range_ in zip(groups, ranges, strict=True)
        ),
    )
    payload = np.zeros(form.end + len(rest), np.uint8)
    payload[: form.head_bytes] = np.frombuffer(form.head(), np.uint8)
    for group, range_, section in zip(groups, ranges, form.sections(payload), strict=True):
        _encode(group, *range_, bits, section)
    payload[form.end :] = np.frombuffer(rest, np.uint8)
    return memoryview(payload)


class Packed:
    """A packed payload, whose sizes have been checked."""

    def __init__(self, payload: Payload, streams: Sequence[Streams]) -> None:
        """Raises EngineError unless it packs exactly these streams."""
        self._payload = np.frombuffer(payload, np.uint8)
        self._form = Form.read(payload, streams)
        if self._form.end > len(self._payload):
            raise EngineError("A stored KV payload is shorter than its packed rows.")

    @property
    def tokens(self) -> int:
        return self._form.tokens

    @property
    def rest(self) -> Bytes:
        """What the engine kept beside the rows: a view."""
        return self._payload[self._form.end :]

    def unpack(self, targets: Sequence[Floats]) -> None:
        """Write the rows of each group into an array `[count, tokens, channels]` of any float type."""
        sections = self._form.sections(self._payload)
        for target, (streams, _), section in zip(targets, self._form.groups, sections, strict=True):
            _decode(Group(streams, target), self._form.bits, section)


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """The arrays of one group: views into a payload."""

    low: Floats
    step: Floats
    codes: Bytes


@dataclass(frozen=True, slots=True)
class Form:
    """What the head of a payload says, and where everything is because of it."""

    bits: int
    tokens: int
    groups: tuple[tuple[Streams, bool], ...]
    """Each with whether it is wide."""

    @classmethod
    def read(cls, payload: Payload, streams: Sequence[Streams]) -> Form:
        """Raises EngineError unless it is the head of a payload of these streams."""
        try:
            _, _, bits, tokens, _ = _HEAD.unpack_from(payload)
            wide = [payload[_HEAD.size + i * _GROUP.size + 1] == 1 for i in range(len(streams))]
        except (struct.error, IndexError):
            raise EngineError("A stored KV payload is shorter than its head.") from None
        form = cls(bits, tokens, tuple(zip(streams, wide, strict=True)))
        can_be = tokens > 0 and all(stream.packs(bits) for stream in streams)
        if not can_be or bytes(payload[: form.head_bytes]) != form.head():
            raise EngineError("A stored KV payload was packed for another model layout.")
        return form

    @property
    def head_bytes(self) -> int:
        return _HEAD.size + _GROUP.size * len(self.groups)

    def head(self) -> bytes:
        table = (_GROUP.pack(s.is_key, wide, s.width, s.channels, s.count, 0) for s, wide in self.groups)
        return b"".join([_HEAD.pack(_MAGIC, _VERSION, self.bits, self.tokens, len(self.groups)), *table])

    @property
    def end(self) -> int:
        return self._arrays()[1]

    def sections(self, payload: Bytes) -> list[PackedArrays]:
        arrays = [np.ndarray(shape, dtype, payload, offset) for shape, dtype, offset in self._arrays()[0]]
        return [PackedArrays(*arrays[i : i + 3]) for i in range(0, len(arrays), 3)]

    def _arrays(self) -> tuple[list[tuple[tuple[int, ...], str, int]], int]:
        """Shape, type and offset of every array, and where the last one ends."""
        arrays, offset = [], self.head_bytes
        for streams, wide in self.groups:
            shared, dtype = streams.shared_shape(self.tokens), "<f4" if wide else "<f2"
            codes = (streams.count, self.tokens, streams.channels * self.bits // 8)
            for shape, kind in ((shared, dtype), (shared, dtype), (codes, "u1")):
                arrays.append((shape, kind, offset))
                size = prod(shape) * int(kind[-1])
                offset += size + -size % _ALIGN
        return arrays, offset


def _range(group: Group) -> tuple[Floats, Floats]:
    """The least and the greatest of what shares a step."""
    rows = group.spread(group.rows.astype(np.float32))
    axis = 1 if group.streams.is_key else -1
    return rows.min(axis=axis), rows.max(axis=axis)


def is_wide(least: float, greatest: float) -> bool:
    """Whether f16 is too narrow for rows between these. Raises EngineError for what is no number."""
    peak = max(-least, greatest)
    if not peak < _LIMIT:  # nor is a NaN
        raise EngineError("The engine's state holds something else than numbers, so it cannot be packed.")
    return peak > _NARROW_LIMIT


def _encode(group: Group, least: Floats, greatest: Floats, bits: int, section: PackedArrays) -> None:
    levels = np.float32(2**bits - 1)
    section.low[:] = _round_down(least, section.low.dtype)
    low = section.low.astype(np.float32)
    step = np.maximum(greatest / levels - low / levels, np.float32(LEAST_STEP))
    section.step[:] = -_round_down(-step, section.step.dtype)
    scaled = group.spread(group.rows.astype(np.float32))
    scaled -= group.over(low)
    scaled *= group.over(1 / section.step.astype(np.float32))
    scaled += np.float32(0.5)
    codes = scaled.astype(np.uint8).reshape(group.rows.shape)
    if bits == 8:
        section.codes[:] = codes
    else:
        half = group.streams.channels // 2
        section.codes[:] = codes[..., :half] | codes[..., half:] << np.uint8(4)


def _decode(group: Group, bits: int, section: PackedArrays) -> None:
    """Into the rows of `group`."""
    codes = section.codes
    if bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    rows = group.spread(codes.astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that no packing wrote
        rows *= group.over(section.step.astype(np.float32))
        rows += group.over(section.low.astype(np.float32))
        group.rows[:] = rows.reshape(group.rows.shape)


def _round_down(values: Floats, dtype: np.dtype[np.floating]) -> Floats:
    """In `dtype`, of which two neighbours are no more than 2**-10 of themselves (or 2**-24) apart."""
    nearest = values.astype(dtype).astype(np.float32)
    below = nearest - np.abs(nearest) * np.float32(2**-10) - np.float32(2**-24)
    return np.where(nearest > values, below, nearest).astype(dtype)
