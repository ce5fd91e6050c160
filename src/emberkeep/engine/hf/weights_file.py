"""Weights that RAM has no room for: they lie in a file, and those that come next are read ahead.

file       0 | 1 | 2 | 3 | 4          parts, wanted in this order again and again
buffers        2   3                  read ahead by a thread, in the order in which they will be wanted
taken          1                      until its copy to the device is done; then its buffer is filled with 4
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch

from emberkeep.errors import EngineError
from emberkeep.files import private_folder
from emberkeep.values import dataclass

_PAGE = 4096
"""Bytes: parts begin at a multiple of it."""


@dataclass(slots=True)
class ReadBuffer:
    memory: torch.Tensor
    copied: Any = None
    """An event of CUDA, after which the buffer may be filled again; None: it may be at once."""

    def settle(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


@dataclass(frozen=True, slots=True)
class _Reading:
    number: int
    buffer: ReadBuffer
    run: int


class WeightsFile:
    """First every part is written, then parts are taken, all by one thread; another one reads.

    The file has no name, so nothing is left of it when the process ends, however that happens.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], buffers: Sequence[torch.Tensor]) -> None:
        """Each of the `buffers` is as large as the largest part. Raises EngineError."""
        self._sizes = sizes
        self._offsets = [0, *accumulate(-(-size // _PAGE) * _PAGE for size in sizes)]
        try:
            self._file = tempfile.TemporaryFile(dir=private_folder(folder), buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _failed("written to", error) from error
        self._changed = Condition()
        # Everything below is changed only while it is held.
        self._free = deque(ReadBuffer(memory) for memory in buffers)
        self._ready: deque[ReadBuffer] = deque()
        self._wanted = 0
        """The part that `take` is to give next, unless it is asked for another."""
        self._next = 0
        """The part that is read next."""
        self._run = 0
        """Parts are read in their order within a run; another one begins where `take` leaves it."""
        self._error: Exception | None = None
        self._is_closed = False
        self.read_bytes = 0
        self._thread = Thread(target=self._read_ahead, name="emberkeep-weights", daemon=True)

    def write(self, number: int, part: torch.Tensor) -> None:
        """Blocks. Raises EngineError."""
        data, offset = memoryview(part.numpy()), self._offsets[number]
        try:
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _failed("written to", error) from error

    def start(self) -> None:
        """Once every part was written."""
        self._thread.start()

    def take(self, number: int) -> ReadBuffer:
        """The buffer that begins with this part; it is the caller's until `give_back`.

        Blocks until it is read: not for long, if it is the part behind the one that was taken before. What could
        not be read ahead is tried once more. Raises EngineError, after which any part may be asked for.
        """
        with self._changed:
            if number != self._wanted:
                self._begin_run(number)
            self._error = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._error or self._is_closed)
            if self._is_closed:
                raise EngineError("The model is being closed.")
            if self._error is not None and not self._ready:
                raise _failed("read from", self._error) from self._error
            self._wanted = (number + 1) % len(self._sizes)
            return self._ready.popleft()

    def give_back(self, buffer: ReadBuffer, copied: Any = None) -> None:
        """`copied`: an event of CUDA, after which nothing reads the buffer."""
        buffer.copied = copied
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Blocks until the thread has ended, which takes one read at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._file.close()

    def _begin_run(self, number: int) -> None:
        self._run += 1
        self._wanted = self._next = number
        self._free += self._ready
        self._ready.clear()

    # ── in the thread ──

    def _read_ahead(self) -> None:
        while reading := self._begin_reading():
            try:
                reading.buffer.settle()
                self._fill(reading.buffer.memory, reading.number)
                error = None
            except (OSError, RuntimeError) as failed:
                error = failed
            self._end_reading(reading, error)

    def _begin_reading(self) -> _Reading | None:
        """Waits for a buffer. None: the file is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._free and self._error is None))
            if self._is_closed:
                return None
            number = self._next
            self._next = (number + 1) % len(self._sizes)
            return _Reading(number, self._free.popleft(), self._run)

    def _end_reading(self, reading: _Reading, error: Exception | None) -> None:
        with self._changed:
            is_wanted = reading.run == self._run
            if error is None:
                self.read_bytes += self._sizes[reading.number]
            elif is_wanted:
                self._error, self._next = error, reading.number
            (self._ready if is_wanted and error is None else self._free).append(reading.buffer)
            self._changed.notify_all()

    def _fill(self, memory: torch.Tensor, number: int) -> None:
        data, offset = memoryview(memory.numpy())[: self._sizes[number]], self._offsets[number]
        while data:
            count = os.preadv(self._file.fileno(), [data], offset)
            if not count:
                raise OSError("the file has become shorter")
            data, offset = data[count:], offset + count


def _failed(what: str, error: Exception) -> EngineError:
    reason = getattr(error, "strerror", None) or error
    return EngineError(
        f"Weights that RAM has no room for cannot be {what} disk ({reason}): check the disk of the data folder, "
        "or choose a smaller model."
    )
