"""Saved conversations: their messages, verbatim."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import apsw

from emberkeep.memory.rows import conversation_id, make_conversation, make_owner, owner_id
from emberkeep.memory.secrets import redacted
from emberkeep.memory.sql import rows, value
from emberkeep.memory.terms import clean
from emberkeep.types import Message, SavedConversation, ToolCall

_TITLE_CHARS = 80
_FIELDS = "c.name, c.title, c.model, c.created, c.updated"
_COUNT = "(SELECT count(*) FROM messages AS m WHERE m.conversation = c.id)"


def append(db: apsw.Connection, owner: str, name: str, messages: Sequence[Message], model: str) -> None:
    id_ = make_conversation(db, make_owner(db, owner), name)
    now = time.time()
    sql = """UPDATE conversations SET model = ?, updated = ?, created = iif(title IS NULL, ?, created),
             title = iif(coalesce(title, '') = '', ?, title) WHERE id = ?"""
    db.execute(sql, (clean(model), now, now, title_of(messages), id_))
    add_messages(db, id_, messages)


def replace(db: apsw.Connection, owner: str, name: str, messages: Sequence[Message], model: str) -> None:
    id_ = make_conversation(db, make_owner(db, owner), name)
    db.execute("DELETE FROM messages WHERE conversation = ?", (id_,))
    append(db, owner, name, messages, model)


def add_messages(db: apsw.Connection, conversation: int, messages: Sequence[Message]) -> None:
    sql = "SELECT coalesce(max(place) + 1, 0) FROM messages WHERE conversation = ?"
    place = value(db, sql, conversation)
    added = [(conversation, place + i, json.dumps(message_json(m))) for i, m in enumerate(messages)]
    db.executemany("INSERT INTO messages (conversation, place, data) VALUES (?, ?, ?)", added)


def latest(db: apsw.Connection, owner: str, limit: int) -> list[SavedConversation]:
    sql = f"""SELECT {_FIELDS}, {_COUNT} FROM conversations AS c
              WHERE c.owner = ? AND c.title IS NOT NULL ORDER BY c.updated DESC, c.id DESC LIMIT ?"""
    return [_saved(values, ()) for values in rows(db, sql, owner_id(db, owner), limit)]


def read(db: apsw.Connection, owner: str, name: str) -> SavedConversation | None:
    owner_ = owner_id(db, owner)
    id_ = conversation_id(db, owner_, name) if owner_ is not None else None
    sql = f"SELECT {_FIELDS}, {_COUNT} FROM conversations AS c WHERE c.id = ? AND c.title IS NOT NULL"
    found = rows(db, sql, id_)
    return _saved(found[0], read_messages(db, id_)) if found else None


def read_messages(db: apsw.Connection, conversation: int | None) -> tuple[Message, ...]:
    sql = "SELECT data FROM messages WHERE conversation = ? ORDER BY place"
    return tuple(message_of(json.loads(data)) for (data,) in rows(db, sql, conversation))


def title_of(messages: Sequence[Message]) -> str:
    """The beginning of what the user said first."""
    said = next((m.content for m in messages if m.role == "user" and m.content.strip()), "")
    line = " ".join(redacted(clean(said[: 10 * _TITLE_CHARS])).split())
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1] + "…"


def message_json(message: Message) -> dict[str, Any]:
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    fields = {
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {"role": message.role, **{key: value for key, value in fields.items() if value is not None}}


def message_of(data: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(*call) for call in data["tool_calls"])
    return Message(
        data["role"], data["content"], data["reasoning"], calls, data.get("tool_call_id"), data.get("name")
    )


def _saved(values: tuple[Any, ...], messages: tuple[Message, ...]) -> SavedConversation:
    id_, title, model, created, updated, count = values
    return SavedConversation(id_, title, model, created, updated, messages, count)
