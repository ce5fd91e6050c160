"""Packed payloads of the Hugging Face engine: the format of `engine.packing`, computed where the state is."""

from __future__ import annotations

import numpy as np
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.memory import KvMemory
from emberkeep.engine.hf.payload import HEAD, read_head, write_head
from emberkeep.engine.packing import BITS, Form, Section, Streams, is_wide
from emberkeep.errors import EngineError

_LEAST_STEP = 2.0**-24


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
        form = Form.read(payload, self._streams)
        if len(payload) != form.end + HEAD.size or read_head(payload[form.end :], start) != form.tokens:
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        sections = form.sections(np.frombuffer(payload, np.uint8))
        parts = [
            _decode(section, streams, form.bits, self._memory)
            for section, streams in zip(sections, self._streams, strict=True)
        ]
        return self._joined(parts)

    def _split(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values of every group apart, as `[count, tokens, channels]`."""
        parts: list[torch.Tensor] = []
        for g, part in zip(self._memory.groups, rows, strict=True):
            keys = sum(is_key for _, is_key in g.streams)
            parts += (half.flatten(2) for half in (part[:keys], part[keys:]) if len(half))
        return parts

    def _joined(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
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
    section: Section,
) -> None:
    dtype = torch.float32 if section.low.dtype == np.float32 else torch.float16
    levels = 2**bits - 1
    low = _rounded_down(least, dtype)
    step = -_rounded_down(-(greatest / levels - low.float() / levels).clamp_min(_LEAST_STEP), dtype)
    scaled = (_spread(rows, streams) - _over(low.float(), streams)) * _over(1 / step.float(), streams)
    codes = (scaled + 0.5).to(torch.uint8).view(rows.shape)
    if bits == 4:
        half = streams.channels // 2
        codes = codes[..., :half] | codes[..., half:] << 4
    for target, given in ((section.low, low), (section.step, step), (section.codes, codes)):
        target[:] = given.cpu().numpy()


def _decode(section: Section, streams: Streams, bits: int, memory: KvMemory) -> torch.Tensor:
    low, step, codes = (
        torch.from_numpy(np.array(array)).to(memory.device) for array in (section.low, section.step, section.codes)
    )
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    spread = _spread(codes.float(), streams)
    rows = torch.addcmul(_over(low.float(), streams), spread, _over(step.float(), streams))
    return rows.reshape(codes.shape).to(memory.dtype)


def _rounded_down(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `engine.packing`."""
    nearest = values.to(dtype).float()
    below = nearest - nearest.abs() * 2**-10 - 2**-24
    return torch.where(nearest > values, below, nearest).to(dtype)
