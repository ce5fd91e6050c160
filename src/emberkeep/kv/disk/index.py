"""The disk tier's index: a SQLite cache of what the chunk files say, so that opening a store is quick.

It is never trusted for correctness. A row whose file is gone is dropped, a file without a row is read and
added, and a database that cannot be opened is thrown away and rebuilt from the files. What only the database
knows (when chunks were used, what people call them, why others went) is then lost, and no state with it.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import xxhash

from emberkeep.kv.disk.chunkfile import Description
from emberkeep.kv.entries import GHOST_LIMIT, RING, Entry, EntryId, Ghost, Tail, Unsaved
from emberkeep.kv.policy import ChunkRow
from emberkeep.kv.tree import MADE, ChunkKey, pack_spans, token_bytes, unpack_spans
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

INDEX = "index.db"
"""Its name in the folder of a store."""
is_store_name = re.compile("[0-9a-f]{32}").fullmatch

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunk (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of insertion: other processes ask for what is newer
    key BLOB NOT NULL UNIQUE, namespace TEXT NOT NULL, parent BLOB NOT NULL,
    take INTEGER NOT NULL, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, sampled BLOB NOT NULL, made INTEGER NOT NULL,
    identity BLOB NOT NULL,  -- checksum of what makes the key
    bytes INTEGER NOT NULL, last_used INTEGER NOT NULL DEFAULT 0, hits INTEGER NOT NULL DEFAULT 0,
    expires REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS entry (
    id TEXT PRIMARY KEY, namespace TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, head TEXT NOT NULL,
    ttl TEXT NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
    turns INTEGER NOT NULL, used_at REAL NOT NULL, is_pinned INTEGER NOT NULL, tails TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS gone (
    key BLOB PRIMARY KEY, namespace TEXT NOT NULL, parent BLOB NOT NULL, take INTEGER NOT NULL,
    length INTEGER NOT NULL, opening BLOB NOT NULL, reason TEXT NOT NULL,
    hits INTEGER NOT NULL, last_used INTEGER NOT NULL, was_written INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value NOT NULL);
"""
_CHUNK = "key, namespace, parent, take, start, tokens, sampled, made, identity, bytes"
_ENTRY = "namespace, kind, key, head, ttl, name, source, turns, used_at, is_pinned, tails"
_GHOST = "key, namespace, parent, take, length, opening, reason, hits, last_used, was_written"
_TABLES = ("chunk", "entry", "gone", "meta")
_VERSION = 8
_BUSY_MS = 5000
"""How long another process may hold the database before that is an error."""
_MOST_UNTOLD = 4096
"""Changes that it has refused and is told again; of what is left out the files tell at the next opening."""


def row_of(d: Description, size: int) -> ChunkRow:
    """A chunk of which only the file is known."""
    return ChunkRow(0, d.key, d.namespace, d.parent, d.take, d.start, d.tokens, d.sampled, d.made, size, 0, 0, 0.0)


def description_of(row: ChunkRow, fingerprint: bytes) -> Description:
    """What the chunk's file has to say."""
    place = (row.namespace, row.key, row.parent, row.take, row.start)
    return Description(fingerprint, *place, row.tokens, row.sampled, row.made)


@dataclass(frozen=True, slots=True)
class Notes:
    """What only the index knows."""

    entries: list[Entry]
    ghosts: list[Ghost]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LaterUses:
    """What any process on the folder has told the index of chunks and entries."""

    expires: dict[ChunkKey, float]
    used_at: dict[EntryId, float]
    pinned: list[Entry]
    """All that are."""


class Unreadable(OSError):
    """The database is broken, or says something that cannot be true."""


