"""Folders that several processes use: locks that die with their process, and what lies in them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from emberkeep.files import locked, private_folder
from emberkeep.kv.disk.chunkfile import namespace_of

INDEX = "index.db"
CHUNKS, QUARANTINE, TMP = "chunks", "quarantine", "tmp"
OWNER = "owner"
is_chunk_name = re.compile(r"[0-9a-f]{64}\.kv").fullmatch


def hold(folder: Path, lock_name: str, mode: int) -> ExitStack:
    """Make `folder` and lock it, until that is closed; begins again when another process removed it as unused in
    between."""
    while True:
        private_folder(folder)
        with suppress(FileNotFoundError), ExitStack() as stack:
            stack.enter_context(locked(folder / lock_name, mode))
            if (folder / lock_name).exists():
                return stack.pop_all()


def is_unused(path: Path) -> bool:
    """No process has the store in `path` open."""
    try:
        with locked(path / "in-use", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
    except OSError:
        return False


def remove_if_unused(path: Path, lock_name: str = "in-use") -> bool:
    try:
        with locked(path / lock_name, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path, ignore_errors=True)
            return True
    except OSError:
        return False


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
    """Returns what is in it, nothing where it is gone. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def bytes_below(folder: Path) -> int:
    """Sums up all files, as far as they can be seen."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return total


# ── damaged files ──

_MOST_QUARANTINED = 32
_MOST_QUARANTINED_BYTES = 64 << 20


class Quarantine:
    """Safe to use from any thread; blocks on disk. Raises OSError from the constructor only, unless it says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)
        self.bytes = 0
        """What is in it, as of the last look: other processes use the same one."""
        self.trim()

    def put(self, path: Path) -> bool:
        """Move a file here; one that cannot be moved is deleted. False: it is still where it was."""
        try:
            path.rename(self._folder / f"{path.stem}.{uuid.uuid4().hex[:8]}")
        except FileNotFoundError:
            return True
        except OSError:
            try:
                delete(path)
            except OSError:
                return False
        self.trim()
        return True

    def trim(self) -> None:
        """Delete the oldest until there are few enough, and count what is left."""
        found: list[tuple[int, Path, int]] = []
        """When each came, its path and its bytes."""
        with suppress(OSError):
            for path in self.paths():
                with suppress(OSError):
                    status = os.lstat(path)
                    found.append((status.st_ctime_ns, path, status.st_size))
        found.sort()
        size = sum(bytes_ for _, _, bytes_ in found)
        excess = len(found) - _MOST_QUARANTINED
        for place, (_, path, bytes_) in enumerate(found):
            if place >= excess and size <= _MOST_QUARANTINED_BYTES:
                break
            with suppress(OSError):
                delete(path)
                size -= bytes_
        self.bytes = size

    def empty(self) -> None:
        """Raises OSError."""
        for path in self.paths():
            delete(path)
        self.bytes = 0

    def paths(self) -> list[Path]:
        """Raises OSError."""
        return list(self._folder.iterdir())


# ── what belongs to a user ──


def sweep_files(folder: Path, whose: Container[str]) -> int:
    """Delete their files in the store in `folder`; returns the bytes that went.

    chunks      whatever says that it is theirs, and what is named like a chunk and does not say whose it is: no
                lookup could use that
    quarantine  the same, whatever its name
    tmp         what says that it is theirs; the rest is being written, or was when its process died

    Raises OSError when some could not be looked at or deleted: the others are gone all the same.
    """
    swept, failed = 0, None
    known: dict[str | None, bool] = {}
    for path, goes_unless_it_says in _candidates(folder):
        try:
            namespace = namespace_of(path)
            if namespace not in known:
                known[namespace] = namespace is not None and namespace in whose
            if known[namespace] or (namespace is None and goes_unless_it_says):
                size = os.lstat(path).st_size
                delete(path)
                swept += size
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return swept


def _candidates(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yields files, and whether one that does not say whose it is goes as well. Raises OSError."""
    for inner in list_folder(folder / CHUNKS):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), is_chunk_name(entry.name) is not None
    for entry in list_folder(folder / QUARANTINE):
        yield Path(entry.path), True
    for inner in list_folder(folder / TMP):
        for entry in list_folder(Path(inner.path)) if inner.is_dir(follow_symlinks=False) else ():
            if entry.is_file(follow_symlinks=False) and entry.name != OWNER:
                yield Path(entry.path), False
