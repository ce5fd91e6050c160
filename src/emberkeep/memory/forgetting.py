"""To forget is to leave no byte of it: rows, index, free space and log."""

from __future__ import annotations

from collections.abc import Iterator

import apsw

from emberkeep.memory.database import Database
from emberkeep.memory.rows import conversation_id, owner_id, remove_turns
from emberkeep.memory.sql import rows, value
from emberkeep.types import Forgotten

_AT_ONCE = 1000
"""Turns in one transaction: others want to write meanwhile."""
_PAGES = 2000


def forget(database: Database, owner: str, conversation: str | None) -> Forgotten:
    """Everything of the owner, or of one conversation. What was not reached when it fails is still there."""
    with database.reading() as db:
        id_ = owner_id(db, owner)
        before = _pages(db)
        within = conversation_id(db, id_, conversation) if id_ is not None and conversation is not None else None
    if id_ is None or (conversation is not None and within is None):
        return Forgotten()
    where, which = ("owner", id_) if within is None else ("conversation", within)
    turns = answers = 0
    for some_turns, some_answers in _removed_turns(database, where, which):
        turns, answers = turns + some_turns, answers + some_answers
    with database.writing() as db:
        conversations = _remove_conversations(db, "owner" if within is None else "id", which)
        db.execute(f"DELETE FROM notes WHERE {where} = ?", (which,))
        facts = _remove_owner(db, id_) if within is None else 0
    compact(database)
    with database.reading() as db:
        freed = max(0, before - _pages(db)) * db.pragma("page_size")
    return Forgotten(turns, answers, facts, conversations, freed)


def _removed_turns(database: Database, where: str, which: int) -> Iterator[tuple[int, int]]:
    """(turns, answers) of each transaction."""
    sql = f"SELECT id, conversation IS NULL FROM turns WHERE {where} = ? LIMIT {_AT_ONCE}"
    while True:
        with database.writing() as db:
            found = rows(db, sql, which)
            remove_turns(db, [id_ for id_, _ in found])
        answers = sum(is_answer for _, is_answer in found)
        yield len(found) - answers, answers
        if len(found) < _AT_ONCE:
            return


def _remove_conversations(db: apsw.Connection, where: str, which: int) -> int:
    """How many of them were saved."""
    chosen = f"FROM conversations WHERE {where} = ?"
    db.execute(f"DELETE FROM messages WHERE conversation IN (SELECT id {chosen})", (which,))
    saved: int = value(db, f"SELECT count(title) {chosen}", which)
    db.execute(f"DELETE {chosen}", (which,))
    return saved


def _remove_owner(db: apsw.Connection, owner: int) -> int:
    """How many facts there were."""
    db.execute("DELETE FROM facts WHERE owner = ?", (owner,))
    facts = db.changes()
    db.execute("DELETE FROM owners WHERE id = ?", (owner,))
    return int(facts)


def compact(database: Database) -> None:
    """The index without the words of what was removed, the file without free pages, the log empty."""
    pages = -_PAGES  # less than nothing: all of the index, not only as much as is worth it
    while _merge(database, pages):
        pages = _PAGES
    while _vacuum(database):
        pass
    with database.alone() as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _merge(database: Database, pages: int) -> bool:
    with database.writing() as db:
        before = db.total_changes()
        db.execute("INSERT INTO words (words, rank) VALUES ('merge', ?)", (pages,))
        return bool(db.total_changes() - before >= 2)


def _vacuum(database: Database) -> bool:
    with database.writing() as db:
        db.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
        return bool(db.pragma("freelist_count"))


def _pages(db: apsw.Connection) -> int:
    return int(db.pragma("page_count"))
