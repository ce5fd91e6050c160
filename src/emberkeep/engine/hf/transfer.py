"""Payloads: state on its way between the pool and the store's memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.config import total_ram
from emberkeep.engine.base import Payload
from emberkeep.engine.hf.memory import KvMemory
from emberkeep.engine.hf.packed import Packing
from emberkeep.engine.hf.payload import HEAD, as_tensor, read_head, rows_of, write_head
from emberkeep.engine.hf.pool import Table
from emberkeep.engine.packing import is_packed
from emberkeep.errors import EngineError

Bytes = npt.NDArray[np.uint8]

_SLAB = 256 << 20
_PINNED = 4 << 30
"""Most bytes of such memory: it cannot be swapped out."""
_CHUNK = 128
"""Tokens of the payloads that there are most of: their memory is prepared for fast copies."""


class Transfer:
    """Belongs to the engine's thread."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._bytes_per_token = memory.bytes_per_token
        self._is_cuda = memory.device.type == "cuda"
        self._packing = Packing(memory)
        self._slots = PinnedSlots(self._size(_CHUNK)) if self._is_cuda else None
        self._staging = torch.empty(0, dtype=memory.dtype, device=memory.device)
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
        rows = self._memory.read(self._place(table, start, end))
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

        They are valid until the next call, and may share the payload's memory, which must not be written.
        """
        if is_packed(payload):
            return self._packing.unpack(payload, start)
        tokens = read_head(payload, start)
        if len(payload) != self._size(tokens):
            raise EngineError("A stored KV payload has another size than its number of tokens says.")
        data = as_tensor(payload, self._memory.dtype, HEAD.size)
        return rows_of(self._to_device(data, payload), self._memory.groups, tokens)

    def _to_device(self, data: torch.Tensor, payload: Payload) -> torch.Tensor:
        """Valid until the next call. On CUDA nothing is waited for, and the device does it all in order."""
        if not self._is_cuda:
            return data.to(self._memory.device)
        self._in_flight.append(payload)
        if len(self._staging) < len(data):
            self._staging = torch.empty_like(data, device=self._memory.device)
        there = self._staging[: len(data)]
        there.copy_(data, non_blocking=True)
        return there

    def arrived(self) -> None:
        """Everything that was on its way is there."""
        self._in_flight.clear()

    def read(self, table: Table, start: int, end: int) -> list[torch.Tensor]:
        """Copies of the rows of [start, end)."""
        return [part.clone() for part in self._memory.read(self._place(table, start, end))]

    def write(self, table: Table, start: int, end: int, rows: Sequence[torch.Tensor]) -> None:
        """Put rows of [start, end) where the table has room for them."""
        self._memory.write(self._place(table, start, end), rows)

    def _place(self, table: Table, start: int, end: int) -> slice | torch.Tensor:
        begin = table.run(start, end)
        if begin is not None:
            return slice(begin, begin + end - start)
        return torch.from_numpy(table.cells(start, end)).to(self._memory.device, non_blocking=True)

    def _size(self, tokens: int) -> int:
        return HEAD.size + tokens * self._bytes_per_token

    def _buffer(self, tokens: int) -> Bytes:
        prepared = self._slots.take() if self._slots is not None and tokens == _CHUNK else None
        return np.empty(self._size(tokens), np.uint8) if prepared is None else prepared


class PinnedSlots:
    """Host memory that a device copies from at full speed, in pieces of one size.

    It is made once: making it takes a third of a second per gigabyte and holds up everything else on the device. A
    piece that nobody holds any more is used again.
    """

    def __init__(self, size: int) -> None:
        self._free: deque[Bytes] = deque()  # filled by finalizers, which run on any thread
        stride = size + -size % 64
        for _ in range(min(_PINNED, total_ram() // 16) // _SLAB):
            # In slabs of a power of two: torch would round every single piece up to one.
            slab = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True).numpy()
            self._free.extend(slab[i : i + size] for i in range(0, _SLAB - size + 1, stride))

    def take(self) -> Bytes | None:
        """None when all are in use."""
        try:
            memory = self._free.popleft()
        except IndexError:
            return None
        piece = memory[:]
        weakref.finalize(piece, self._free.append, memory)
        return piece
