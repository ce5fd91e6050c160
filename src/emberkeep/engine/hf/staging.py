"""What is copied between RAM and a device, and how that goes on beside the steps: RAM that a GPU can fetch from
and bring to by itself, for weights, stored state and logits; memory of the device that payloads pass through, so
that each of them is one copy; streams and marks that order copies and steps.

stores   gather   | half 0 | half 1 | half 0 |
         copy              | half 0 | half 1 | half 0 |
loads    copy     | half 0 | half 1 | half 0 |
         place             | half 0 | half 1 | half 0 |
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, takewhile
from typing import NamedTuple

import numpy as np
import torch

from emberkeep.engine.base import Logits, Logprobs, Payload
from emberkeep.engine.hf.pool import KvMemory
from emberkeep.errors import EngineError, StepFailed
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")


@dataclass(slots=True)
class Half:
    """Memory of the device for a few payloads, without their heads."""

    memory: torch.Tensor
    data: torch.Tensor
    """As much of the memory as is used now, payload by payload."""
    copies: torch.cuda.Stream | None
    """Each half has its own: the copies of one need not have ended when those of the other begin."""
    free: torch.cuda.Event | None = None
    """When what was in it is not needed any more."""


class DeviceStaging:
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


class Mark:
    """A moment in what a device does; without an event it has passed."""

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    @property
    def has_passed(self) -> bool:
        """Raises what torch raises where the device has failed."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks until then. Raises what torch raises where the device has failed."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """What the device is told from now on waits until then; this thread does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class SideStream:
    """Belongs to the engine's thread. Elsewhere than on CUDA everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: deque[tuple[Mark, object]] = deque()

    def run(self, work: Callable[[], None], held: object) -> Mark:
        """Let the device do `work` beside its steps, after everything that it was told so far; returns when it is
        done. Memory of the device that `work` allocates must not be used outside of this stream; `held`, memory of
        the host that it reads or writes, is held until then. Raises what `work` raises.
        """
        self.let_go()
        if self._stream is None:
            work()
            return Mark()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                work()
        except Exception:
            self._mark(self._stream, held).hold_back()  # a part of it may be under way
            raise
        return self._mark(self._stream, held)

    def let_go(self) -> None:
        """Let go of what was held for work that is done."""
        while self._held and self._held[0][0].has_passed:
            self._held.popleft()

    def close(self) -> None:
        """Blocks until everything is done. Never raises: a device that has failed does nothing more."""
        while self._held:
            with suppress(RuntimeError):
                self._held.popleft()[0].wait()

    def _mark(self, stream: torch.cuda.Stream, held: object) -> Mark:
        mark = Mark(stream.record_event(), self._device)
        self._held.append((mark, held))
        return mark


class HostMemory:
    """Pinned, as long as the system allows it."""

    def __init__(self, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned

    def allocate(self, size: int) -> torch.Tensor:
        """Bytes that hold nothing yet. They go back with the last tensor or array that shows them."""
        # Whole pages, which only this tensor is in: a page cannot be pinned twice.
        pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if self.is_pinned:
            memory.zero_()  # the device is held up while pages are pinned, so they are brought in before
            try:
                pages.pin(memory.data_ptr(), size)
            except RuntimeError as error:
                log.warning("memory could not be pinned, so copies from RAM are slower: %s", error)
                self.is_pinned = False
        return memory


class _Pages(mmap.mmap):
    """Pinned for as long as they are mapped: tensors come and go that show the same bytes, and hold this."""

    _pinned: int | None = None
    """Where."""

    def pin(self, place: int, size: int) -> None:
        """Not by `pin_memory`, which would round its size up to a power of two, and would keep it for itself.
        Raises RuntimeError."""
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(place, size, 0))
        except RuntimeError:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA reports an error once more, at the next kernel
            raise
        self._pinned = place

    def __del__(self) -> None:
        if self._pinned is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


class HostLogits:
    """Logits on their way from the device to the sampler: they come when they are asked for.

    Belongs to the engine's thread. What was taken for one step is overwritten by the next.
    """

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        is_cuda = device.type == "cuda"
        self._buffer = torch.empty((rows, width), dtype=torch.float32, pin_memory=True) if is_cuda else None
        self._logits: torch.Tensor | None = None
        self._rows: Logits | None = None

    def take(self, logits: torch.Tensor | None) -> None:
        """Rows of any dtype, which may still be computed; None: nobody will ask for them."""
        self._logits, self._rows = logits, None

    def rows(self) -> Logits:
        """The logits of the latest step, as float32. Blocks until they are there."""
        if self._rows is None:
            if self._logits is None:
                raise EngineError("The logits of this step were not wanted.")
            if self._buffer is None:
                self._rows = self._logits.float().cpu().numpy()
            else:
                self._buffer[: len(self._logits)].copy_(self._logits, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                self._rows = self._buffer[: len(self._logits)].numpy()
            self._logits = None
        return self._rows


class ChosenTokens(NamedTuple):
    """What a step chose: a row for each of its outputs."""

    tokens: list[int]
    told: Sequence[list[float]] = ()
    """What rows tell, where any do: see `adjusting`."""

    def logprobs(self, row: int) -> Logprobs:
        own, *told = self.told[row]
        likeliest = takewhile(lambda one: one[0] >= 0, zip(told[::2], told[1::2], strict=False))
        return own, [(int(token), logprob) for token, logprob in likeliest]


@dataclass(frozen=True, slots=True)
class Found:
    """What was chosen for one of a batch."""

    chosen: ChosenTokens | None
    """None: nothing was, there are logits."""
    first: int
    """The place of its first output among all."""
    steps: int = 1
    """How many steps it took, the first with its rows, each of the others with the token chosen before it."""

    @property
    def went_on(self) -> list[int]:
        """The tokens of those others."""
        if self.chosen is None or self.steps == 1:
            return []
        return self.chosen.tokens[self.first : self.first + self.steps - 1]

    def logprobs(self, row: int) -> Logprobs:
        assert self.chosen is not None
        return self.chosen.logprobs(self.first + row)


@contextmanager
def translate_errors() -> Iterator[None]:
    """What torch and transformers raise becomes an EngineError."""
    try:
        yield
    except EngineError:
        raise
    except torch.OutOfMemoryError as error:
        raise StepFailed("The device ran out of memory: lower parallel or ctx.") from error
    except Exception as error:
        raise StepFailed(f"The model failed: {error}") from error


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """Payloads that the device fills beside its steps. See `KvExport`."""

    copies: list[Payload]
    mark: Mark
    whole: int
    """Bytes of most payloads. Smaller ones are moved out of the memory that they arrived in, where others will."""

    @property
    def is_done(self) -> bool:
        try:
            return self.mark.has_passed
        except Exception:  # the device has failed, as `payloads` will say
            return True

    def payloads(self) -> list[Payload]:
        with translate_errors():
            self.mark.wait()
        return [copy if len(copy) >= self.whole else memoryview(np.array(copy)) for copy in self.copies]
