"""Whole files into RAM at the speed of the disk.

What the kernel has cached is copied from there. The rest is read past its cache: on the way to the first token
the processor is busy with tokenising and importing, and copying every byte once more costs more of it than
the disk takes. Memory that nobody has touched yet costs as much again, so a few buffers are kept ready.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque

import numpy as np

_PAGE = 4096
_WORTH_IT = 1 << 20
"""Smaller files are read into ordinary memory in the ordinary way."""
_READY_BYTES = 128 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class EndsEarly(Exception):
    """The file is shorter than it was a moment ago."""


class Buffers:
    """Page-aligned memory, some of it touched in advance. Safe to use from any thread."""

    def __init__(self) -> None:
        self._ready: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """At least `size` bytes, a multiple of the page size; the caller's alone."""
        with self._lock:
            if self._ready and len(self._ready[-1]) >= size:
                return self._ready.pop()
        return _fresh(size)

    def refill(self, size: int, limit: int) -> None:
        """Make buffers of `size` ready, up to `limit` bytes in all. Blocks: call it when nothing is urgent."""
        count = min(_READY_BYTES, limit) // max(size, 1) if size >= _WORTH_IT else 0
        while True:
            with self._lock:
                if self._ready and len(self._ready[-1]) < size:
                    self._ready.clear()
                if len(self._ready) >= count:
                    return
            touched = _fresh(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)
            with self._lock:
                self._ready.append(touched)


def read_file(descriptor: int, size: int, buffers: Buffers) -> memoryview:
    """The first `size` bytes of the file. Blocks on disk. Raises OSError, EndsEarly."""
    if size < _WORTH_IT:
        small = memoryview(np.empty(size, np.uint8))
        _read_rest(descriptor, small, 0)
        return small
    buffer = buffers.take(size)
    if _is_cached(descriptor, buffer, size) or not _read_directly(descriptor, buffer, size):
        _read_rest(descriptor, buffer[:size], 0)
    return buffer[:size]


def _fresh(size: int, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-size // _PAGE) * _PAGE, flags=flags))


def _is_cached(descriptor: int, buffer: memoryview, size: int) -> bool:
    """Whether the kernel has the file's last page, and so most likely all of it.

    The last one, because a question about any other makes the kernel read ahead from there.
    """
    try:
        last = (size - 1) // _PAGE * _PAGE
        return _NOWAIT != 0 and os.preadv(descriptor, [buffer[:_PAGE]], last, _NOWAIT) > 0
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise


def _read_directly(descriptor: int, buffer: memoryview, size: int) -> bool:
    """Read past the page cache; False where the file system does not do that."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    offset = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while offset < size:
            count = os.preadv(descriptor, [buffer[offset:]], offset)
            if count == 0:
                raise EndsEarly
            offset += count
            if offset < size and offset % _PAGE:
                return False  # only the end of a file may be unaligned
        return True
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _read_rest(descriptor: int, buffer: memoryview, offset: int) -> None:
    while offset < len(buffer):
        count = os.preadv(descriptor, [buffer[offset:]], offset)
        if count == 0:
            raise EndsEarly
        offset += count
