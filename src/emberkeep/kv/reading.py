"""Whole files into RAM at the speed of the disk.

What the kernel has cached is copied from there. The rest is read past its cache, into a few desks that are used
over and over: where the disk is a virtual one, memory that it has not written to before halves its speed,
and a copy from the desk costs less than that. Memory that nobody has touched yet makes the copy slow in
turn, so some of it is kept ready.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Page-aligned memory, touched in advance. Safe to use from any thread."""

    def __init__(self) -> None:
        self._ready: deque[memoryview] = deque()
        self._desks: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """At least `size` bytes; the caller's alone."""
        return self._pop(self._ready, size) or _fresh(size)

    @contextmanager
    def desk(self, size: int) -> Iterator[memoryview]:
        """At least `size` bytes, a multiple of the page size, whose contents nobody needs afterwards."""
        desk = self._pop(self._desks, size) or _fresh(size)
        try:
            yield desk
        finally:
            with self._lock:
                self._desks.append(desk)

    def refill(self, size: int, limit: int, desks: int) -> None:
        """Make memory for files of `size` ready, up to `limit` bytes, and `desks` to read them on.

        Blocks: call it when nothing is urgent.
        """
        if size >= _WORTH_IT:
            self._fill(self._desks, size, desks)
            self._fill(self._ready, size, min(_READY_BYTES, limit) // size)

    def _pop(self, shelf: deque[memoryview], size: int) -> memoryview | None:
        with self._lock:
            return shelf.pop() if shelf and len(shelf[-1]) >= size else None

    def _fill(self, shelf: deque[memoryview], size: int, count: int) -> None:
        while True:
            with self._lock:
                if shelf and len(shelf[-1]) < size:
                    shelf.clear()
                if len(shelf) >= count:
                    return
            touched = _fresh(size, _POPULATE)
            with self._lock:
                shelf.append(touched)


def read_file(descriptor: int, size: int, buffers: Buffers) -> memoryview:
    """The first `size` bytes of the file. Blocks on disk. Raises OSError, EndsEarly."""
    if size < _WORTH_IT:
        small = memoryview(np.empty(size, np.uint8))
        _read_rest(descriptor, small, 0)
        return small
    buffer = buffers.take(size)[:size]
    with buffers.desk(size) as desk:
        if _is_cached(descriptor, desk, size) or not _read_directly(descriptor, desk, size):
            _read_rest(descriptor, buffer, 0)
        else:
            # Slice assignment would hold the interpreter's lock.
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(desk[:size], np.uint8))
    return buffer


def _fresh(size: int, flags: int = 0) -> memoryview:
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
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
