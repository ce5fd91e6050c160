"""Files and folders that only their owner can read, written so that a crash leaves the old or the new; locks that
die with their process; digests of files, computed once per version and remembered in a folder; and files with one
JSON object per line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from emberkeep.errors import EmberkeepError
from emberkeep.values import dataclass


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


def sync(path: Path | str) -> None:
    """Wait until the file or folder at `path` is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, mode: int = fcntl.LOCK_EX) -> Generator[None, None, None]:
    """Hold a lock on `path` until the block ends, against all threads and processes; alone, unless `mode` says
    otherwise. The file stays empty. Blocks. Raises OSError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, mode)
        yield
    finally:
        os.close(lock)


def is_unused(folder: Path, lock_name: str) -> bool:
    """No process holds a lock in it."""
    try:
        with locked(folder / lock_name, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
    except OSError:
        return False


def remove_if_unused(folder: Path, lock_name: str) -> bool:
    """Remove it, unless a process holds a lock in it; returns whether."""
    try:
        with locked(folder / lock_name, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
            return True
    except OSError:
        return False


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


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Make `target` a hard link where the file system allows it, else a copy. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ── digests ──
BLOCK = 4 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells one version of a file from the next without reading it.

    Programs can give a file any time of modification; the time of its last change is the kernel's.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        """Raises OSError."""
        real = path.resolve(strict=True)
        stat = real.stat()
        return cls(str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class Changed(Exception):
    """A file was written to while it was read."""


def remembered_digest(path: Path, folder: Path, read: Callable[[Path], str] | None = None) -> str:
    """The SHA-256 of the file in hex, from `folder` where the file has not changed since.

    Blocks for a read of the whole file when it is not remembered. Any number of processes may share `folder`:
    each file has an entry of its own, replaced atomically. An unwritable or damaged entry only costs time.
    Raises OSError, Changed.
    """
    version = FileVersion.of(path)
    known = recall(version, folder)
    if known is not None:
        return known
    digest = (read or sha256_of)(path)
    if FileVersion.of(path) != version:
        raise Changed(f"{path} changed while it was read; try again when nothing writes to it.")
    remember(version, digest, folder)
    return digest


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Blocks for a read of the whole file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while block := file.read(BLOCK):
            digest.update(block)
            if progress is not None:
                progress(file.tell(), total)
    return digest.hexdigest()


def recall(version: FileVersion, folder: Path) -> str | None:
    try:
        entry = json.loads(_entry(version, folder).read_bytes())
        digest = entry.pop("sha256")
        return str(digest) if entry == asdict(version) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def remember(version: FileVersion, digest: str, folder: Path) -> None:
    """Best effort."""
    entry = json.dumps({**asdict(version), "sha256": digest})
    try:
        replace_file(_entry(version, private_folder(folder)), entry.encode())
    except OSError:
        return


def _entry(version: FileVersion, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(os.fsencode(version.path)).hexdigest()[:32]}.json"


# ── lines of JSON ──


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A new file that only its owner can read, whole or not at all. Raises EmberkeepError, and what `rows` raises;
    an existing file is left alone."""
    try:
        with open(path, "x", encoding="utf-8", opener=_private) as file, _removed_if_unfinished(path):
            file.writelines(line(row) for row in rows)
            file.flush()
    except FileExistsError as error:
        raise EmberkeepError(f"{path} exists already: give another name.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error


def line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file is open while it is iterated. Raises EmberkeepError."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                yield _parse_line(text, f"Line {number} of {path}")
    except UnicodeDecodeError as error:
        raise EmberkeepError(f"{path} is not valid UTF-8: give a file that was exported.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot read {path}: {error.strerror or error}.") from error


def _parse_line(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise EmberkeepError(f"{where} is not a JSON object: give a file that was exported.")
    return row


@contextmanager
def _removed_if_unfinished(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
