"""The file stays within its limit: the oldest archived turns go, a few with every write."""

from __future__ import annotations

from collections.abc import Iterable

import apsw

from emberkeep.memory.rows import remove_turns
from emberkeep.memory.sql import rows

_AT_ONCE = 16
_MOST = 64
"""Turns that one write removes: nobody waits for the removal of a year."""
_SPARE_PAGES = 256
"""Free pages that stay in the file: the next turns are written there."""
_RETURNED_PAGES = 64


def used_bytes(db: apsw.Connection) -> int:
    return int((db.pragma("page_count") - db.pragma("freelist_count")) * db.pragma("page_size"))


def retain(db: apsw.Connection, limit_bytes: int) -> int:
    """Inside a transaction that wrote; returns how many turns went. Facts, answers, saved conversations stay."""
    removed = 0
    while removed < _MOST and used_bytes(db) > limit_bytes:
        sql = "SELECT id, owner, conversation FROM turns WHERE conversation IS NOT NULL ORDER BY id LIMIT ?"
        oldest = rows(db, sql, _AT_ONCE)
        if not oldest:
            break
        remove_turns(db, [id_ for id_, _, _ in oldest])
        _remove_notes(db, oldest[-1][0])
        _remove_empty(db, {conversation for _, _, conversation in oldest}, {owner for _, owner, _ in oldest})
        removed += len(oldest)
    if db.pragma("freelist_count") > _SPARE_PAGES:
        db.execute(f"PRAGMA incremental_vacuum({_RETURNED_PAGES})").fetchall()
    return removed


def _remove_notes(db: apsw.Connection, turn: int) -> None:
    """Those that were written before the turn: whatever they are about is older."""
    oldest = "SELECT id FROM notes ORDER BY id LIMIT ?"
    db.execute(f"DELETE FROM notes WHERE id IN ({oldest}) AND since <= ?", (_AT_ONCE, turn))


def _remove_empty(db: apsw.Connection, conversations: Iterable[int], owners: Iterable[int]) -> None:
    """Those of whom nothing is left: their names alone would fill the file in the end."""
    sql = (
        f"DELETE FROM conversations AS c WHERE id = ? AND title IS NULL AND {_none('conversation = c.id', _SAID)}"
    )
    db.executemany(sql, [(id_,) for id_ in conversations])
    sql = f"DELETE FROM owners AS o WHERE id = ? AND {_none('owner = o.id', _KEPT)}"
    db.executemany(sql, [(id_,) for id_ in owners])


_SAID = ("turns", "notes", "messages")
_KEPT = ("turns", "notes", "facts", "conversations")


def _none(which: str, tables: Iterable[str]) -> str:
    return " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE {which})" for table in tables)
