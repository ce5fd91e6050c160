"""The disk under a store: making the next read a real one, and measuring how fast it could be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

_BLOCK = 4 << 20


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


def read_bandwidth(files: Iterable[Path]) -> float:
    """Bytes per second of reading whole files one after the other, from disk if they are not cached."""
    buffer = bytearray(_BLOCK)
    total, begin = 0, perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total / (perf_counter() - begin)
