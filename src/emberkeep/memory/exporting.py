"""Everything in memory as JSON objects, one for each row, which `importing` reads again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from emberkeep.memory.conversations import message_json, read_messages
from emberkeep.memory.database import Database
from emberkeep.memory.facts import read_facts
from emberkeep.memory.rows import unpack_uses
from emberkeep.memory.sql import rows
from emberkeep.types import Json

VERSION = 1
_PAGE = 1000

_WHOSE = "JOIN owners AS o ON o.id = r.owner"
_NAMED = f"{_WHOSE} LEFT JOIN conversations AS c ON c.id = r.conversation"
_NEXT = f"r.id > ?1 AND (?2 IS NULL OR o.name = ?2) ORDER BY r.id LIMIT {_PAGE}"
_TURNS = f"""SELECT r.id, o.name, c.name, key, at, user_text, assistant_text, tool_uses
             FROM turns AS r {_NAMED} WHERE {_NEXT}"""
_NOTES = f"SELECT r.id, o.name, c.name, key, kind, data FROM notes AS r {_NAMED} WHERE {_NEXT}"
_CONVERSATIONS = f"""SELECT r.id, o.name, r.name, title, model, created, updated
                     FROM conversations AS r {_WHOSE} WHERE title IS NOT NULL AND {_NEXT}"""


def export(database: Database, owner: str | None) -> Iterator[dict[str, Json]]:
    """A header, then the rows. Nothing is held between them: others may write meanwhile."""
    yield {"kind": "header", "version": VERSION, "exported": time.time()}
    yield from _facts(database, owner)
    yield from _paged(database, _TURNS, owner, _turn)
    yield from _paged(database, _NOTES, owner, _note)
    for row in _paged(database, _CONVERSATIONS, owner, _conversation):
        with database.reading() as db:
            messages = read_messages(db, row.pop("row"))
        yield {**row, "messages": [message_json(message) for message in messages]}


def _facts(database: Database, owner: str | None) -> Iterator[dict[str, Json]]:
    with database.reading() as db:
        names = [name for (name,) in rows(db, "SELECT name FROM owners ORDER BY id")] if owner is None else [owner]
        facts = [(name, fact) for name in names for fact in read_facts(db, name)]
    for name, fact in facts:
        yield {"kind": "fact", "owner": name, "name": fact.name, "value": fact.value, "at": fact.at}


def _paged(
    database: Database, sql: str, owner: str | None, row: Callable[..., dict[str, Json]]
) -> Iterator[dict[str, Json]]:
    after = 0
    while True:
        with database.reading() as db:
            found = rows(db, sql, after, owner)
            page = [row(*values) for values in found]
        yield from page
        if len(page) < _PAGE:
            return
        after = found[-1][0]


def _turn(_id: int, owner: str, conversation: str | None, key: bytes, at: float, *texts: str) -> dict[str, Json]:
    user_text, assistant_text, packed = texts
    if conversation is None:
        return {"kind": "answer", "owner": owner, "at": at, "question": user_text, "answer": assistant_text}
    uses = [{"name": use.name, "arguments": use.arguments, "result": use.result} for use in unpack_uses(packed)]
    what = {"user_text": user_text, "assistant_text": assistant_text, "tool_uses": uses}
    return {"kind": "turn", "owner": owner, "conversation": conversation, "key": key.hex(), "at": at, **what}


def _note(_id: int, owner: str, conversation: str | None, key: bytes, kind: str, data: str) -> dict[str, Json]:
    where = {"owner": owner, "conversation": conversation, "key": key.hex()}
    return {"kind": "note", **where, "about": kind, "data": json.loads(data)}


def _conversation(id_: int, owner: str, name: str, *rest: Any) -> dict[str, Json]:
    title, model, created, updated = rest
    times = {"created": created, "updated": updated}
    return {
        "kind": "conversation",
        "owner": owner,
        "id": name,
        "title": title,
        "model": model,
        **times,
        "row": id_,
    }
