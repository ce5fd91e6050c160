"""The cold tier: one verified file per chunk under a byte budget.

    <root>/<store>/chunks/ab/ab….kv    a chunk, named by its key: no outside name ever becomes a path
                   index.db            a cache of the files' descriptions
                   quarantine/         files that failed verification, for a person to look at
                   tmp/<owner>/        files being written; removed once their owner is dead
                   in-use              lock: shared by everybody who has the store open
                   opening, evict      locks: held alone while opening, and by the one evictor

A crash at any moment leaves either no file under a chunk's name or the whole file: data is written and
forced to disk under `tmp/`, then renamed, then the folder is forced to disk. Several processes may share
a root. All methods block on disk and may be called from any thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberkeep.files import private_folder, sync
from emberkeep.kv import chunkfile
from emberkeep.kv.chunkfile import Damaged, Description
from emberkeep.kv.entries import Entry, EntryId
from emberkeep.kv.ghosts import Ghost
from emberkeep.kv.index import Index, Row, Unreadable, Uses, model_with
from emberkeep.kv.keys import ChunkKey, store_name
from emberkeep.kv.reading import Buffers

log = logging.getLogger("emberkeep.kv")

INDEX = "index.db"


@dataclass(frozen=True, slots=True)
class Notes:
    entries: list[Entry]
    ghosts: list[Ghost]
    meta: dict[str, Any]


class ColdTier:
    """Raises OSError from the constructor when the folder cannot be used at all."""

    def __init__(self, root: Path, fingerprint: bytes) -> None:
        self.root = root
        self.folder = root / store_name(fingerprint)
        self._fingerprint = fingerprint
        self._chunks = self.folder / "chunks"
        self._quarantine = self.folder / "quarantine"
        self._tmp = self.folder / "tmp" / uuid.uuid4().hex
        self._locks = [_hold(self.folder, "in-use", fcntl.LOCK_SH), _hold(self._tmp, "owner", fcntl.LOCK_EX)]
        private_folder(self._chunks)
        private_folder(self._quarantine)
        # SQLite answers "locked" at once when two processes turn a new database to write-ahead logging.
        opening = _lock(self.folder / "opening", fcntl.LOCK_EX)
        try:
            self._index = Index(self.folder / INDEX, fingerprint)
        finally:
            os.close(opening)
        self._index_lock = threading.Lock()
        self._buffers = Buffers()
        self._news = self._index
        self._news_lock = threading.Lock()
        self._seen_seq = 0
        self._seen_version = -1

    def open_rows(self) -> tuple[list[Row], int]:
        """Every chunk on disk, and how many files were damaged. Brings index and files into agreement."""
        self._sweep_tmp()
        try:
            rows, damaged = self._reconcile()
        except Unreadable as reason:
            log.warning("the index is rebuilt from the chunks: %s", reason)
            self._index.start_over()
            rows, damaged = self._reconcile()
        # Requests ask for news: on a connection of their own they never wait for a write.
        self._news = Index(self.folder / INDEX, self._fingerprint)
        self._seen_seq = max((row.seq for row in rows), default=0)
        self._seen_version = self._news.version()
        return rows, damaged

    def news(self) -> list[Row]:
        """Chunks that other processes (or we) added since the last call."""
        with self._news_lock:
            version = self._news.version()
            if version == self._seen_version:
                return []
            rows = self._news.rows_after(self._seen_seq)
            self._seen_version = version
            self._seen_seq = max((row.seq for row in rows), default=self._seen_seq)
            return rows

    def write(self, entries: Sequence[tuple[Description, memoryview]]) -> dict[ChunkKey, int]:
        """Make chunks durable; returns the size of each file. Raises OSError: then some may be missing."""
        staged = []
        try:
            for description, payload in entries:
                temporary = self._tmp / description.key.hex()
                staged.append((description, temporary, chunkfile.write(temporary, description, payload)))
        except OSError:
            for description, _ in entries:
                with suppress(OSError):
                    (self._tmp / description.key.hex()).unlink()
            raise
        self._publish([(description, temporary) for description, temporary, _ in staged])
        with self._index_lock:
            self._index.add((description, size) for description, _, size in staged)
        return {description.key: size for description, _, size in staged}

    def read(self, expected: Description) -> memoryview:
        """The verified payload. Raises FileNotFoundError, OSError or Damaged."""
        return chunkfile.read(self._path(expected.key), expected, self._buffers)

    def is_whole(self, row: Row) -> bool:
        """Read a chunk's file and verify it; a damaged one is put out of reach. One that is gone is no damage."""
        identity = (row.namespace, row.key, row.parent, row.take, row.start, row.tokens, row.sampled, row.given)
        try:
            self.read(Description(self._fingerprint, *identity))
        except Damaged as reason:
            log.info("quarantined %s.kv: %s", row.key.hex(), reason)
            self.quarantine(row.key)
            return False
        except FileNotFoundError:
            return True
        except OSError as error:
            log.warning("cannot read %s.kv: %s", row.key.hex(), error)
            return False
        return True

    def get_ready(self, size: int, limit: int, readers: int) -> None:
        """Prepare memory, up to `limit` bytes, for `readers` threads that read files of `size`.

        Call it when nothing is urgent.
        """
        self._buffers.refill(size, limit, readers)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        keys = list(keys)
        for key in keys:
            with suppress(FileNotFoundError):
                self._path(key).unlink()
        with self._index_lock:
            self._index.remove(keys)

    def quarantine(self, key: ChunkKey) -> None:
        """Put a damaged file out of reach. Best effort: a file that cannot be moved is deleted."""
        path = self._path(key)
        try:
            path.rename(self._quarantine / f"{key.hex()}.{uuid.uuid4().hex[:8]}")
        except OSError:
            with suppress(OSError):
                path.unlink()
        with suppress(OSError), self._index_lock:
            self._index.remove([key])

    def notes(self) -> Notes:
        """What is known besides the chunks themselves. Call it after `open_rows`."""
        try:
            with self._index_lock:
                return Notes(self._index.entries(), self._index.ghosts(), self._index.meta())
        except Unreadable as reason:
            log.warning("the store's notes about its chunks are lost: %s", reason)
            return Notes([], [], {})

    def save_notes(
        self,
        uses: Iterable[tuple[ChunkKey, Uses]],
        entries: Iterable[Entry],
        forgotten: Iterable[EntryId],
        ghosts: Iterable[Ghost],
        meta: Mapping[str, Any],
    ) -> None:
        with self._index_lock:
            self._index.touch(uses)
            self._index.remove_entries(forgotten)
            self._index.save_entries(entries)
            self._index.add_ghosts(ghosts)
            self._index.save_meta(meta)

    def erase(self, namespaces: Iterable[str]) -> None:
        """Leave no trace of these in the index, which is not told their chunks are gone by this."""
        with self._index_lock:
            self._index.erase(namespaces)

    @contextmanager
    def evicting(self) -> Iterator[bool]:
        """True while this process is the only evictor; the lock of a dead process is free."""
        try:
            descriptor = _lock(self.folder / "evict", fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            os.close(descriptor)

    def shrink_other_stores(self, allowed: int) -> int:
        """Delete stores of other fingerprints, least recently used first, down to `allowed` bytes in all.

        Returns the bytes that remain. A store that any process has open stays.
        """
        others = self._other_stores()
        sizes = {path: sum(file.stat().st_size for file in path.glob("chunks/*/*.kv")) for path in others}
        for path in reversed(others):
            if sum(sizes.values()) <= allowed:
                break
            if _remove_if_unused(path):
                log.info("removed the stored state of a model that is no longer served (%d bytes)", sizes[path])
                del sizes[path]
        return sum(sizes.values())

    def other_model(self, sources: Sequence[str]) -> str | None:
        """The name of a model that has something with one of these sources in a store of its own."""
        found = (model_with(path / INDEX, sources) for path in self._other_stores())
        return next((model for model in found if model), None)

    def close(self) -> None:
        with self._news_lock, self._index_lock:
            self._news.close()
            self._index.close()
        shutil.rmtree(self._tmp, ignore_errors=True)
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks = []

    def _other_stores(self) -> list[Path]:
        return [path for path in stores_under(self.root) if path != self.folder]

    def _path(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self._chunks / name[:2] / f"{name}.kv"

    def _publish(self, staged: Sequence[tuple[Description, Path]]) -> None:
        folders = set()
        for description, temporary in staged:
            target = self._path(description.key)
            if target.parent not in folders:
                target.parent.mkdir(mode=0o700, exist_ok=True)
                folders.add(target.parent)
            temporary.rename(target)
        for folder in folders:
            sync(folder)

    def _reconcile(self) -> tuple[list[Row], int]:
        # The index first: a file that another process adds in between is then seen twice, not never.
        rows = self._index.rows_after(0)
        on_disk = self._scan()
        known = {row.key for row in rows}
        damaged = self._adopt(on_disk - known)
        self._index.remove(known - on_disk)
        present = [row for row in rows if row.key in on_disk]
        return present + self._index.rows_after(max((row.seq for row in rows), default=0)), damaged

    def _scan(self) -> set[ChunkKey]:
        found = set()
        for folder in os.scandir(self._chunks):
            for entry in os.scandir(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                with suppress(ValueError):
                    found.add(ChunkKey(bytes.fromhex(entry.name.removesuffix(".kv"))))
        return found

    def _adopt(self, keys: Iterable[ChunkKey]) -> int:
        """Add files that the index does not know; returns how many were damaged."""
        adopted, damaged = [], 0
        for key in keys:
            try:
                description, size = chunkfile.read_description(self._path(key))
                if description.key != key or description.fingerprint != self._fingerprint:
                    raise Damaged("it stands under another chunk's name")
                adopted.append((description, size))
            except OSError as error:
                log.info("cannot read %s: %s", self._path(key).name, error)
            except Damaged as reason:
                log.warning("quarantined %s: %s", self._path(key).name, reason)
                self.quarantine(key)
                damaged += 1
        self._index.add(adopted)
        return damaged

    def _sweep_tmp(self) -> None:
        for path in self._tmp.parent.iterdir():
            if path != self._tmp:
                _remove_if_unused(path, lock_name="owner")


def _hold(folder: Path, lock_name: str, mode: int) -> int:
    """Make `folder` and lock it; begins again when another process removed it as unused in between."""
    while True:
        private_folder(folder)
        with suppress(FileNotFoundError):
            descriptor = _lock(folder / lock_name, mode)
            if (folder / lock_name).exists():
                return descriptor
            os.close(descriptor)


def _lock(path: Path, mode: int) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_unused(path: Path, lock_name: str = "in-use") -> bool:
    try:
        descriptor = _lock(path / lock_name, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    return sorted(found, key=_last_change, reverse=True)


def _is_store(path: Path) -> bool:
    return re.fullmatch("[0-9a-f]{32}", path.name) is not None and path.is_dir() and not path.is_symlink()


def _last_change(folder: Path) -> float:
    try:
        return (folder / INDEX).stat().st_mtime
    except OSError:
        return 0.0
