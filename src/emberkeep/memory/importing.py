"""What `exporting` wrote, into this memory; what is here already is not written twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import isfinite
from typing import Any, get_args

import apsw

from emberkeep.errors import MemoryFailed
from emberkeep.memory import facts
from emberkeep.memory.conversations import add_messages, message_of
from emberkeep.memory.database import Database
from emberkeep.memory.exporting import VERSION
from emberkeep.memory.notes import put_note
from emberkeep.memory.rows import add_turn, make_conversation, make_owner
from emberkeep.memory.sql import value
from emberkeep.memory.terms import clean
from emberkeep.types import Fact, Json, Message, Note, NoteKind, Role, ToolUse, Turn

_BATCH = 2000
"""Rows of one transaction."""

Row = Mapping[str, Any]


def import_rows(database: Database, rows: Iterable[Mapping[str, Json]]) -> int:
    """How many of them are new. Raises MemoryFailed that names the line of a bad row; its batch is not kept."""
    numbered = enumerate(rows, 1)
    _check_header(next(numbered, (1, {}))[1])
    added = 0
    while batch := list(islice(numbered, _BATCH)):
        with database.writing() as db:
            added += sum(_put(db, line, row) for line, row in batch)
    return added


def _check_header(row: Row) -> None:
    if not isinstance(row, Mapping) or row.get("kind") != "header":
        raise MemoryFailed(
            "Line 1 is not the header of an export of memory: give a file that `memory export` wrote."
        )
    if not isinstance(row.get("version"), int) or row["version"] > VERSION:
        raise MemoryFailed(
            f"The export has version {row.get('version')!r}, which is not known here: update Emberkeep."
        )


def _put(db: apsw.Connection, line: int, row: Row) -> bool:
    try:
        return _PUTS[row["kind"]](db, make_owner(db, _text(row["owner"])), row)
    except MemoryFailed as error:
        raise MemoryFailed(f"Line {line}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"Line {line} is not a row of an export of memory: correct it, or leave it out."
        raise MemoryFailed(message) from error


def _put_turn(db: apsw.Connection, owner: int, row: Row) -> bool:
    uses = tuple(
        ToolUse(*(_text(use[part]) for part in ("name", "arguments", "result"))) for use in row["tool_uses"]
    )
    name = _text(row["conversation"])
    texts = _text(row["user_text"]), _text(row["assistant_text"])
    turn = Turn(bytes.fromhex(row["key"]), name, _time(row["at"]), *texts, uses)
    return add_turn(db, owner, make_conversation(db, owner, name), turn) is not None


def _put_answer(db: apsw.Connection, owner: int, row: Row) -> bool:
    turn = facts.answer(_text(row["question"]), _text(row["answer"]), _time(row["at"]))
    known = "SELECT 1 FROM turns WHERE owner = ? AND key = ? AND at >= ?"
    if value(db, known, owner, turn.key, turn.at):
        return False
    facts.store_answer(db, owner, turn)
    return True


def _put_fact(db: apsw.Connection, owner: int, row: Row) -> bool:
    fact = Fact(_text(row["name"]), _text(row["value"]), _time(row["at"]))
    known = "SELECT 1 FROM facts WHERE owner = ? AND name = ? AND at >= ?"
    if value(db, known, owner, clean(fact.name), fact.at):
        return False
    facts.set_fact(db, owner, fact)
    return True


def _put_note(db: apsw.Connection, owner: int, row: Row) -> bool:
    name = row["conversation"]
    conversation = make_conversation(db, owner, _text(name)) if name is not None else None
    note = Note(bytes.fromhex(row["key"]), NoteKind(row["about"]), row["data"])
    return put_note(db, owner, conversation, note)


def _put_conversation(db: apsw.Connection, owner: int, row: Row) -> bool:
    """Replaces an older state of the same conversation."""
    id_ = make_conversation(db, owner, _text(row["id"]))
    texts = clean(_text(row["title"])), clean(_text(row["model"]))
    times = _time(row["created"]), _time(row["updated"])
    messages = [_message(message) for message in row["messages"]]
    sql = """UPDATE conversations SET title = ?, model = ?, created = ?, updated = ?
             WHERE id = ? AND (title IS NULL OR updated < ?)"""
    db.execute(sql, (*texts, *times, id_, times[1]))
    if not db.changes():
        return False
    db.execute("DELETE FROM messages WHERE conversation = ?", (id_,))
    add_messages(db, id_, messages)
    return True


_PUTS: dict[str, Callable[[apsw.Connection, int, Row], bool]] = {
    "turn": _put_turn,
    "answer": _put_answer,
    "fact": _put_fact,
    "note": _put_note,
    "conversation": _put_conversation,
}


def _message(data: dict[str, Any]) -> Message:
    message = message_of(data)
    parts = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
    for text in (message.content, message.reasoning, message.tool_call_id or "", message.name or "", *parts):
        _text(text)
    if message.role not in get_args(Role):
        raise ValueError
    return message


def _time(value: object) -> float:
    if not isinstance(value, int | float) or not isfinite(value):
        raise TypeError
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
