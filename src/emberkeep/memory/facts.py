"""Facts, and answers that somebody stored."""

from __future__ import annotations

import hashlib

import apsw

from emberkeep.errors import MemoryFailed
from emberkeep.memory.rows import add_turn, remove_turns
from emberkeep.memory.secrets import redacted
from emberkeep.memory.sql import rows
from emberkeep.memory.terms import clean
from emberkeep.types import Fact, Turn

_READ = "SELECT f.name, value, at FROM facts AS f JOIN owners AS o ON o.id = f.owner WHERE o.name = ?"


def set_fact(db: apsw.Connection, owner: int, fact: Fact) -> None:
    """Raises MemoryFailed for a secret."""
    name, value = clean(fact.name), clean(fact.value)
    if any(redacted(text) != text for text in (name, value, f"{name}: {value}")):
        raise MemoryFailed("Memory does not keep secrets: leave the key or password out of the fact.")
    sql = "INSERT OR REPLACE INTO facts (owner, name, value, at) VALUES (?, ?, ?, ?)"
    db.execute(sql, (owner, name, value, fact.at))


def read_facts(db: apsw.Connection, owner: str) -> list[Fact]:
    return [Fact(*values) for values in rows(db, f"{_READ} ORDER BY f.name", owner)]


def read_fact(db: apsw.Connection, owner: str, name: str) -> Fact | None:
    return next((Fact(*values) for values in rows(db, f"{_READ} AND f.name = ?", owner, clean(name))), None)


def delete_fact(db: apsw.Connection, owner: int | None, name: str) -> bool:
    db.execute("DELETE FROM facts WHERE owner = ? AND name = ?", (owner, clean(name)))
    return db.changes() > 0


def answer(question: str, text: str, at: float) -> Turn:
    """As it is kept: the same question has the same key."""
    asked = redacted(clean(question))
    key = b"answer" + hashlib.blake2b(asked.encode(), digest_size=16).digest()
    return Turn(key, "", at, asked, text)


def store_answer(db: apsw.Connection, owner: int, turn: Turn) -> int:
    """Its id. Replaces an answer to the same question."""
    known = rows(db, "SELECT id FROM turns WHERE owner = ? AND key = ?", owner, turn.key)
    remove_turns(db, [id_ for (id_,) in known])
    added = add_turn(db, owner, None, turn)
    assert added is not None
    return added
