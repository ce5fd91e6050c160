"""The bytes of a token range of the Hugging Face engine.

    0   magic "EKHF", i32 first position, u32 tokens, u32 0
    16  for each group of streams: rows [streams, tokens, heads * width] in the model's dtype

The number of bytes follows from the model's shape, so that anything else is refused before it is looked at. A
packed payload (`engine.packing`) has this head at its end, where an engine keeps what is not rows.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.memory import Group
from emberkeep.errors import EngineError

HEAD = struct.Struct("<4siII")
_MAGIC = b"EKHF"


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
    """The same bytes from `offset` on, which nobody may write to. Valid while `payload` is held."""
    if payload.readonly:
        # torch warns about every buffer that is read-only; this one it cannot tell.
        address = np.frombuffer(payload, np.uint8).ctypes.data
        return torch.frombuffer((ctypes.c_uint8 * len(payload)).from_address(address), dtype=dtype, offset=offset)
    return torch.frombuffer(payload, dtype=dtype, offset=offset)


def rows_of(data: torch.Tensor, groups: Sequence[Group], tokens: int) -> list[torch.Tensor]:
    """Views of a range's rows, one `[streams, tokens, heads, width]` per group, of flat `data` without a head."""
    rows, offset = [], 0
    for g in groups:
        size = len(g.streams) * tokens * g.shape.channels
        rows.append(data[offset : offset + size].view(len(g.streams), tokens, g.shape.heads, g.shape.width))
        offset += size
    return rows
