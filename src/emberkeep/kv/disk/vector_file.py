"""Vectors that were computed, on disk: a SQLite file that any number of processes share.

It is a cache: what cannot be read or written is computed again, and a file that is damaged is begun anew.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import apsw

from emberkeep.files import private_folder

log = logging.getLogger("emberkeep.kv")

T = TypeVar("T")

_VERSION = 1
_BUSY_MS = 2000
_DAY_S = 86_400
_KEPT = 0.9
"""Share of the budget that is filled after the oldest have gone."""
_MANY = 500
"""Keys of one query."""


class VectorFile:
    """`keys` are hashes. Belongs to one thread. Every method blocks on disk; none raises."""

    def __init__(self, path: Path, budget: int) -> None:
        self._path = path
        self._budget = budget
        self._db: apsw.Connection | None = None
        self._insist(lambda db: None, None)

    def find(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Returns those that are known."""
        wanted = list(keys)

        def look(db: apsw.Connection) -> dict[bytes, bytes]:
            found: dict[bytes, bytes] = {}
            for begin in range(0, len(wanted), _MANY):
                some = wanted[begin : begin + _MANY]
                places = ",".join("?" * len(some))
                found.update(db.execute(f"SELECT key, vector FROM vectors WHERE key IN ({places})", some))
            now = int(time.time())
            aged = [(now, key, now - _DAY_S) for key in found]
            with db:  # once a day is enough to tell what is in use from what is not
                db.executemany("UPDATE vectors SET used = ? WHERE key = ? AND used < ?", aged)
            return found

        return self._insist(look, {})

    def add(self, vectors: Mapping[bytes, bytes]) -> None:
        """Those that are known already stay as they are. The oldest go where there is no room."""

        def enter(db: apsw.Connection) -> None:
            now = int(time.time())
            rows = [(key, now, vector) for key, vector in vectors.items()]
            with db:
                db.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?)", rows)
            self._evict(db)

        self._insist(enter, None)

    def clear(self) -> None:
        self._insist(lambda db: db.execute("DELETE FROM vectors; VACUUM").fetchall(), None)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _evict(self, db: apsw.Connection) -> None:
        size = (db.pragma("page_count") - db.pragma("freelist_count")) * db.pragma("page_size")
        if size <= self._budget:
            return
        ((count,),) = db.execute("SELECT count(*) FROM vectors")
        excess = -(-count * (size - int(_KEPT * self._budget)) // size)
        with db:
            oldest = "SELECT key FROM vectors ORDER BY used LIMIT ?"
            db.execute(f"DELETE FROM vectors WHERE key IN ({oldest})", (excess,))
        db.execute("PRAGMA incremental_vacuum").fetchall()

    def _insist(self, action: Callable[[apsw.Connection], T], otherwise: T) -> T:
        """Try again once, with a new file where the old one cannot be used."""
        for may_replace in (True, False):
            try:
                if self._db is None:
                    self._db = _open(self._path)
                return action(self._db)
            except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as error:
                log.warning("%s is begun anew: %s", self._path, error)
                self.close()
                if may_replace:
                    _remove(self._path)
            except (apsw.Error, OSError) as error:
                log.warning("vectors are not kept on disk: %s", error)
                return otherwise
        return otherwise


def _open(path: Path) -> apsw.Connection:
    private_folder(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
    db = apsw.Connection(str(path))
    try:
        db.set_busy_timeout(_BUSY_MS)
        if not db.pragma("page_count"):
            db.pragma("auto_vacuum", "incremental")
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "normal")  # what a power cut loses is computed again
        if db.pragma("user_version") not in (0, _VERSION):
            raise apsw.CorruptError(f"it has the version {db.pragma('user_version')}")
        db.execute(
            "CREATE TABLE IF NOT EXISTS vectors"
            "(key BLOB PRIMARY KEY, used INTEGER NOT NULL, vector BLOB NOT NULL) WITHOUT ROWID;"
            "CREATE INDEX IF NOT EXISTS by_use ON vectors(used);"
        )
        db.pragma("user_version", _VERSION)
    except BaseException:
        db.close()
        raise
    return db


def delete_vectors(path: Path) -> None:
    """Delete the file, whoever has it open: they go on with what no process finds any more. Never raises."""
    try:
        _remove(path)
    except OSError as error:
        log.warning("vectors are still on disk: %s", error)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
