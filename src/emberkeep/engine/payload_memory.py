"""RAM for payloads of about one size: prepared ahead by a thread, and used again when a payload is gone.

Memory that nobody has touched yet takes several times as long to write to as to copy to; memory that a device
can copy to at full speed has to be pinned before, which takes a third of a second per gigabyte.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from time import sleep

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import total_ram

log = logging.getLogger("emberkeep.engine")

Bytes = npt.NDArray[np.uint8]

SLAB = 64 << 20
"""Bytes that are prepared at once, about: whoever computes or copies meanwhile is held up for so long."""
_LARGEST = 256 << 20
"""Bytes of the largest payload that memory is prepared for."""
_PAUSE_S = 0.01
"""Between slabs, unless less than half of what is to be ready is."""
_AHEAD, _PART_AHEAD = 1 << 30, 16
"""Bytes that are kept ready, and no more than one part of RAM of so many."""
_MOST_PART = 4
"""What is prepared in all is at most one part of RAM of so many: as much as payloads may take by default."""
_PAGE = 4096
_HEAD = 2 * _PAGE
"""Bytes that a payload may be longer by: its file has a head."""


class PayloadMemory:
    """Pieces may be taken and let go of by any thread. They are whole pages, if the memory begins with one."""

    def __init__(self, size: int) -> None:
        """`size`: of most payloads."""
        self._payload = size
        self.size = -(-(size + _HEAD) // _PAGE) * _PAGE
        self._free: deque[Bytes] = deque()  # also filled by finalizers, which run on any thread
        self._ahead = min(_AHEAD, total_ram() // _PART_AHEAD)
        self._slab = max(SLAB // self.size, 1) * self.size
        self._is_low, self._is_closed = Event(), False

    def start(self, make: Callable[[int], Bytes], begin: Callable[[], None] = lambda: None) -> None:
        """From now on a thread keeps pieces ready, in memory that it lets `make`. `begin` is what it does first,
        and has done when this returns."""
        if self.size <= _LARGEST:
            has_begun = Event()
            self._is_low.set()
            arguments = (make, begin, has_begun)
            Thread(target=self._prepare, args=arguments, name="emberkeep-payloads", daemon=True).start()
            has_begun.wait()

    def add(self, slab: Bytes) -> None:
        self._free.extend(slab[i : i + self.size] for i in range(0, len(slab) - self.size + 1, self.size))

    def take(self, size: int, *, is_brief: bool = False) -> Bytes:
        """So many bytes: of a prepared piece, if there is one for it; else new memory. Hold the array itself, or a
        memoryview of it: an array that is cut out of it does not hold the piece. `is_brief`: it is held for a
        moment, so it may be much smaller than its piece."""
        piece = self._take(size, size, least=0 if is_brief else self._payload)
        return np.empty(size, np.uint8) if piece is None else piece

    def take_whole(self, size: int) -> Bytes | None:
        """As `take`, with everything behind it that belongs to the piece; None if there is none."""
        return self._take(size, self.size, least=self._payload)

    def _take(self, size: int, length: int, *, least: int) -> Bytes | None:
        try:
            memory = self._free.popleft() if least <= size <= self.size else None
        except IndexError:
            memory = None
        if self._ready < self._ahead:
            self._is_low.set()
        if memory is None:
            return None
        piece = memory[:length]
        # Not at exit: pieces are still held then, and threads may still take some.
        weakref.finalize(piece, self._free.append, memory).atexit = False
        return piece

    @property
    def _ready(self) -> int:
        return len(self._free) * self.size

    def close(self) -> None:
        """Nothing more is prepared. What was taken stays."""
        self._is_closed = True
        self._is_low.set()

    def _prepare(self, make: Callable[[int], Bytes], begin: Callable[[], None], has_begun: Event) -> None:
        begin()
        has_begun.set()
        left = total_ram() // _MOST_PART // self._slab
        while left:
            self._is_low.wait()
            self._is_low.clear()
            while left and not self._is_closed and self._ready < self._ahead:
                if self._ready > self._ahead // 2:
                    sleep(_PAUSE_S)
                try:
                    self.add(make(self._slab))
                except (MemoryError, OSError, RuntimeError) as error:
                    log.info("no more memory is prepared for stored state: %s", error)
                    return
                left -= 1
            if self._is_closed:
                return