class Index:
    """The index of a folder that several processes have open, for all threads of one of them. Methods block on
    disk, and raise OSError for whatever SQLite reports, unless they say otherwise.

    What other processes have added is asked for on a connection of its own, which never waits for a write. What
    SQLite refuses it is told again with the next change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._untold_rows: dict[ChunkKey, tuple[Description, int, float]] = {}
        self._untold_removals: set[ChunkKey] = set()
        self._following: apsw.Connection | None = None
        self._following_lock = threading.Lock()
        self._seen_seq = 0
        self._seen_version = -1
        try:
            self._db = _open(path)
        except Unreadable:
            self._delete()
            self._db = _open(path)

    def start_over(self) -> None:
        """Replace the database by an empty one."""
        self._db.close()
        self._delete()
        self._db = _open(self._path)

    def _delete(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    # ── chunks ──

    def rows_after(self, seq: int) -> list[ChunkRow]:
        """Returns everything inserted after `seq`, in order. Raises Unreadable where it says what cannot be."""
        return _rows_after(self._db, seq)

    def follow(self, rows: Iterable[ChunkRow]) -> None:
        """`rows` are known: from here on `new_rows` tells what is added."""
        self._following = _open(self._path)
        self._seen_seq = max((row.seq for row in rows), default=0)
        self._seen_version = _version(self._following)

    def new_rows(self, *, everything: bool = False) -> list[ChunkRow]:
        """What any process added since the last call."""
        with self._following_lock:
            following = self._following or self._db
            version = _version(following)
            if version == self._seen_version and not everything:
                return []
            rows = _rows_after(following, 0 if everything else self._seen_seq)
            self._seen_version = version
            self._seen_seq = max((row.seq for row in rows), default=self._seen_seq)
            return rows

    def add(self, entries: Iterable[tuple[Description, int, float]]) -> None:
        """Enter (description, file size, expiry); known keys are left alone, but for a later expiry. One of 0 is
        not known. Only while no process can begin to forget. Never raises: the index is a cache."""
        with self._lock:
            self._untold_rows |= {entry[0].key: entry for entry in entries}
            self._tell(self._untold_rows)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Never raises."""
        with self._lock:
            for key in keys:
                self._untold_rows.pop(key, None)
                self._untold_removals.add(key)
            self._tell({})

    def _tell(self, rows: dict[ChunkKey, tuple[Description, int, float]]) -> None:
        """Tell what was removed, and `rows`, which are cleared."""
        known = "ON CONFLICT (key) DO UPDATE SET expires = max(expires, excluded.expires)"
        try:
            self._tell_removals()
            values = [(*_values(description, size), expires) for description, size, expires in rows.values()]
            self._write(f"{_insert('chunk', f'{_CHUNK}, expires')} {known}", values)
            rows.clear()
        except OSError as error:
            log.warning("the index of the stored state is behind: %s", error)
            self._untold_rows = dict(list(self._untold_rows.items())[-_MOST_UNTOLD:])
            self._untold_removals = set(list(self._untold_removals)[-_MOST_UNTOLD:])

    def _tell_removals(self) -> None:
        self._write("DELETE FROM chunk WHERE key = ?", [(key,) for key in self._untold_removals])
        self._untold_removals.clear()

    # ── forgetting ──

    def forget_untold(self, whose: Container[str]) -> None:
        """What the index has not been told of them, it never is. Does not block."""
        with self._lock:
            kept = {key: row for key, row in self._untold_rows.items() if row[0].namespace not in whose}
            self._untold_rows = kept

    def erase(self, whose: Container[str]) -> None:
        """Leave nothing of them, neither here nor in the file. Raises OSError also while another program still
        reads the old bytes."""
        self.forget_untold(whose)
        with self._lock:
            for table in ("chunk", "entry", "gone"):
                names = self._do(f"SELECT DISTINCT namespace FROM {table}")
                gone = [name for name in names if name[0] in whose]
                self._write(f"DELETE FROM {table} WHERE namespace = ?", gone)
            self._rewrite()

    def erase_traces(self) -> None:
        """Leave nothing in the file of rows that were removed, and no ghost. Raises OSError, as above."""
        with self._lock:
            self._tell_removals()
            self._do("DELETE FROM gone")
            self._rewrite()

    def _rewrite(self) -> None:
        """Write the file anew: SQLite overwrites what it deletes, but not what it has moved before."""
        self._do("VACUUM")
        ((busy, *_),) = self._do("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise OSError("the store's index: another program reads it")

    # ── what only the index knows ──

    def notes(self) -> Notes:
        """Ghosts oldest first. Empty where they cannot be read any more."""
        try:
            with self._lock, _translated():
                ghosts = [_ghost(values) for values in self._do(f"SELECT {_GHOST} FROM gone ORDER BY rowid")]
                return Notes(self._entries(), ghosts, dict(self._do("SELECT name, value FROM meta")))
        except Unreadable as reason:
            log.warning("the store's notes about its chunks are lost: %s", reason)
            return Notes([], [], {})

    def later_uses(self, keys: Iterable[ChunkKey], ids: Iterable[EntryId]) -> LaterUses:
        """Looks up these chunks and entries, as far as they are known."""
        of_chunk, of_entry = "SELECT expires FROM chunk WHERE key = ?", "SELECT used_at FROM entry WHERE id = ?"
        with self._lock, _translated():
            expires = {key: row[0] for key in keys for row in self._db.execute(of_chunk, (key,))}
            used_at = {id_: row[0] for id_ in ids for row in self._db.execute(of_entry, (id_,))}
            return LaterUses(expires, used_at, self._entries(pinned_only=True))

    def save_notes(self, unsaved: Unsaved, about: Mapping[str, Any]) -> None:
        """An entry that is known stays pinned or not, unless that was changed here. The oldest ghosts beyond
        `GHOST_LIMIT` are forgotten."""
        changes = unsaved.changes
        uses = "UPDATE chunk SET last_used = ?, hits = ?, expires = min(max(expires, ?), ?) WHERE key = ?"
        changing = ("ttl", "name", "source", "turns", "used_at", "tails", "head")
        known = f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changing)}"
        entries = [_entry_values(entry) for entry in changes.entries.values()]
        pins = [(pinned, id_) for id_, pinned in changes.pins.items()]
        ghosts = [(ghost.key, str(ghost.lineage), *ghost[2:]) for ghost in changes.ghosts]
        with self._lock:
            self._write(uses, unsaved.uses)
            self._write("DELETE FROM entry WHERE id = ?", [(id_,) for id_ in changes.forgotten])
            self._write(f"{_insert('entry', f'id, {_ENTRY}')} {known}", entries)
            self._write("UPDATE entry SET is_pinned = ? WHERE id = ?", pins)
            self._write(_insert("gone", _GHOST).replace("INSERT", "INSERT OR REPLACE"), ghosts)
            if ghosts:
                self._do("DELETE FROM gone WHERE rowid <= (SELECT max(rowid) FROM gone) - ?", GHOST_LIMIT)
            self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", list({**unsaved.meta, **about}.items()))

    def close(self) -> None:
        with self._following_lock, self._lock:
            if self._following is not None:
                self._following.close()
            self._db.close()

    def _entries(self, *, pinned_only: bool = False) -> list[Entry]:
        return [
            _entry(values) for values in self._do(f"SELECT {_ENTRY} FROM entry WHERE is_pinned >= ?", pinned_only)
        ]

    def _do(self, sql: str, *values: Any) -> list[Any]:
        with _translated():
            return self._db.execute(sql, values).fetchall()

    def _write(self, sql: str, values: list[Any]) -> None:
        """One transaction."""
        if values:
            with _translated(), self._db:
                self._db.executemany(sql, values)


