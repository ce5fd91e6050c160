"""Files and folders that only their owner can read, written so that a crash leaves the old or the new."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make `path`, and whatever is missing above it, so that only its owner can enter; return it.

    What was made survives a power cut, where the file system can promise that.
    """
    missing = takewhile(lambda folder: not folder.exists(), (path, *path.parents))
    for folder in reversed(list(missing)):
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):
            sync(folder.parent)
    return path


def nearest_folder(path: Path) -> Path:
    """The path itself, or the first above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` atomically and durably, with mode 0600. After an OSError nothing has changed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Hold an exclusive lock on `path` until the block ends, against all threads and processes. It stays empty.

    Blocks. Raises OSError.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Make `target` a hard link where the file system allows it, else a copy. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
