"""Payloads: state on its way between the pool and the store's memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Payload
from emberkeep.engine.hf.memory import KvMemory
from emberkeep.engine.hf.packed import Packing
from emberkeep.engine.hf.payload import HEAD, as_tensor, payload_bytes, read_head, rows_of, write_head
from emberkeep.engine.hf.pool import Table
from emberkeep.engine.packing import is_packed
from emberkeep.errors import EngineError

Bytes = npt.NDArray[np.uint8]

_SLAB = 64 << 20
_CHUNK = 128
"""Tokens of the payloads that there are most of: their memory is prepared for fast copies."""


class Transfer:
    """Belongs to the engine's thread."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._is_cuda = memory.device.type == "cuda"
        self._packing = Packing(memory)
        self._slots = PinnedSlots(self._size(_CHUNK)) if self._is_cuda else None
        self._in_flight: list[Payload] = []

    @property
    def packs(self) -> frozenset[int]:
        return frozenset({16, *self._packing.bits})

    def export(self, table: Table, borders: Sequence[int], bits: int) -> list[Payload]:
        """The ranges between `borders`. Blocks until their bytes are there."""
        payloads = [self._export(table, start, end, bits) for start, end in pairwise(borders)]
        if self._is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()
        return payloads

    def _export(self, table: Table, start: int, end: int, bits: int) -> Payload:
        rows = self._memory.read(self.cells(table, start, end))
        if bits != 16:
            return self._packing.pack(rows, start, bits)
        buffer = self._buffer(end - start)
        write_head(memoryview(buffer), start, end - start)
        data = torch.from_numpy(buffer[HEAD.size :]).view(self._memory.dtype)
        for target, given in zip(rows_of(data, self._memory.groups, end - start), rows, strict=True):
            target.copy_(given, non_blocking=True)
        return memoryview(buffer)

    def rows(self, payload: Payload, start: int) -> list[torch.Tensor]:
        """The rows of a payload that begins at `start`, one tensor per group, on the device. Raises EngineError.

        They may share the payload's memory, which must not be written. On CUDA they are still on their way:
        `arrived` says when the payload is no longer needed.
        """
        if is_packed(payload):
            return self._packing.unpack(payload, start)
        tokens = read_head(payload, start)
        if len(payload) != self._size(tokens):
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        data = as_tensor(payload)[HEAD.size :].view(self._memory.dtype)
        if self._is_cuda:
            self._in_flight.append(payload)
        return rows_of(data.to(self._memory.device, non_blocking=True), self._memory.groups, tokens)

    def arrived(self) -> None:
        """Everything that was on its way is there."""
        self._in_flight.clear()

    def cells(self, table: Table, start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(table.cells(start, end)).to(self._memory.device, non_blocking=True)

    def _size(self, tokens: int) -> int:
        return payload_bytes(self._memory.groups, self._memory.dtype, tokens)

    def _buffer(self, tokens: int) -> Bytes:
        if self._slots is not None and tokens == _CHUNK:
            return self._slots.take()
        return np.empty(self._size(tokens), np.uint8)


class PinnedSlots:
    """Host memory that a device copies from at full speed, in pieces of one size.

    A piece that nobody holds any more is used again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[Bytes] = deque()  # filled by finalizers, which run on any thread

    def take(self) -> Bytes:
        if not self._free:
            self._add_slab()
        memory = self._free.popleft()
        piece = memory[:]
        weakref.finalize(piece, self._free.append, memory)
        return piece

    def _add_slab(self) -> None:
        # In slabs of a power of two: torch would round every single piece up to one.
        slab = torch.empty(max(_SLAB, self._size), dtype=torch.uint8, pin_memory=True).numpy()
        stride = self._size + -self._size % 64
        self._free.extend(slab[i : i + self._size] for i in range(0, len(slab) - self._size + 1, stride))