# ── stores, which stay as they are ──


def stores_under(root: Path) -> list[Path]:
    """The folders of all stores, the latest used first."""
    named = (path for path in root.iterdir() if is_store_name(path.name)) if root.is_dir() else ()
    return sorted((one for one in named if one.is_dir() and not one.is_symlink()), key=last_change, reverse=True)


def last_change(folder: Path) -> float:
    """When a store was last written to, in seconds since 1970; 0 where that cannot be told."""
    try:
        return (folder / INDEX).stat().st_mtime
    except OSError:
        return 0.0


def model_with(path: Path, sources: Sequence[str]) -> str | None:
    """The model of another store, if its index knows an entry with one of these sources; None on any trouble."""
    marks = ", ".join("?" * len(sources))
    try:
        known = _looked_up(path, f"SELECT 1 FROM entry WHERE source IN ({marks}) LIMIT 1", *sources)
        name = _looked_up(path, "SELECT value FROM meta WHERE name = 'model'") if known else []
    except OSError:
        return None
    return str(name[0][0]) if name else None


def read_meta(path: Path) -> dict[str, Any]:
    """What the index of a store says about the store. Raises OSError."""
    return dict(_looked_up(path, "SELECT name, value FROM meta"))


def is_of_this_version(path: Path) -> bool:
    """Whether its rows can be read here: opening another one begins anew. Raises OSError."""
    return _looked_up(path, "PRAGMA user_version") == [(_VERSION,)]


