"""Notes about places of conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence

import apsw

from emberkeep.memory.rows import owner_id
from emberkeep.memory.sql import rows, value
from emberkeep.types import Note, NoteKind

_AT_ONCE = 128
"""Keys in one statement: always as many, so that SQLite has it prepared."""
_SQL = f"SELECT key, kind, data FROM notes WHERE owner = ? AND key IN ({','.join('?' * _AT_ONCE)})"


def put_note(db: apsw.Connection, owner: int, conversation: int | None, note: Note) -> bool:
    """Replaces one of the same key and kind; False where it is known."""
    data = json.dumps(note.data)
    known = "SELECT data FROM notes WHERE owner = ? AND key = ? AND kind = ?"
    if value(db, known, owner, note.key, str(note.kind)) == data:
        return False
    sql = """INSERT OR REPLACE INTO notes (owner, conversation, key, kind, data, since)
             VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(id), 0) FROM turns))"""
    db.execute(sql, (owner, conversation, note.key, str(note.kind), data))
    return True


def read_notes(db: apsw.Connection, owner: str, keys: Sequence[bytes]) -> list[Note]:
    id_ = owner_id(db, owner)
    if id_ is None:
        return []
    found = []
    for begin in range(0, len(keys), _AT_ONCE):
        some = keys[begin : begin + _AT_ONCE]
        padding = (None,) * (_AT_ONCE - len(some))
        found += rows(db, _SQL, id_, *some, *padding)
    return [Note(key, NoteKind(kind), json.loads(data)) for key, kind, data in found]
