"""Owners, conversations and turns as rows; what is in the index is changed together with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import apsw

from emberkeep.memory.secrets import redacted
from emberkeep.memory.sql import value
from emberkeep.memory.terms import LONGEST, clean, stems_of
from emberkeep.types import ToolUse, Turn

_INDEXED_CHARS = 100_000
"""Of what tools gave back; more of it is data that nobody asks for by its words."""


def owner_id(db: apsw.Connection, name: str) -> int | None:
    found: int | None = value(db, "SELECT id FROM owners WHERE name = ?", name)
    return found


def make_owner(db: apsw.Connection, name: str) -> int:
    db.execute("INSERT INTO owners (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
    found = owner_id(db, name)
    assert found is not None
    return found


def conversation_id(db: apsw.Connection, owner: int, name: str) -> int | None:
    sql = "SELECT id FROM conversations WHERE owner = ? AND name = ?"
    found: int | None = value(db, sql, owner, clean(name))
    return found


def make_conversation(db: apsw.Connection, owner: int, name: str) -> int:
    found = conversation_id(db, owner, name)
    if found is None:
        db.execute("INSERT INTO conversations (owner, name) VALUES (?, ?)", (owner, clean(name)))
        found = db.last_insert_rowid()
    return found


def add_turn(db: apsw.Connection, owner: int, conversation: int | None, turn: Turn) -> int | None:
    """Its id, or None where the owner has it. `conversation` None: a stored answer."""
    texts = redacted(clean(turn.user_text)), redacted(clean(turn.assistant_text))
    uses = tuple(
        ToolUse(*(redacted(clean(part)) for part in (u.name, u.arguments, u.result))) for u in turn.tool_uses
    )
    words = indexed_words(*texts, uses)
    sql = """INSERT INTO turns (owner, conversation, key, at, words, user_text, assistant_text, tool_uses)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id"""
    values = (owner, conversation, turn.key, turn.at, len(words), *texts, pack_uses(uses))
    id_: int | None = value(db, sql, *values)
    if id_ is None:
        return None
    marks = index_text(owner, conversation, words)
    db.execute("INSERT INTO words (rowid, terms) VALUES (?, ?)", (id_, marks))
    column = "answers" if conversation is None else "turns"
    db.execute(f"UPDATE owners SET {column} = {column} + 1, words = words + ? WHERE id = ?", (len(words), owner))
    return id_


def remove_turns(db: apsw.Connection, ids: Sequence[int]) -> None:
    """With their vectors and everything the index knows of them, but for its free space."""
    bound = [(id_,) for id_ in ids]
    db.executemany(
        """UPDATE owners SET turns = turns - (t.conversation IS NOT NULL),
                             answers = answers - (t.conversation IS NULL), words = owners.words - t.words
           FROM turns AS t WHERE t.id = ? AND owners.id = t.owner""",
        bound,
    )
    for table, column in (("words", "rowid"), ("vectors", "id"), ("turns", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", bound)


def indexed_words(user_text: str, assistant_text: str, uses: Iterable[ToolUse]) -> list[str]:
    words = stems_of(user_text) + stems_of(assistant_text)
    for use in uses:
        words += stems_of(f"{use.name} {use.arguments} {use.result[:_INDEXED_CHARS]}")
    return words


def index_text(owner: int, conversation: int | None, words: Iterable[str]) -> str:
    """Every word carries its owner: nobody's search touches, or is slowed down by, what belongs to others."""
    marked = " ".join([word_token(owner, word) for word in set(words) if len(word) <= LONGEST])
    return marked if conversation is None else f"{conversation_token(conversation)} {marked}"


def word_token(owner: int, word: str) -> str:
    return f"{owner}·{word}"


def conversation_token(conversation: int) -> str:
    return f"·{conversation}"


def pack_uses(uses: Sequence[ToolUse]) -> str:
    return json.dumps([[use.name, use.arguments, use.result] for use in uses], ensure_ascii=False) if uses else ""


def unpack_uses(packed: str) -> tuple[ToolUse, ...]:
    listed: list[Any] = json.loads(packed) if packed else []
    return tuple(ToolUse(*use) for use in listed)
