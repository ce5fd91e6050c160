"""RAM that a GPU can fetch from and bring to by itself: weights wait in it, and stored state."""

from __future__ import annotations

import logging
import mmap
import sys
from contextlib import suppress

import torch

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
