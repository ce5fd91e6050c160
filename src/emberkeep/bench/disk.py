"""The disk under a store: making the next read a real one, and measuring how fast it could be."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter

_BLOCK = 4 << 20
_READERS = 4


def chunk_files(data_dir: Path) -> list[Path]:
    return sorted(data_dir.glob("kv/*/chunks/*/*.kv"))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Forces them to disk first, because only clean pages can be dropped. Does nothing on systems without it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_bandwidth(files: Sequence[Path]) -> float:
    """Bytes per second at which these files come from the disk when nothing else is to be done.

    The best of reading through the page cache and past it.
    """
    return max(_bandwidth(files, flags) for flags in {0, getattr(os, "O_DIRECT", 0)})


def _bandwidth(files: Sequence[Path], flags: int) -> float:
    """0 where the file system does not read that way."""
    own = threading.local()

    def read(path: Path) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, _BLOCK)  # page-aligned, as direct reads want it
        descriptor, total = os.open(path, os.O_RDONLY | flags), 0
        try:
            while (count := os.preadv(descriptor, [own.buffer], total)) == _BLOCK:
                total += count
            return total + count
        finally:
            os.close(descriptor)

    drop_from_page_cache(files)
    with suppress(OSError), ThreadPoolExecutor(_READERS) as readers:
        begin = perf_counter()
        return sum(readers.map(read, files)) / (perf_counter() - begin)
    return 0.0
