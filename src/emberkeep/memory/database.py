"""The file: its schema, two connections, short transactions, and a border at which SQLite's errors become ours."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from emberkeep.errors import MemoryFailed
from emberkeep.files import private_folder

_BUSY_S = 5.0
"""How long another process may hold the file before that is an error."""

_RETRY_S = 0.003

_CHECKPOINT_PAGES = 2000

_CACHE_KIB = 32 << 10


class Database:
    """Safe for several threads and processes: one writes, one reads, at a time. Raises MemoryFailed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with self._translate_errors():
            _create(path)
            self._writer = _connect(path)
            try:
                migrate(self._writer)
                self._reader = _connect(path)
            except BaseException:
                self._writer.close()
                raise

    @contextmanager
    def snapshot(self) -> Iterator[apsw.Connection]:
        """One view of the file, whatever others write meanwhile."""
        with self._read_lock, self._translate_errors(), self._reader as db:
            yield db

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """A transaction that is on disk when the block has ended; after an error nothing of it has happened."""
        with self._write_lock, self._translate_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def rewrite(self) -> None:
        """The file with what is in it and nothing else: no free pages, no rests in pages, no log.

        Others can read meanwhile, and wait to write: a million turns take about three seconds.
        """
        with self._write_lock, self._translate_errors():
            self._writer.execute("VACUUM")
            with self._read_lock:
                busy, *_ = rows(self._writer, "PRAGMA wal_checkpoint(TRUNCATE)")[0]
            if busy:
                raise apsw.BusyError

    def close(self) -> None:
        """Waits for what is under way. Idempotent."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, OSError, UnicodeError, json.JSONDecodeError) as error:
            raise MemoryFailed(_describe(self.path, error)) from error


def rows(db: apsw.Connection, sql: str, *values: Any) -> list[Any]:
    return db.execute(sql, values).fetchall()


def value(db: apsw.Connection, sql: str, *values: Any) -> Any:
    """The first column of the first row; None where there is no row."""
    found = rows(db, sql, *values)
    return found[0][0] if found else None


def used_bytes(db: apsw.Connection) -> int:
    """The size of the file without its free pages."""
    return int((db.pragma("page_count") - db.pragma("freelist_count")) * db.pragma("page_size"))


def _create(path: Path) -> None:
    """Before SQLite would, which does not ask who may read it."""
    private_folder(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _connect(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path))
    try:
        db.set_busy_handler(_Patience())
        if not db.pragma("page_count"):
            db.pragma("auto_vacuum", "incremental")  # has to come before anything is in the file
        _use_wal(db)
        db.pragma("synchronous", "full")  # a power cut must not lose what was acknowledged
        db.pragma("secure_delete", "fast")  # a deleted fact is overwritten, and no page is written for it
        db.pragma("cache_size", -_CACHE_KIB)
        db.wal_autocheckpoint(_CHECKPOINT_PAGES)
    except BaseException:
        db.close()
        raise
    return db


class _Patience:
    """Waits while another process holds the file. SQLite itself would ask ten times a second, and never come to
    its turn where several write one turn after the other."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, tries: int) -> bool:
        """Whether to try again."""
        if tries == 0:
            self._since = time.monotonic()
        time.sleep(random.uniform(0, _RETRY_S))
        return time.monotonic() - self._since < _BUSY_S


def _use_wal(db: apsw.Connection) -> None:
    """SQLite does not wait when two processes do this to a new file at once."""
    patience = _Patience()
    for tries in itertools.count():
        try:
            db.pragma("journal_mode", "wal")
            return
        except apsw.BusyError:
            if not patience(tries):
                raise


_SENTENCES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((apsw.FullError,), "The memory in {path} cannot be written, its disk is full: make room and try again."),
    (
        (apsw.ReadOnlyError, apsw.PermissionsError, PermissionError),
        "The memory in {path} cannot be written: allow writing there, or choose another data_dir.",
    ),
    (
        (apsw.BusyError, apsw.LockedError),
        "The memory in {path} is held by another program: try again when that is done.",
    ),
    (
        (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, UnicodeError, json.JSONDecodeError),
        "The memory in {path} is damaged: move the file away, and import your last export.",
    ),
    (
        (IsADirectoryError,),
        "The memory in {path} cannot be used, that is a folder: move it away.",
    ),
    ((apsw.ConnectionClosedError,), "The memory in {path} is closed: open it again."),
)


def _describe(path: Path, error: Exception) -> str:
    for kinds, sentence in _SENTENCES:
        if isinstance(error, kinds):
            return sentence.format(path=path)
    return f"The memory in {path} cannot be used ({_reason(error)}): check its disk, or choose another data_dir."


def _reason(error: Any) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


Migration = Callable[[apsw.Connection], None]


def m001_initial(db: apsw.Connection) -> None:
    db.execute(_INITIAL)


