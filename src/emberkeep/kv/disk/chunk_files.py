"""The folder of a store: one verified file per chunk.

    <root>/<store>/chunks/ab/ab….kv    a chunk, named by its key: no outside name ever becomes a path
                   index.db            a cache of the files' descriptions
                   quarantine/         files that failed verification, for a person to look at
                   tmp/<owner>/        files being written; removed once their owner is dead
                   in-use              lock: shared by all processes that have the store open
                   opening, evict      locks: held alone while opening, and by the one evictor
    <root>/forgotten.json              users that were forgotten, for every process and store

A crash at any moment leaves either no file under a chunk's name or the whole file: data is written and
forced to disk under `tmp/`, then renamed, then the folder is forced to disk. Several processes may share
a root. All methods block on disk and may be called from any thread.

The files are the truth. An error that may pass (too many open files, an unreadable sector) makes nothing
disappear: the file counts, and the next opening looks again. What the index refuses is told to it again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from emberkeep.files import bytes_below, delete, list_folder, locked, private_folder, remove_if_unused, sync
from emberkeep.kv.disk import chunkfile
from emberkeep.kv.disk.chunkfile import (
    CHUNKS,
    OWNER,
    QUARANTINE,
    TMP,
    Buffers,
    Damaged,
    Description,
    is_chunk_name,
    sweep_files,
)
from emberkeep.kv.disk.index import INDEX, Index, Unreadable, model_with, row_of, stores_under
from emberkeep.kv.forgetting import ForgottenRecord, Whose
from emberkeep.kv.policy import ChunkRow
from emberkeep.kv.tree import ChunkKey, store_name
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")


@dataclass(frozen=True, slots=True)
class Written:
    sizes: dict[ChunkKey, int]
    """Bytes of each file that is in its place."""
    error: OSError | None = None
    """Why others are not."""


class ChunkFiles:
    """Raises OSError from the constructor when the folder cannot be used at all."""

    def __init__(self, root: Path, fingerprint: bytes) -> None:
        self.root = root
        self.folder = root / store_name(fingerprint)
        self.fingerprint = fingerprint
        self._chunks = self.folder / CHUNKS
        self._tmp = self.folder / TMP / uuid.uuid4().hex
        self._locks = ExitStack()
        self._strays: dict[ChunkKey, int] = {}
        """Sizes of files that may be anything: reading them failed, in a way that may pass."""
        self._unfinished_bytes = self._foreign_bytes = 0
        """As of the last look: files in `tmp`, and files among the chunks that are no chunks."""
        try:
            self._locks.enter_context(hold(self.folder, "in-use", fcntl.LOCK_SH))
            self._locks.enter_context(hold(self._tmp, OWNER, fcntl.LOCK_EX))
            private_folder(self._chunks)
            self._quarantine = Quarantine(self.folder / QUARANTINE)
            self.forgotten = ForgottenRecord(root)
            # SQLite answers "locked" at once when two processes turn a new database to write-ahead logging.
            with locked(self.folder / "opening"):
                self.index = Index(self.folder / INDEX)
        except BaseException:
            self._let_go()
            raise
        self.buffers = Buffers()

    def open_rows(self) -> tuple[list[ChunkRow], int]:
        """Every chunk on disk, and how many files were damaged. Brings index and files into agreement."""
        self.clean_up()
        self.forgotten.owed = self.forgotten.unfinished()
        self.finish_forgetting()
        try:
            rows, damaged = self._reconcile()
        except Unreadable as reason:
            log.warning("the index is rebuilt from the chunks: %s", reason)
            self.index.start_over()
            rows, damaged = self._reconcile()
        self.index.follow(rows)
        return self.forgotten.allowed(rows), damaged

    def write(
        self,
        entries: Sequence[tuple[Description, memoryview]],
        is_wanted: Callable[[ChunkKey], bool] = lambda key: True,
        expires: Mapping[ChunkKey, float] = MappingProxyType({}),
    ) -> Written:
        """Make chunks durable. Some may be in their places when others could not be written.

        `is_wanted` is asked last of all, while no process can begin to forget: what is not wanted leaves no trace.
        `expires`: for the index, in the store's seconds.
        """
        sizes: dict[ChunkKey, int] = {}
        failed: OSError | None = None
        try:
            staged = [(description, *self._stage(description, payload)) for description, payload in entries]
            with self.forgotten.held():
                try:
                    for description, temporary, size in staged:
                        if is_wanted(description.key) and self._publish(description.key, temporary):
                            sizes[description.key] = size
                finally:  # what is in its place counts, whatever became of the others
                    self.index.add([(d, size, expires.get(d.key, 0.0)) for d, _, size in staged if d.key in sizes])
        except OSError as error:
            failed = error
        for description, _ in entries:
            if description.key not in sizes:
                with suppress(OSError):
                    delete(self._tmp / description.key.hex())
        for folder in {self._folder(key) for key in sizes}:
            try:
                sync(folder)
            except OSError as error:
                failed = failed or error
        return Written(sizes, failed)

    def read(self, expected: Description) -> memoryview:
        """The verified payload. Raises FileNotFoundError, OSError or Damaged."""
        return chunkfile.read(self._path(expected.key), expected, self.buffers)

    def remove(self, keys: Iterable[ChunkKey]) -> tuple[set[ChunkKey], OSError | None]:
        """Returns those whose files are gone, and why others are not."""
        gone: set[ChunkKey] = set()
        failed: OSError | None = None
        for key in keys:
            try:
                delete(self._path(key))
                gone.add(key)
            except OSError as error:
                failed = error
        self.index.remove(gone)
        return gone, failed

    def missing(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Returns those that have no file: others may have evicted them."""
        gone: set[ChunkKey] = set()
        for key in keys:
            try:
                self._path(key).lstat()
            except FileNotFoundError:
                gone.add(key)
            except OSError:
                continue
        self.index.remove(gone)
        return gone

    def quarantine(self, key: ChunkKey) -> bool:
        """Put a damaged file out of reach; one that cannot be moved is deleted. False: it is still there."""
        if not self._quarantine.put(self._path(key)):
            return False
        self.index.remove([key])
        return True

    @property
    def side_bytes(self) -> int:
        """What is in the store's folder besides chunks that are known, as of the last look."""
        others = self._quarantine.bytes + self._unfinished_bytes + self._foreign_bytes
        return others + sum(list(self._strays.values()))

    def clean_up(self) -> None:
        """Count what is no chunk, and remove what dead processes have left."""
        with suppress(OSError):
            for entry in list_folder(self._tmp.parent):
                if entry.name != self._tmp.name:
                    remove_if_unused(Path(entry.path), lock_name=OWNER)
        self._quarantine.trim()
        self._unfinished_bytes = bytes_below(self._tmp.parent)

    def drop_strays(self) -> None:
        """Their room is needed."""
        for key in self.remove(list(self._strays))[0]:
            self._strays.pop(key, None)

    def erase_traces(self) -> None:
        """Delete what says nothing of when it expires: files that cannot be read or failed verification, and what
        SQLite keeps of deleted rows. Raises OSError when something may be left."""
        self.drop_strays()
        self._quarantine.empty()
        self.clean_up()
        self.index.erase_traces()

    @property
    def has_undated(self) -> bool:
        """There are files of which nothing says when they expire. Raises OSError."""
        return bool(self._strays or self._quarantine.paths())

    # ── forgetting ──

    def sweep(self, whose: Whose) -> int:
        """Leave no byte of theirs in any store under the root: files of any process, rows, and what SQLite
        keeps of deleted rows. Returns the bytes of files.

        Raises OSError when something may be left: what could be removed is gone all the same.
        """
        swept, failed = 0, None
        for folder in [self.folder, *self._other_stores()]:
            try:
                swept += sweep_files(folder, whose)
            except OSError as error:
                failed = error
            try:
                self._erase_rows(folder, whose)
            except OSError as error:
                failed = error
        self.clean_up()
        if failed is not None:
            raise failed
        return swept

    def finish_forgetting(self) -> None:
        """Finish sweeps for forgotten users that a process began, and that it could not finish. Never raises."""
        for forgetting, whose in list(self.forgotten.owed):
            try:
                self.sweep(whose)
                self.forgotten.done(forgetting)
            except OSError as error:
                log.warning("something of a user who was forgotten is still there: %s", error)

    def _erase_rows(self, folder: Path, whose: Whose) -> None:
        if folder == self.folder:
            self.index.erase(whose)
            return
        path = folder / INDEX
        if not path.exists():
            return
        last_used = path.stat()
        index = Index(path)
        try:
            index.erase(whose)
        finally:
            index.close()
        os.utime(path, ns=(last_used.st_atime_ns, last_used.st_mtime_ns))  # looking is not using

    @contextmanager
    def evicting(self) -> Iterator[bool]:
        """True while this process is the only evictor; the lock of a dead process is free."""
        with ExitStack() as stack:
            is_alone = False
            with suppress(BlockingIOError):
                stack.enter_context(locked(self.folder / "evict", fcntl.LOCK_EX | fcntl.LOCK_NB))
                is_alone = True
            yield is_alone

    def shrink_other_stores(self, allowed: int) -> int:
        """Delete stores of other fingerprints, least recently used first, down to `allowed` bytes in all.

        Returns the bytes that remain. A store that any process has open stays.
        """
        others = self._other_stores()
        sizes = {path: sum(bytes_below(path / part) for part in (CHUNKS, QUARANTINE, TMP)) for path in others}
        for path in reversed(others):
            if sum(sizes.values()) <= allowed:
                break
            if remove_if_unused(path, "in-use"):
                log.info("removed the stored state of a model that is no longer served (%d bytes)", sizes[path])
                del sizes[path]
        return sum(sizes.values())

    def other_model(self, sources: Sequence[str]) -> str | None:
        """The name of a model that has something with one of these sources in a store of its own."""
        found = (model_with(path / INDEX, sources) for path in self._other_stores())
        return next((model for model in found if model), None)

    def close(self) -> None:
        self.index.close()
        self._let_go()

    def _let_go(self) -> None:
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._locks.close()

    def _other_stores(self) -> list[Path]:
        return [path for path in stores_under(self.root) if path != self.folder]

    def _path(self, key: ChunkKey) -> Path:
        return Path(f"{self._folder(key)}/{key.hex()}.kv")

    def _folder(self, key: ChunkKey) -> str:
        return f"{self._chunks}/{key.hex()[:2]}"

    def _stage(self, description: Description, payload: memoryview) -> tuple[Path, int]:
        """Write a file that is not in its place yet. Raises OSError."""
        temporary = self._tmp / description.key.hex()
        with suppress(FileExistsError):
            return temporary, chunkfile.write(temporary, description, payload)
        delete(temporary)  # it could not be removed when writing it failed
        return temporary, chunkfile.write(temporary, description, payload)

    def _publish(self, key: ChunkKey, temporary: Path) -> bool:
        """Put a file in its place. False: another process that forgot its user has deleted it. Raises OSError."""
        target = f"{self._folder(key)}/{key.hex()}.kv"  # to make a path of it takes longer than to rename the file
        try:
            temporary.rename(target)
        except IsADirectoryError:  # a folder stands there
            delete(self._path(key))
            temporary.rename(target)
        except FileNotFoundError:
            if not temporary.exists():
                return False
            private_folder(Path(self._folder(key)))
            temporary.rename(target)
        self._strays.pop(key, None)  # what could not be read there was replaced
        return True

    def _reconcile(self) -> tuple[list[ChunkRow], int]:
        # The index first: a file that another process adds in between is then seen twice, not never.
        rows = self.index.rows_after(0)
        on_disk = self._scan()
        known = {row.key for row in rows}
        adopted, damaged = self._adopt(on_disk - known)
        self.index.remove(known - on_disk)
        new = self.index.rows_after(max((row.seq for row in rows), default=0))
        newer = {row.key for row in new}
        present = rows if known <= on_disk else [row for row in rows if row.key in on_disk]
        return [*present, *(row for row in adopted if row.key not in newer), *new], damaged

    def _scan(self) -> set[ChunkKey]:
        """Raises OSError: half of what is there is no answer."""
        found, foreign = set(), 0
        for folder in list_folder(self._chunks):
            for entry in list_folder(Path(folder.path)) if folder.is_dir(follow_symlinks=False) else (folder,):
                if is_chunk_name(entry.name) and not entry.is_symlink():
                    found.add(ChunkKey(bytes.fromhex(entry.name[:-3])))
                elif not entry.is_dir(follow_symlinks=False):
                    foreign += entry.stat(follow_symlinks=False).st_size
        self._foreign_bytes = foreign
        return found

    def _adopt(self, keys: Iterable[ChunkKey]) -> tuple[list[ChunkRow], int]:
        """Add files that the index does not know; returns them, and how many were damaged."""
        described, damaged = [], 0
        for key in keys:
            try:
                description, size = chunkfile.read_description(self._path(key))
                if description.key != key or description.fingerprint != self.fingerprint:
                    raise Damaged("it stands under another chunk's name")
                described.append((description, size))
            except FileNotFoundError:
                continue
            except OSError as error:
                log.info("cannot read %s: %s", self._path(key).name, error)
                self._note_stray(key)
            except Damaged as reason:
                log.warning("quarantined %s: %s", self._path(key).name, reason)
                damaged += 1
                if not self.quarantine(key):
                    self._note_stray(key)
        # Parents first: then they are entered in one go, now and later.
        described.sort(key=lambda one: one[0].start)
        with self.forgotten.held():
            # A user who is just being forgotten has files left, which are about to go.
            going = self.forgotten.unfinished()
            allowed = [(d, size) for d, size in described if not any(d.namespace in whose for _, whose in going)]
            self.index.add([(d, size, 0.0) for d, size in allowed])
        return [row_of(description, size) for description, size in allowed], damaged

    def _note_stray(self, key: ChunkKey) -> None:
        with suppress(OSError):
            self._strays[key] = os.lstat(self._path(key)).st_size


def hold(folder: Path, lock_name: str, mode: int) -> ExitStack:
    """Make `folder` and lock it, until that is closed; begins again when another process removed it as unused in
    between."""
    while True:
        private_folder(folder)
        with suppress(FileNotFoundError), ExitStack() as stack:
            stack.enter_context(locked(folder / lock_name, mode))
            if (folder / lock_name).exists():
                return stack.pop_all()


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
        with suppress(OSError):
            for entry in list_folder(self._folder):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_ctime_ns, Path(entry.path), status.st_size))
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
        """Raises OSError. What is left counts until the next `trim`."""
        for path in self.paths():
            delete(path)

    def paths(self) -> list[Path]:
        """Raises OSError."""
        return list(self._folder.iterdir())
