"""Payloads: state on its way between the pool and the store's memory."""

from __future__ import annotations

import threading
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
_AHEAD = 1 << 30
"""Bytes of prepared memory that are kept ready."""
_LOOKS_S = 1.0
_CHUNK = 128
"""Tokens of the payloads that there are most of: their memory is prepared for fast copies."""


class Transfer:
    """Belongs to the engine's thread."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        is_cuda = memory.device.type == "cuda"
        self._packing = Packing(memory)
        self._slots = PinnedSlots(self._size(_CHUNK)) if is_cuda else None
        self._copies = torch.cuda.Stream(memory.device) if is_cuda else None
        self._in_flight: list[Payload] = []

    @property
    def packs(self) -> frozenset[int]:
        return frozenset({16, *self._packing.bits})

    def export(self, table: Table, borders: Sequence[int], bits: int) -> list[Payload]:
        """The ranges between `borders`. Blocks until their bytes are there."""
        payloads = [self._export(table, start, end, bits) for start, end in pairwise(borders)]
        if self._copies is not None:
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
        return rows_of(self._to_device(data, payload), self._memory.groups, tokens)

    def _to_device(self, data: torch.Tensor, payload: Payload) -> torch.Tensor:
        """On a stream of its own: the next copy does not wait until this one was put into its cells."""
        if self._copies is None:
            return data.to(self._memory.device)
        self._in_flight.append(payload)
        with torch.cuda.stream(self._copies):
            there = data.to(self._memory.device, non_blocking=True)
        main = torch.cuda.current_stream(self._memory.device)
        there.record_stream(main)
        main.wait_stream(self._copies)
        return there

    def arrived(self) -> None:
        """Everything that was on its way is there."""
        self._in_flight.clear()

    def cells(self, table: Table, start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(table.cells(start, end)).to(self._memory.device, non_blocking=True)

    def write(self, table: Table, start: int, end: int, rows: Sequence[torch.Tensor]) -> None:
        """Put rows of [start, end) where the table has room for them."""
        begin = table.run(start, end)
        cells = self.cells(table, start, end) if begin is None else slice(begin, begin + end - start)
        self._memory.write(cells, rows)

    def _size(self, tokens: int) -> int:
        return payload_bytes(self._memory.groups, self._memory.dtype, tokens)

    def _buffer(self, tokens: int) -> Bytes:
        prepared = self._slots.take() if self._slots is not None and tokens == _CHUNK else None
        return np.empty(self._size(tokens), np.uint8) if prepared is None else prepared


class PinnedSlots:
    """Host memory that a device copies from at full speed, in pieces of one size.

    Making it takes a third of a second per gigabyte, so a thread of its own makes it ahead. A piece that nobody
    holds any more is used again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[Bytes] = deque()  # filled by finalizers, which run on any thread
        self._wanted = threading.Event()
        self._wanted.set()
        threading.Thread(target=_prepare, args=(weakref.ref(self),), name="emberkeep-pinned", daemon=True).start()

    def take(self) -> Bytes | None:
        """None while there is none: more is on its way."""
        if len(self._free) * self._size < _AHEAD:
            self._wanted.set()
        try:
            memory = self._free.popleft()
        except IndexError:
            return None
        piece = memory[:]
        weakref.finalize(piece, self._free.append, memory)
        return piece

    def prepare(self) -> None:
        """Make what is wanted, in slabs of a power of two: torch rounds every allocation up to one."""
        self._wanted.wait(_LOOKS_S)
        if not self._wanted.is_set():
            return
        self._wanted.clear()
        while len(self._free) * self._size < _AHEAD:
            slab = torch.empty(max(_SLAB, self._size), dtype=torch.uint8, pin_memory=True).numpy()
            stride = self._size + -self._size % 64
            self._free.extend(slab[i : i + self._size] for i in range(0, len(slab) - self._size + 1, stride))


def _prepare(slots: weakref.ref[PinnedSlots]) -> None:
    """Until nobody has the slots any more."""
    while (there := slots()) is not None:
        there.prepare()
        del there
