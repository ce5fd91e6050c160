"""What payloads pass through on a CUDA device, so that each of them is one copy.

stores   gather   | half 0 | half 1 | half 0 |
         copy              | half 0 | half 1 | half 0 |
loads    copy     | half 0 | half 1 | half 0 |
         place             | half 0 | half 1 | half 0 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import torch

from emberkeep.engine.hf.pool import KvMemory


@dataclass(slots=True)
class Half:
    """Memory of the device for a few payloads, without their heads."""

    memory: torch.Tensor
    data: torch.Tensor
    """Of the memory as much as is used now, payload by payload."""
    free: torch.cuda.Event | None = None
    """When what was in it is not needed any more."""

    def wait(self) -> None:
        """What the current stream is told next comes after that."""
        if self.free is not None:
            torch.cuda.current_stream(self.memory.device).wait_event(self.free)


class Staging:
    """What payloads pass through on the device, in two halves: one is gathered, or put into place, while the other
    is copied. Copies are made by the current stream."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory, self._device = memory, memory.device
        self._beside = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None
        nothing = torch.empty(0, dtype=memory.dtype, device=memory.device)
        self._halves = cycle([Half(nothing, nothing), Half(nothing, nothing)])

    def begin(self) -> None:
        """What is gathered comes after everything that the current stream was told so far."""
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def placing(self) -> Iterator[None]:
        """What the current stream is told after it comes after everything that is put into place in it."""
        try:
            yield
        finally:
            if self._beside is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._beside)

    def take(self, count: int, tokens: int) -> Half:
        """For so many payloads; what was in this half before is overwritten once it is free."""
        half = next(self._halves)
        size = tokens * self._memory.bytes_per_token // self._memory.dtype.itemsize
        if len(half.memory) < count * size:
            if self._beside is not None:
                torch.cuda.synchronize(self._device)  # whoever gets the old memory does not wait for it
            half.memory = torch.empty(count * size, dtype=self._memory.dtype, device=self._device)
        half.data = half.memory[: count * size].view(count, size)
        return half

    @contextmanager
    def copying(self, half: Half, gather: Callable[[], None]) -> Iterator[None]:
        """`gather` fills the half as soon as it is free; then the current stream copies it, as told within."""
        if self._beside is None:
            gather()
            yield
            return
        with torch.cuda.stream(self._beside):
            half.wait()
            gather()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._beside.record_event())
        yield
        half.free = current.record_event()

    def after_copies(self, half: Half, place: Callable[[], None]) -> None:
        """`place` uses what the current stream has been told to copy into the half."""
        if self._beside is None:
            place()
            return
        self._beside.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._beside):
            place()
        half.free = self._beside.record_event()
