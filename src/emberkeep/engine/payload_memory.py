"""RAM for payloads of one size: prepared ahead, and used again when a payload is gone.

Memory that nobody has touched yet takes several times as long to write to as to copy to; memory that a device can
copy to at full speed takes a third of a second per gigabyte to prepare.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from emberkeep.config import total_ram

Bytes = npt.NDArray[np.uint8]

SLAB = 256 << 20
"""Bytes that are prepared at once."""
_MOST = 4 << 30
_ALIGNED = 64


def slab_count() -> int:
    """How many of them are prepared: up to 4 GiB, and no more than a sixteenth of RAM."""
    return min(_MOST, total_ram() // 16) // SLAB


class PayloadMemory:
    """Pieces may be taken and let go of by any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: deque[Bytes] = deque()  # also filled by finalizers, which run on any thread

    def add(self, slab: Bytes) -> None:
        stride = self.size + -self.size % _ALIGNED
        self._free.extend(slab[i : i + self.size] for i in range(0, len(slab) - self.size + 1, stride))

    def take(self, size: int) -> Bytes:
        """A prepared piece, if it is of that size and there is one; else new memory."""
        try:
            memory = self._free.popleft() if size == self.size else None
        except IndexError:
            memory = None
        if memory is None:
            return np.empty(size, np.uint8)
        piece = memory[:]
        weakref.finalize(piece, self._free.append, memory)
        return piece