def _looked_up(path: Path, sql: str, *values: Any) -> list[Any]:
    with _translated():
        db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(_BUSY_MS)
            return db.execute(sql, values).fetchall()
        finally:
            db.close()


# ── rows ──


def _insert(table: str, columns: str) -> str:
    return f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * (columns.count(',') + 1))})"


def _rows_after(db: apsw.Connection, seq: int) -> list[ChunkRow]:
    sql = f"SELECT seq, {_CHUNK}, last_used, hits, expires FROM chunk WHERE seq > ? ORDER BY seq"
    with _translated():
        return [_row(values) for values in db.execute(sql, (seq,))]


def _version(db: apsw.Connection) -> int:
    """A number that changes when another connection has written."""
    with _translated():
        return int(db.pragma("data_version"))


def _row(values: tuple[Any, ...]) -> ChunkRow:
    seq, key, namespace, parent, take, start, tokens, sampled, made, check, *rest = values
    if _check(key, namespace, parent, take, tokens) != check:
        raise Unreadable("the store's index: a row is not as it was written")
    ids = np.frombuffer(tokens, "<i4")
    spans = unpack_spans(sampled) if sampled else ()
    return ChunkRow(seq, key, namespace, parent, take, start, ids, spans, MADE[made % len(MADE)], *rest)


def _values(d: Description, size: int) -> tuple[Any, ...]:
    tokens, sampled = token_bytes(d.tokens), pack_spans(d.sampled)
    check = _check(d.key, d.namespace, d.parent, d.take, tokens)
    return (d.key, d.namespace, d.parent, d.take, d.start, tokens, sampled, int(d.made), check, size)


def _check(key: bytes, namespace: str, parent: bytes, take: int, tokens: bytes) -> bytes:
    """Whether what makes a chunk is as it was written. Computing every key again would say the same, and would be
    a fifth of the time that opening a large store takes."""
    return xxhash.xxh3_64_digest(b"".join((key, parent, tokens, namespace.encode())), seed=take)


def _entry(values: tuple[Any, ...]) -> Entry:
    namespace, kind, key, head, ttl, name, source, turns, used_at, is_pinned, tails = values
    label = Label(EntryKind(kind), key, head, None, name, source)
    ends = (Tail(ChunkKey(bytes.fromhex(end)), used, turn, tick) for end, used, turn, tick in json.loads(tails))
    return Entry(label, Lineage.parse(namespace), Ttl(ttl), turns, used_at, bool(is_pinned), deque(ends, RING))


def _entry_values(entry: Entry) -> tuple[Any, ...]:
    label = entry.label
    what = (entry.id, str(entry.lineage), label.kind, label.key, label.head, entry.ttl, label.name, label.source)
    tails = json.dumps([[tail.chunk.hex(), tail.used, tail.turn, tail.tick] for tail in entry.tails])
    return (*what, entry.turns, entry.used_at, entry.is_pinned, tails)


def _ghost(values: tuple[Any, ...]) -> Ghost:
    key, namespace, parent, take, length, opening, reason, hits, last_used, was_written = values
    why, lineage = MissReason(reason), Lineage.parse(namespace)
    return Ghost(key, lineage, parent, take, length, opening, why, hits, last_used, bool(was_written))


def _open(path: Path) -> apsw.Connection:
    with _translated():
        db = apsw.Connection(str(path))
        try:
            db.set_busy_timeout(_BUSY_MS)
            db.pragma("journal_mode", "wal")
            # The files are the truth: losing the newest rows in a power cut costs a directory scan.
            db.pragma("synchronous", "normal")
            db.pragma("secure_delete", True)  # what a user had removed is overwritten
            if db.pragma("user_version") not in (0, _VERSION):
                for table in _TABLES:
                    db.execute(f"DROP TABLE IF EXISTS {table}")
            db.execute(_SCHEMA)
            if db.pragma("user_version") != _VERSION:  # a store that is only looked at is not written to
                db.pragma("user_version", _VERSION)
            db.execute("SELECT count(*) FROM chunk").fetchall()
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (apsw.CorruptError, apsw.NotADBError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise Unreadable(f"the store's index: {error}") from error
    except apsw.Error as error:
        raise OSError(f"the store's index: {error}") from error
