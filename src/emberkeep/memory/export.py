"""Memory as JSON objects, one for each row: what `export` gives, `import_rows` takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from math import isfinite
from typing import Any, get_args

import apsw

from emberkeep.errors import InvalidField, MemoryFailed
from emberkeep.memory import records
from emberkeep.memory.database import Database, rows, value
from emberkeep.memory.responses import Item, add_items, put_response, read_items, stored_response
from emberkeep.text import encodable
from emberkeep.types.memory import Fact, Note, NoteKind, StoredResponse, ToolUse, Turn
from emberkeep.types.request import Json, Message, Role

Row = Mapping[str, Any]

_VERSION = 2
_PAGE = 1000
_BATCH = 2000
"""Rows of one transaction."""

_WHOSE = "JOIN owners AS o ON o.id = r.owner"
_NAMED = f"{_WHOSE} LEFT JOIN conversations AS c ON c.id = r.conversation"
_NEXT = f"r.id > ?1 AND (?2 IS NULL OR o.name = ?2) ORDER BY r.id LIMIT {_PAGE}"
_TURNS = f"""SELECT r.id, o.name, c.name, key, at, user_text, assistant_text, tool_uses
             FROM turns AS r {_NAMED} WHERE {_NEXT}"""
_NOTES = f"SELECT r.id, o.name, c.name, key, kind, data FROM notes AS r {_NAMED} WHERE {_NEXT}"
_CONVERSATIONS = f"""SELECT r.id, o.name, r.name, title, model, created, updated
                     FROM conversations AS r {_WHOSE} WHERE title IS NOT NULL AND {_NEXT}"""
_ITEM_LISTS = f"""SELECT r.id, o.name, r.name, created, metadata
                  FROM conversations AS r {_WHOSE} WHERE metadata IS NOT NULL AND {_NEXT}"""
_RESPONSES = f"""SELECT r.id, o.name, r.name, c.name, previous, in_conversation, data, input
                 FROM responses AS r {_NAMED} WHERE {_NEXT}"""


def export(database: Database, owner: str | None) -> Iterator[dict[str, Json]]:
    """A header, then the rows. Nothing is held between them: others may write meanwhile."""
    yield {"kind": "header", "version": _VERSION, "exported": time.time()}
    yield from _export_facts(database, owner)
    yield from _read_pages(database, _TURNS, owner, _turn_json)
    yield from _read_pages(database, _NOTES, owner, _note_json)
    for row in _read_pages(database, _CONVERSATIONS, owner, _conversation_json):
        with database.snapshot() as db:
            messages = records.read_messages(db, row.pop("row"))
        yield {**row, "messages": [records.message_json(message) for message in messages]}
    for row in _read_pages(database, _ITEM_LISTS, owner, _item_list_json):
        with database.snapshot() as db:
            items = read_items(db, row.pop("row"))
        yield {**row, "items": items}
    yield from _read_pages(database, _RESPONSES, owner, _response_json)


def _export_facts(database: Database, owner: str | None) -> Iterator[dict[str, Json]]:
    with database.snapshot() as db:
        names = [name for (name,) in rows(db, "SELECT name FROM owners ORDER BY id")] if owner is None else [owner]
        facts = [(name, fact) for name in names for fact in records.read_facts(db, name)]
    for name, fact in facts:
        yield {"kind": "fact", "owner": name, "name": fact.name, "value": fact.value, "at": fact.at}


def _read_pages(
    database: Database, sql: str, owner: str | None, to_json: Callable[..., dict[str, Json]]
) -> Iterator[dict[str, Json]]:
    after = 0
    while True:
        with database.snapshot() as db:
            found = rows(db, sql, after, owner)
            page = [to_json(*values) for values in found]
        yield from page
        if len(page) < _PAGE:
            return
        after = found[-1][0]


def _turn_json(
    _id: int, owner: str, conversation: str | None, key: bytes, at: float, *texts: str
) -> dict[str, Json]:
    user_text, assistant_text, packed = texts
    if conversation is None:
        return {"kind": "answer", "owner": owner, "at": at, "question": user_text, "answer": assistant_text}
    uses = [
        {"name": use.name, "arguments": use.arguments, "result": use.result} for use in records.unpack_uses(packed)
    ]
    what = {"user_text": user_text, "assistant_text": assistant_text, "tool_uses": uses}
    return {"kind": "turn", "owner": owner, "conversation": conversation, "key": key.hex(), "at": at, **what}


def _note_json(
    _id: int, owner: str, conversation: str | None, key: bytes, kind: str, data: str
) -> dict[str, Json]:
    where = {"owner": owner, "conversation": conversation, "key": key.hex()}
    return {"kind": "note", **where, "about": kind, "data": json.loads(data)}


def _conversation_json(id_: int, owner: str, name: str, *rest: Any) -> dict[str, Json]:
    title, model, created, updated = rest
    what = {"title": title, "model": model, "created": created, "updated": updated}
    return {"kind": "conversation", "owner": owner, "id": name, **what, "row": id_}


def _item_list_json(id_: int, owner: str, name: str, created: float, metadata: str) -> dict[str, Json]:
    what = {"created": created, "metadata": json.loads(metadata)}
    return {"kind": "item_list", "owner": owner, "id": name, **what, "row": id_}


def _response_json(_id: int, owner: str, *values: Any) -> dict[str, Json]:
    return {"kind": "response", "owner": owner, **asdict(stored_response(values))}


def import_rows(database: Database, given: Iterable[Mapping[str, Json]]) -> int:
    """How many of them are new. Raises MemoryFailed that names the line of a bad row; its batch is not kept."""
    numbered = enumerate(given, 1)
    _check_header(next(numbered, (1, {}))[1])
    added = 0
    while batch := list(islice(numbered, _BATCH)):
        with database.transaction() as db:
            added += sum(_put(db, line, row) for line, row in batch)
    return added


def _check_header(row: Row) -> None:
    if not isinstance(row, Mapping) or row.get("kind") != "header":
        raise MemoryFailed(
            "Line 1 is not the header of an export of memory: give a file that `memory export` wrote."
        )
    if not isinstance(row.get("version"), int) or row["version"] > _VERSION:
        raise MemoryFailed(
            f"The export has version {row.get('version')!r}, which is not known here: update Emberkeep."
        )


def _put(db: apsw.Connection, line: int, row: Row) -> bool:
    try:
        return _PUTS[row["kind"]](db, records.make_owner(db, _text(row["owner"])), row)
    except (MemoryFailed, InvalidField) as error:
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
    return records.add_turn(db, owner, records.make_conversation(db, owner, name), turn) is not None


def _put_answer(db: apsw.Connection, owner: int, row: Row) -> bool:
    turn = records.answer_turn(_text(row["question"]), _text(row["answer"]), _time(row["at"]))
    known = "SELECT 1 FROM turns WHERE owner = ? AND key = ? AND at >= ?"
    if value(db, known, owner, turn.key, turn.at):
        return False
    records.store_answer(db, owner, turn)
    return True


def _put_fact(db: apsw.Connection, owner: int, row: Row) -> bool:
    fact = Fact(_text(row["name"]), _text(row["value"]), _time(row["at"]))
    known = "SELECT 1 FROM facts WHERE owner = ? AND name = ? AND at >= ?"
    if value(db, known, owner, encodable(fact.name), fact.at):
        return False
    records.set_fact(db, owner, fact)
    return True


def _put_note(db: apsw.Connection, owner: int, row: Row) -> bool:
    name = row["conversation"]
    conversation = records.make_conversation(db, owner, _text(name)) if name is not None else None
    note = Note(bytes.fromhex(row["key"]), NoteKind(row["about"]), row["data"])
    return records.put_note(db, owner, conversation, note)


def _put_conversation(db: apsw.Connection, owner: int, row: Row) -> bool:
    """Replaces an older state of the same conversation."""
    id_ = records.make_conversation(db, owner, _text(row["id"]))
    texts = encodable(_text(row["title"])), encodable(_text(row["model"]))
    times = _time(row["created"]), _time(row["updated"])
    messages = [_message(message) for message in row["messages"]]
    sql = """UPDATE conversations SET title = ?, model = ?, created = ?, updated = ?
             WHERE id = ? AND (title IS NULL OR updated < ?)"""
    db.execute(sql, (*texts, *times, id_, times[1]))
    if not db.changes():
        return False
    records.remove_messages(db, id_)
    records.add_messages(db, id_, messages)
    return True


def _put_item_list(db: apsw.Connection, owner: int, row: Row) -> bool:
    """One that is known is left as it is."""
    id_ = records.make_conversation(db, owner, _text(row["id"]))
    metadata = {_text(key): _text(text) for key, text in row["metadata"].items()}
    sql = "UPDATE conversations SET metadata = ?, created = ? WHERE id = ? AND metadata IS NULL"
    db.execute(sql, (json.dumps(metadata), _time(row["created"]), id_))
    if not db.changes():
        return False
    add_items(db, owner, id_, _items(row["items"]))
    return True


def _put_response(db: apsw.Connection, owner: int, row: Row) -> bool:
    """One that is known is left as it is."""
    within = records.make_conversation(db, owner, _text(row["conversation"]))
    names = _text(row["id"]), _text(row["conversation"])
    previous = _text(row["previous"]) if row["previous"] is not None else None
    data = dict(row["data"])
    _time(data["created_at"])
    _items(data["output"])
    response = StoredResponse(*names, previous, bool(row["in_conversation"]), data, _items(row["input"]))
    if value(db, "SELECT 1 FROM responses WHERE owner = ? AND name = ?", owner, encodable(response.id)):
        return False
    put_response(db, owner, within, response)
    return True


_PUTS: dict[str, Callable[[apsw.Connection, int, Row], bool]] = {
    "turn": _put_turn,
    "answer": _put_answer,
    "fact": _put_fact,
    "note": _put_note,
    "conversation": _put_conversation,
    "item_list": _put_item_list,
    "response": _put_response,
}


def _message(data: dict[str, Any]) -> Message:
    message = records.message_from_json(data)
    parts = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
    for text in (message.content, message.reasoning, message.tool_call_id or "", message.name or "", *parts):
        _text(text)
    if message.role not in get_args(Role):
        raise ValueError
    return message


def _items(given: list[Json]) -> list[Item]:
    return [_item(item) for item in given]


def _item(given: Json) -> Item:
    """As the API writes it; what else is in it is the client's."""
    _text(given["id"]), _text(given["type"])
    return dict(given)


def _time(given: object) -> float:
    if not isinstance(given, int | float) or not isfinite(given):
        raise TypeError
    return float(given)


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given
