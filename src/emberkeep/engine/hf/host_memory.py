"""RAM that a GPU can fetch from and bring to by itself: weights wait in it, stored state and logits."""

from __future__ import annotations

import logging
import mmap
import sys
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import Logits

log = logging.getLogger("emberkeep.engine")


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
    """Logits on their way from the device to the sampler: they come when they are asked for, and which of them is
    the highest comes at once.

    Belongs to the engine's thread. What was taken for one step is overwritten by the next.
    """

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        is_cuda = device.type == "cuda"
        self._buffer = torch.empty((rows, width), dtype=torch.float32, pin_memory=True) if is_cuda else None
        self._best = torch.empty(rows, dtype=torch.int64, pin_memory=is_cuda)
        self.likeliest: npt.NDArray[np.int64] | None = None
        """Where each row was found on the device."""
        self._logits: torch.Tensor | None = None
        self._rows: Logits | None = None

    def take(self, logits: torch.Tensor, likeliest: torch.Tensor | None) -> None:
        """Rows of any dtype. Blocks until they are computed."""
        self._logits, self._rows, self.likeliest = logits, None, None
        if likeliest is not None:
            self._best[: len(likeliest)].copy_(likeliest, non_blocking=True)
            self.likeliest = self._best.numpy()
        self._wait()

    def rows(self) -> Logits:
        """The logits of the latest step, as float32. Blocks until they are there."""
        if self._rows is None:
            assert self._logits is not None
            if self._buffer is None:
                self._rows = self._logits.float().cpu().numpy()
            else:
                self._buffer[: len(self._logits)].copy_(self._logits, non_blocking=True)
                self._wait()
                self._rows = self._buffer[: len(self._logits)].numpy()
            self._logits = None
        return self._rows

    def _wait(self) -> None:
        if self._buffer is not None:
            torch.cuda.current_stream().synchronize()
