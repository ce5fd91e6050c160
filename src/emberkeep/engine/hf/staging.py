"""What payloads pass through on a CUDA device, so that each of them is one copy.

stores   gather   | half 0 | half 1 | half 0 |
         copy              | half 0 | half 1 | half 0 |
loads    copy     | half 0 | half 1 | half 0 |
         place             | half 0 | half 1 | half 0 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch

from emberkeep.engine.hf.pool import KvMemory
from emberkeep.values import dataclass


@dataclass(slots=True)
class Half:
    """Memory of the device for a few payloads, without their heads."""

    memory: torch.Tensor
    data: torch.Tensor
    """Of the memory as much as is used now, payload by payload."""
    copies: torch.cuda.Stream | None
    """Each half has its own: the copies of one need not have ended when those of the other begin."""
    free: torch.cuda.Event | None = None
    """When what was in it is not needed any more."""


class Staging:
    """What payloads pass through on the device, in two halves: one is gathered, or put into place, while the other
    is copied. What the current stream is told afterwards comes after all of it."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory, self._device = memory, memory.device
        self._is_cuda = memory.device.type == "cuda"
        self._beside = self._new_stream()
        nothing = torch.empty(0, dtype=memory.dtype, device=memory.device)
        self._both = [Half(nothing, nothing, self._new_stream()) for _ in range(2)]
        self._halves = cycle(self._both)

    def begin(self) -> None:
        """What is gathered and copied comes after everything that the current stream was told so far."""
        for stream in (self._beside, *(half.copies for half in self._both)):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def take(self, count: int, tokens: int) -> Half:
        """For so many payloads; what was in this half before is overwritten once it is free."""
        half = next(self._halves)
        size = tokens * self._memory.bytes_per_token // self._memory.dtype.itemsize
        if len(half.memory) < count * size:
            if self._is_cuda:
                torch.cuda.synchronize(self._device)  # whoever gets the old memory does not wait for it
            half.memory = torch.empty(count * size, dtype=self._memory.dtype, device=self._device)
        half.data = half.memory[: count * size].view(count, size)
        return half

    @contextmanager
    def leaving(self, half: Half, gather: Callable[[], None]) -> Iterator[None]:
        """`gather` fills the half as soon as it is free; then it is copied as told within."""
        with self._using(half, self._beside, half.copies):
            with self._on(self._beside, after=half.free):
                gather()
            with self._on(half.copies, after=_now(self._beside)):
                yield

    @contextmanager
    def entering(self, half: Half, place: Callable[[], None]) -> Iterator[None]:
        """The half is filled as told within as soon as it is free; then `place` uses it."""
        with self._using(half, half.copies, self._beside):
            with self._on(half.copies, after=half.free):
                yield
            with self._on(self._beside, after=_now(half.copies)):
                place()

    def _new_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._is_cuda else None

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def _using(
        self, half: Half, first: torch.cuda.Stream | None, last: torch.cuda.Stream | None
    ) -> Iterator[None]:
        """It is free again when both have done what they are told within, whether that was all or not."""
        try:
            yield
        finally:
            if first is not None and last is not None:
                last.wait_event(first.record_event())
                half.free = last.record_event()
                torch.cuda.current_stream(self._device).wait_event(half.free)


def _now(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """When it has done what it was told so far."""
    return None if stream is None else stream.record_event()