def m002_forgettings(db: apsw.Connection) -> None:
    db.execute(_FORGETTINGS)


def m003_responses(db: apsw.Connection) -> None:
    db.execute(_RESPONSES)


def m004_items(db: apsw.Connection) -> None:
    db.execute(_ITEMS)


MIGRATIONS: tuple[Migration, ...] = (m001_initial, m002_forgettings, m003_responses, m004_items)


def migrate(db: apsw.Connection, steps: Sequence[Migration] = MIGRATIONS) -> None:
    """All missing steps in one transaction: several processes may come here at once, one of them does it.

    Raises MemoryFailed for a file of a newer version, and whatever a step raises; the file is then as it was.
    """
    if _is_current(db, len(steps)):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if not _is_current(db, len(steps)):
            for step in steps[db.pragma("user_version") :]:
                step(db)
            db.pragma("user_version", len(steps))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _is_current(db: apsw.Connection, newest: int) -> bool:
    version = db.pragma("user_version")
    if version > newest:
        raise MemoryFailed(
            f"The memory was written by a newer Emberkeep (its file has version {version}, not {newest}): "
            "update Emberkeep, or move the file away."
        )
    return bool(version == newest)


_FORGETTINGS = """
CREATE TABLE forgettings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    salt BLOB NOT NULL,
    owner BLOB NOT NULL,  -- digests of names, never the names
    conversation BLOB  -- NULL: everything of the owner
);
"""

_RESPONSES = """
ALTER TABLE conversations ADD COLUMN metadata TEXT;  -- NULL: no client made it as a list of items
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    name TEXT NOT NULL,
    previous TEXT,  -- the name of the response that it continues
    in_conversation INTEGER NOT NULL,  -- it continues the conversation, and added its items to it
    at REAL NOT NULL,
    data TEXT NOT NULL,
    input TEXT NOT NULL,
    UNIQUE (owner, name)
);
CREATE INDEX responses_by_conversation ON responses (conversation);
CREATE TABLE items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    name TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX items_by_conversation ON items (conversation, id);
CREATE INDEX items_by_name ON items (owner, name);
"""

_ITEMS = """
-- The newest item when the response came to its conversation: what was said before it. NULL: not known.
ALTER TABLE responses ADD COLUMN began INTEGER;
-- Lists of items go when the file is full, those first that were not used for longest.
UPDATE conversations AS c SET updated = max(updated, created,
    coalesce((SELECT max(at) FROM responses WHERE conversation = c.id), 0)) WHERE metadata IS NOT NULL;
CREATE INDEX conversations_by_use ON conversations (updated) WHERE metadata IS NOT NULL;
"""

_INITIAL = """
CREATE TABLE owners (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- a number is never used twice: it is part of what is indexed
    name TEXT NOT NULL UNIQUE,
    turns INTEGER NOT NULL DEFAULT 0,
    answers INTEGER NOT NULL DEFAULT 0,
    words INTEGER NOT NULL DEFAULT 0  -- of turns and answers together
);
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    name TEXT NOT NULL,
    title TEXT,  -- NULL: only its archived turns are known, its messages were never saved
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL DEFAULT 0,
    updated REAL NOT NULL DEFAULT 0,
    UNIQUE (owner, name)
);
CREATE INDEX conversations_by_time ON conversations (owner, updated) WHERE title IS NOT NULL;
CREATE TABLE messages (
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    place INTEGER NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (conversation, place)
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of archiving, which no clock can change
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER REFERENCES conversations(id),  -- NULL: a stored answer
    key BLOB NOT NULL,
    at REAL NOT NULL,
    words INTEGER NOT NULL,
    user_text TEXT NOT NULL,
    assistant_text TEXT NOT NULL,
    tool_uses TEXT NOT NULL,
    UNIQUE (owner, key)
);
CREATE INDEX turns_by_conversation ON turns (conversation);
CREATE TABLE notes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER REFERENCES conversations(id),
    key BLOB NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    since INTEGER NOT NULL,  -- the newest turn when it was written: it goes when that turn would go
    UNIQUE (owner, key, kind)
);
CREATE INDEX notes_by_conversation ON notes (conversation);
CREATE TABLE facts (
    owner INTEGER NOT NULL REFERENCES owners(id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (owner, name)
) WITHOUT ROWID;
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY REFERENCES turns(id),
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER,
    vector BLOB NOT NULL  -- a signed byte for each dimension
);
CREATE INDEX vectors_by_owner ON vectors (owner, id);
-- The texts are in `turns`; how often a word stands in one is counted there when it is a candidate. So the index
-- needs to know in which turns a word is, and nothing else.
CREATE VIRTUAL TABLE words USING fts5(
    terms, content='', contentless_delete=1, detail=none, tokenize='ascii'
);
-- Merged half as often as by default: the longest write among a million turns takes 8 ms instead of 34.
INSERT INTO words (words, rank) VALUES ('automerge', 8);
"""
