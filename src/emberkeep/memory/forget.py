"""What leaves memory: what a user has forgotten, of which no byte stays, and the oldest when the file is full."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter

import apsw

from emberkeep.memory.database import Database, rows, used_bytes, value
from emberkeep.memory.records import conversation_id, owner_id, remove_turns
from emberkeep.text import encodable
from emberkeep.types.memory import Forgotten

_TURNS_AT_ONCE = 1000
"""Turns in one transaction: others want to write meanwhile."""
_PAGES = 2000
"""So many pages of the index are merged at once."""
_DID_SOMETHING = 2
"""Rows that a merge changes at least: FTS5 counts itself as one."""
_FORGETTINGS = 1000
"""Kept of them; what began before the oldest is taken for forgotten."""
_RETAIN_AT_ONCE = 16
_RETAIN_MOST = 64
"""Rows that one write removes: no request waits for the removal of a year."""
_SPARE_PAGES = 256
"""Free pages that stay in the file: the next turns are written there."""
_RETURNED_PAGES = 64


def forget(database: Database, owner: str, conversation: str | None) -> Forgotten:
    """Everything of the owner, or of one conversation. What was not reached when it fails is still there: then
    it has to be asked again. What others began to archive before is not written down any more."""
    with database.transaction() as db:
        _note_forgetting(db, owner, encodable(conversation) if conversation is not None else None)
    with database.snapshot() as db:
        before = _pages(db)
        id_ = owner_id(db, owner)
        within = conversation_id(db, id_, conversation) if id_ is not None and conversation is not None else None
    removed = Forgotten()
    if id_ is not None and conversation is None:
        removed = _remove_owner(database, id_)
    elif within is not None:
        removed = _remove(database, "conversation", "id", within)
    with database.snapshot() as db:
        is_clean = removed == Forgotten() and not db.pragma("freelist_count")
    if not is_clean:
        _erase(database)
    with database.snapshot() as db:
        return replace(removed, bytes=max(0, before - _pages(db)) * db.pragma("page_size"))


def _remove_owner(database: Database, owner: int) -> Forgotten:
    removed = _remove(database, "owner", "owner", owner)
    with database.transaction() as db:
        db.execute("DELETE FROM facts WHERE owner = ?", (owner,))
        facts = db.changes()
        db.execute("DELETE FROM owners WHERE id = ?", (owner,))
    return replace(removed, facts=facts)


def _remove(database: Database, of_turns: str, of_conversations: str, which: int) -> Forgotten:
    """The columns say whose rows of these tables go."""
    turns = answers = 0
    for some_turns, some_answers in _remove_turns_in_steps(database, of_turns, which):
        turns, answers = turns + some_turns, answers + some_answers
    chosen = f"FROM conversations WHERE {of_conversations} = ?"
    with database.transaction() as db:
        saved: int = value(db, f"SELECT count(coalesce(title, metadata)) {chosen}", which)
        db.execute(f"DELETE FROM messages WHERE conversation IN (SELECT id {chosen})", (which,))
        responses: int = value(db, f"SELECT count(*) FROM responses WHERE {of_turns} = ?", which)
        for table in ("notes", "responses", "items"):
            db.execute(f"DELETE FROM {table} WHERE {of_turns} = ?", (which,))
        db.execute(f"DELETE {chosen}", (which,))
    return Forgotten(turns, answers, 0, saved, responses)


def _remove_turns_in_steps(database: Database, where: str, which: int) -> Iterator[tuple[int, int]]:
    """(turns, answers) of each transaction."""
    sql = f"SELECT id, conversation IS NULL FROM turns WHERE {where} = ? LIMIT {_TURNS_AT_ONCE}"
    while True:
        with database.transaction() as db:
            found = rows(db, sql, which)
            remove_turns(db, [id_ for id_, _ in found])
        answers = sum(is_answer for _, is_answer in found)
        yield len(found) - answers, answers
        if len(found) < _TURNS_AT_ONCE:
            return


def _erase(database: Database) -> None:
    """The words of what was removed are in the index until its parts are merged, and everything else where
    SQLite has not yet needed the room."""
    pages = -_PAGES  # less than nothing: all of the index, not only as much as is worth it
    while _merge(database, pages):
        pages = _PAGES
    database.rewrite()


def _merge(database: Database, pages: int) -> bool:
    """Whether there is more to do: some pages in each transaction."""
    with database.transaction() as db:
        before = db.total_changes()
        db.execute("INSERT INTO words (words, rank) VALUES ('merge', ?)", (pages,))
        return bool(db.total_changes() - before >= _DID_SOMETHING)


def _pages(db: apsw.Connection) -> int:
    return int(db.pragma("page_count"))


# ── who was forgotten since when ──
# What began before must not be written down afterwards, by whatever process. Names are not kept, only their
# digests, each under a salt of its own.


def _note_forgetting(db: apsw.Connection, owner: str, conversation: str | None) -> None:
    salt = secrets.token_bytes(16)
    named = None if conversation is None else _digest(salt, conversation)
    sql = "INSERT INTO forgettings (salt, owner, conversation) VALUES (?, ?, ?)"
    db.execute(sql, (salt, _digest(salt, owner), named))
    db.execute("DELETE FROM forgettings WHERE id <= ?", (db.last_insert_rowid() - _FORGETTINGS,))


def forgotten_since(db: apsw.Connection, as_of: int, owner: str, conversation: str | None) -> bool:
    """Whether the owner or the conversation was: `as_of` is what `Memory.last_forgetting` was when it began."""
    found = rows(db, "SELECT id, salt, owner, conversation FROM forgettings WHERE id > ? ORDER BY id", as_of)
    if found and found[0][0] > as_of + 1:
        return True
    return any(
        _digest(salt, owner) == who and (which is None or which == _digest(salt, conversation or ""))
        for _, salt, who, which in found
    )


def _digest(salt: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=salt, digest_size=16).digest()


# ── the limit ──


def retain(
    db: apsw.Connection, limit_bytes: int, *, before: int | None = None, response: int = 0, conversation: int = 0
) -> None:
    """Inside a transaction that wrote: the oldest turns, responses and lists of items go, but not the `response`
    and the `conversation` that it wrote. Facts, answers and saved conversations stay.

    With `before`, the bytes that were used before it wrote, at least as much goes as it wrote: otherwise large
    writes would outrun small removals.
    """
    removed = 0
    while (used := used_bytes(db)) > limit_bytes:
        if removed >= _RETAIN_MOST and (before is None or used <= before):
            break
        oldest = _remove_oldest(db, response, conversation)
        if not oldest:
            break
        _remove_empty(db, {within for _, _, within in oldest}, {owner for _, owner, _ in oldest})
        removed += len(oldest)
    if db.pragma("freelist_count") > _SPARE_PAGES:
        db.execute(f"PRAGMA incremental_vacuum({_RETURNED_PAGES})").fetchall()


_OLDEST_TURN = "SELECT at FROM turns WHERE conversation IS NOT NULL ORDER BY id LIMIT 1"
_OLDEST_RESPONSE = "SELECT id, at FROM responses WHERE id <> ? ORDER BY id LIMIT 1"
_OLDEST_LIST = """SELECT id, updated FROM conversations
                  WHERE metadata IS NOT NULL AND id <> ? ORDER BY updated LIMIT 1"""

_Removed = list[tuple[int, int, int]]
"""Ids of rows, with those of their owners and conversations."""


def _remove_oldest(db: apsw.Connection, response: int, conversation: int) -> _Removed:
    """The oldest turns, response or list of items goes, but not those two; nothing where there is none."""
    ages: list[tuple[float, Callable[[], _Removed]]] = []
    for (at,) in rows(db, _OLDEST_TURN):
        ages.append((at, partial(_remove_turns, db)))
    for id_, at in rows(db, _OLDEST_RESPONSE, response):
        ages.append((at, partial(_remove_rows, db, "responses", "id", id_)))
    for id_, at in rows(db, _OLDEST_LIST, conversation):
        ages.append((at, partial(_remove_list, db, id_)))
    return min(ages, key=itemgetter(0))[1]() if ages else []


def _remove_turns(db: apsw.Connection) -> _Removed:
    sql = "SELECT id, owner, conversation FROM turns WHERE conversation IS NOT NULL ORDER BY id LIMIT ?"
    oldest = rows(db, sql, _RETAIN_AT_ONCE)
    remove_turns(db, [id_ for id_, _, _ in oldest])
    _remove_notes(db, oldest[-1][0])
    return oldest


def _remove_list(db: apsw.Connection, id_: int) -> _Removed:
    """Its responses go too: they would have no history. What was archived under its name stays."""
    sql = "UPDATE conversations SET metadata = NULL WHERE id = ? RETURNING id, owner, id"
    removed: _Removed = rows(db, sql, id_)
    for table in ("items", "responses"):
        removed += _remove_rows(db, table, "conversation", id_)
    return removed


def _remove_rows(db: apsw.Connection, table: str, column: str, which: int) -> _Removed:
    return rows(db, f"DELETE FROM {table} WHERE {column} = ? RETURNING id, owner, conversation", which)


def _remove_notes(db: apsw.Connection, turn: int) -> None:
    """Those that were written before the turn: whatever they are about is older."""
    oldest = "SELECT id FROM notes ORDER BY id LIMIT ?"
    db.execute(f"DELETE FROM notes WHERE id IN ({oldest}) AND since <= ?", (_RETAIN_AT_ONCE, turn))


def _remove_empty(db: apsw.Connection, conversations: Iterable[int], owners: Iterable[int]) -> None:
    """Remove conversations and owners of which nothing is left: their names alone would fill the file some day."""
    sql = (
        "DELETE FROM conversations AS c WHERE id = ? AND title IS NULL AND metadata IS NULL "
        f"AND {_none('conversation = c.id', _SAID)}"
    )
    db.executemany(sql, [(id_,) for id_ in conversations])
    sql = f"DELETE FROM owners AS o WHERE id = ? AND {_none('owner = o.id', _KEPT)}"
    db.executemany(sql, [(id_,) for id_ in owners])


_SAID = ("turns", "notes", "messages", "responses")
_KEPT = ("turns", "notes", "facts", "conversations")


def _none(which: str, tables: Iterable[str]) -> str:
    return " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE {which})" for table in tables)
