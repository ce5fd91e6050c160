"""Who was forgotten since when: what began before must not be written down afterwards, by whatever process.

Names are not kept, only their digests, each under a salt of its own.
"""

from __future__ import annotations

import hashlib
import secrets

import apsw

from emberkeep.memory.sql import rows, value

_KEPT = 1000
"""What began before the oldest of these is taken for forgotten."""


def note_forgetting(db: apsw.Connection, owner: str, conversation: str | None) -> None:
    """Of everything, or of one conversation."""
    salt = secrets.token_bytes(16)
    named = None if conversation is None else _digest(salt, conversation)
    sql = "INSERT INTO forgettings (salt, owner, conversation) VALUES (?, ?, ?)"
    db.execute(sql, (salt, _digest(salt, owner), named))
    db.execute("DELETE FROM forgettings WHERE id <= ?", (db.last_insert_rowid() - _KEPT,))


def last_forgetting(db: apsw.Connection) -> int:
    """0: nobody ever was."""
    return int(value(db, "SELECT max(id) FROM forgettings") or 0)


def forgotten_since(db: apsw.Connection, as_of: int, owner: str, conversation: str | None) -> bool:
    """`as_of`: what `last_forgetting` was when it began."""
    found = rows(db, "SELECT id, salt, owner, conversation FROM forgettings WHERE id > ? ORDER BY id", as_of)
    if found and found[0][0] > as_of + 1:
        return True
    return any(
        _digest(salt, owner) == who and (which is None or which == _digest(salt, conversation or ""))
        for _, salt, who, which in found
    )


def _digest(salt: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=salt, digest_size=16).digest()
