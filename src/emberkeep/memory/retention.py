"""The file stays within its limit: the oldest archived turns go, a few with every write."""

from __future__ import annotations

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
        sql = "SELECT id FROM turns WHERE conversation IS NOT NULL ORDER BY id LIMIT ?"
        ids = [id_ for (id_,) in rows(db, sql, _AT_ONCE)]
        if not ids:
            break
        remove_turns(db, ids)
        _remove_notes(db, ids[-1])
        removed += len(ids)
    if db.pragma("freelist_count") > _SPARE_PAGES:
        db.execute(f"PRAGMA incremental_vacuum({_RETURNED_PAGES})").fetchall()
    return removed


def _remove_notes(db: apsw.Connection, turn: int) -> None:
    """Those that were written before the turn: whatever they are about is older."""
    oldest = "SELECT id FROM notes ORDER BY id LIMIT ?"
    db.execute(f"DELETE FROM notes WHERE id IN ({oldest}) AND since <= ?", (_AT_ONCE, turn))
