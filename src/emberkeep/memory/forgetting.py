"""To forget is to leave no byte of it: rows, index, free space and log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import apsw

from emberkeep.memory.database import Database
from emberkeep.memory.forgettings import note_forgetting
from emberkeep.memory.rows import conversation_id, owner_id, remove_turns
from emberkeep.memory.sql import rows, value
from emberkeep.memory.terms import clean
from emberkeep.types import Forgotten

_AT_ONCE = 1000
"""Turns in one transaction: others want to write meanwhile."""
_PAGES = 2000
"""Of the index."""
_DID_SOMETHING = 2
"""Rows that a merge changes at least: FTS5 counts itself as one."""


def forget(database: Database, owner: str, conversation: str | None) -> Forgotten:
    """Everything of the owner, or of one conversation. What was not reached when it fails is still there: then
    it has to be asked again. What others began to archive before is not written down any more."""
    with database.writing() as db:
        note_forgetting(db, owner, clean(conversation) if conversation is not None else None)
    with database.reading() as db:
        before = _pages(db)
        id_ = owner_id(db, owner)
        within = conversation_id(db, id_, conversation) if id_ is not None and conversation is not None else None
    removed = Forgotten()
    if id_ is not None and conversation is None:
        removed = _remove_owner(database, id_)
    elif within is not None:
        removed = _remove(database, "conversation", "id", within)
    with database.reading() as db:
        is_clean = removed == Forgotten() and not db.pragma("freelist_count")
    if not is_clean:
        _clean_up(database)
    with database.reading() as db:
        return replace(removed, bytes=max(0, before - _pages(db)) * db.pragma("page_size"))


def _remove_owner(database: Database, owner: int) -> Forgotten:
    removed = _remove(database, "owner", "owner", owner)
    with database.writing() as db:
        db.execute("DELETE FROM facts WHERE owner = ?", (owner,))
        facts = db.changes()
        db.execute("DELETE FROM owners WHERE id = ?", (owner,))
    return replace(removed, facts=facts)


def _remove(database: Database, of_turns: str, of_conversations: str, which: int) -> Forgotten:
    """The columns say whose rows of these tables go."""
    turns = answers = 0
    for some_turns, some_answers in _removed_turns(database, of_turns, which):
        turns, answers = turns + some_turns, answers + some_answers
    chosen = f"FROM conversations WHERE {of_conversations} = ?"
    with database.writing() as db:
        saved: int = value(db, f"SELECT count(title) {chosen}", which)
        db.execute(f"DELETE FROM messages WHERE conversation IN (SELECT id {chosen})", (which,))
        db.execute(f"DELETE FROM notes WHERE {of_turns} = ?", (which,))
        db.execute(f"DELETE {chosen}", (which,))
    return Forgotten(turns, answers, 0, saved)


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


def _clean_up(database: Database) -> None:
    """The words of what was removed are in the index until its parts are merged, and everything else where
    SQLite has not yet needed the room."""
    pages = -_PAGES  # less than nothing: all of the index, not only as much as is worth it
    while _merge(database, pages):
        pages = _PAGES
    database.rewrite()


def _merge(database: Database, pages: int) -> bool:
    """Whether there is more to do: some pages in each transaction."""
    with database.writing() as db:
        before = db.total_changes()
        db.execute("INSERT INTO words (words, rank) VALUES ('merge', ?)", (pages,))
        return bool(db.total_changes() - before >= _DID_SOMETHING)


def _pages(db: apsw.Connection) -> int:
    return int(db.pragma("page_count"))
