"""Folders that several processes use: locks that die with their process, and what lies in them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from emberkeep.files import private_folder

INDEX = "index.db"
CHUNKS, QUARANTINE, TMP = "chunks", "quarantine", "tmp"
OWNER = "owner"
is_chunk_name = re.compile(r"[0-9a-f]{64}\.kv").fullmatch


def hold(folder: Path, lock_name: str, mode: int) -> int:
    """Make `folder` and lock it; begins again when another process removed it as unused in between."""
    while True:
        private_folder(folder)
        with suppress(FileNotFoundError):
            descriptor = lock(folder / lock_name, mode)
            if (folder / lock_name).exists():
                return descriptor
            os.close(descriptor)


def lock(path: Path, mode: int) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_unused(path: Path) -> bool:
    """No process has the store in `path` open."""
    try:
        os.close(lock(path / "in-use", fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def remove_if_unused(path: Path, lock_name: str = "in-use") -> bool:
    try:
        descriptor = lock(path / lock_name, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
    return True


def stores_under(root: Path) -> list[Path]:
    """The folders of all stores, the latest used first."""
    found = [path for path in root.iterdir() if _is_store(path)] if root.is_dir() else []
    return sorted(found, key=last_change, reverse=True)


def _is_store(path: Path) -> bool:
    return re.fullmatch("[0-9a-f]{32}", path.name) is not None and path.is_dir() and not path.is_symlink()


def last_change(folder: Path) -> float:
    """When a store was last written to, in seconds since 1970; 0 where that cannot be told."""
    try:
        return (folder / INDEX).stat().st_mtime
    except OSError:
        return 0.0


def delete(path: Path) -> None:
    """Whatever is there, a folder in the place of a file too. What is gone already is no error. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not path.is_dir() or path.is_symlink():
            raise
        shutil.rmtree(path)


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """What is in it, nothing where it is gone. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def bytes_below(folder: Path) -> int:
    """Of all files, as far as they can be seen."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return total
