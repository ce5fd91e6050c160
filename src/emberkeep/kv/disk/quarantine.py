"""The folder for files that failed a check: they are looked at by people, and never served."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from emberkeep.files import private_folder
from emberkeep.kv.disk.folders import delete

_MOST_QUARANTINED = 32


_MOST_QUARANTINED_BYTES = 64 << 20


class Quarantine:
    """Safe to use from any thread; blocks on disk. Raises OSError from the constructor only, unless it says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)
        self.bytes = 0
        """As of the last look at it, here: other processes have the same one."""
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
        found = sorted(self._files())
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

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """(when it came, path, bytes)"""
        with suppress(OSError):
            for path in self.paths():
                with suppress(OSError):
                    status = os.lstat(path)
                    yield status.st_ctime_ns, path, status.st_size
