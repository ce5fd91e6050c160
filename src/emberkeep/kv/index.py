"""The cold tier's index: a SQLite cache of what the chunk files say, so that opening a store is quick.

It is never trusted for correctness. A row whose file is gone is dropped, a file without a row is read and
added, and a database that cannot be opened is thrown away and rebuilt from the files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw
import numpy as np

from emberkeep.kv.chunkfile import Description, pack_spans, unpack_spans
from emberkeep.kv.keys import ChunkKey, token_bytes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunk (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of insertion: other processes ask for what is newer
    key BLOB NOT NULL UNIQUE,
    namespace TEXT NOT NULL,
    parent BLOB NOT NULL,
    take INTEGER NOT NULL,
    start INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    sampled BLOB NOT NULL,
    given INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    last_used INTEGER NOT NULL DEFAULT 0,
    hits INTEGER NOT NULL DEFAULT 0
)
"""
_VERSION = 2
_BUSY_MS = 5000
"""How long another process may hold the database before that is an error."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    seq: int
    description: Description
    bytes: int
    last_used: int
    hits: int


class Unreadable(OSError):
    """The database is broken, or says something that cannot be true."""


class Index:
    """One connection; used by one thread at a time. Methods raise OSError for whatever SQLite reports."""

    def __init__(self, path: Path, fingerprint: bytes) -> None:
        self._path = path
        self._fingerprint = fingerprint
        try:
            self._db = _translated(lambda: _open(path))
        except Unreadable:
            self._delete()
            self._db = _translated(lambda: _open(path))

    def start_over(self) -> None:
        """Replace the database by an empty one."""
        self._db.close()
        self._delete()
        self._db = _translated(lambda: _open(self._path))

    def rows_after(self, seq: int) -> list[Row]:
        """Everything inserted after `seq`, in order of insertion. Raises Unreadable."""
        sql = """SELECT seq, key, namespace, parent, take, start, tokens, sampled, given, bytes, last_used, hits
                 FROM chunk WHERE seq > ? ORDER BY seq"""
        return _translated(lambda: [self._row(values) for values in self._db.execute(sql, (seq,))])

    def add(self, entries: Iterable[tuple[Description, int]]) -> None:
        """Insert (description, file size) pairs in one transaction; known keys are left alone."""
        sql = """INSERT OR IGNORE INTO chunk (key, namespace, parent, take, start, tokens, sampled, given, bytes)
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
        self._write(sql, [_values(description, size) for description, size in entries])

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        self._write("DELETE FROM chunk WHERE key = ?", [(key,) for key in keys])

    def touch(self, uses: Iterable[tuple[int, int, ChunkKey]]) -> None:
        """Record (last_used, hits, key)."""
        self._write("UPDATE chunk SET last_used = ?, hits = ? WHERE key = ?", list(uses))

    def version(self) -> int:
        """A number that changes when another connection has written."""
        return int(_translated(lambda: self._db.pragma("data_version")))

    def close(self) -> None:
        self._db.close()

    def _delete(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _write(self, sql: str, values: list[tuple[Any, ...]]) -> None:
        def run() -> None:
            with self._db:
                self._db.executemany(sql, values)

        if values:
            _translated(run)

    def _row(self, values: tuple[Any, ...]) -> Row:
        seq, key, namespace, parent, take, start, tokens, sampled, given, size, last_used, hits = values
        ids, spans = np.frombuffer(tokens, "<i4"), unpack_spans(sampled)
        description = Description(self._fingerprint, namespace, key, parent, take, start, ids, spans, bool(given))
        if not description.has_its_key:
            raise Unreadable("the store's index: a key does not belong to its tokens")
        return Row(seq, description, size, last_used, hits)


def _values(d: Description, size: int) -> tuple[Any, ...]:
    tokens, sampled = token_bytes(d.tokens), pack_spans(d.sampled)
    return (d.key, d.namespace, d.parent, d.take, d.start, tokens, sampled, d.given, size)


def _open(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path))
    try:
        db.set_busy_timeout(_BUSY_MS)
        db.pragma("journal_mode", "wal")
        # The files are the truth: losing the newest rows in a power cut costs a directory scan.
        db.pragma("synchronous", "normal")
        if db.pragma("user_version") not in (0, _VERSION):
            db.execute("DROP TABLE IF EXISTS chunk")
        db.execute(_SCHEMA)
        db.pragma("user_version", _VERSION)
        db.execute("SELECT count(*) FROM chunk").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def _translated(action: Callable[[], T]) -> T:
    try:
        return action()
    except (apsw.CorruptError, apsw.NotADBError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise Unreadable(f"the store's index: {error}") from error
    except apsw.Error as error:
        raise OSError(f"the store's index: {error}") from error
