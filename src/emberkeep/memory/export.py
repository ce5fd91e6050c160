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
from emberkeep.memory.responses import Item, add_items, put_response, read_items
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


_TABLES = {
    "turn": f"""c.name AS conversation, key, at, user_text, assistant_text, tool_uses
                FROM turns AS r {_NAMED} WHERE r.conversation IS NOT NULL""",
    "answer": f"""at, user_text AS question, assistant_text AS answer
                  FROM turns AS r {_WHOSE} WHERE r.conversation IS NULL""",
    "note": f"c.name AS conversation, key, kind AS about, data FROM notes AS r {_NAMED} WHERE TRUE",
    "conversation": f"""r.name AS id, title, model, created, updated
                        FROM conversations AS r {_WHOSE} WHERE title IS NOT NULL""",
    "item_list": f"r.name AS id, created, metadata FROM conversations AS r {_WHOSE} WHERE metadata IS NOT NULL",
    "response": f"""r.name AS id, c.name AS conversation, previous, in_conversation, data, input
                    FROM responses AS r {_NAMED} WHERE TRUE""",
}
"""Where the fields of each kind of row are. Facts are not among them: they have no ids to go on from."""
_DECODED: dict[str, Callable[[Any], Json]] = {
    "key": bytes.hex,
    "data": json.loads,
    "input": json.loads,
    "metadata": json.loads,
    "in_conversation": bool,
    "tool_uses": lambda packed: [asdict(use) for use in records.unpack_uses(packed)],
}
_PARTS: dict[str, tuple[str, Callable[[apsw.Connection, int], list[Json]]]] = {
    "conversation": ("messages", lambda db, id_: list(map(records.message_json, records.read_messages(db, id_)))),
    "item_list": ("items", lambda db, id_: list(read_items(db, id_))),
}
"""What is read row by row, because it may be long."""


def export(database: Database, owner: str | None) -> Iterator[dict[str, Json]]:
    """A header, then the rows. Nothing is held between them: others may write meanwhile."""
    yield {"kind": "header", "version": _VERSION, "exported": time.time()}
    with database.snapshot() as db:
        names = [name for (name,) in rows(db, "SELECT name FROM owners ORDER BY id")] if owner is None else [owner]
        facts = [(name, fact) for name in names for fact in records.read_facts(db, name)]
    for name, fact in facts:
        yield {"kind": "fact", "owner": name, **asdict(fact)}
    for kind in _TABLES:
        for id_, row in _read_pages(database, kind, owner):
            if kind in _PARTS:
                part, read = _PARTS[kind]
                with database.snapshot() as db:
                    row[part] = read(db, id_)
            yield row


def _read_pages(database: Database, kind: str, owner: str | None) -> Iterator[tuple[int, dict[str, Json]]]:
    """The rows of one kind with their ids."""
    sql = f"""SELECT r.id, o.name AS owner, {_TABLES[kind]} AND r.id > ?1 AND (?2 IS NULL OR o.name = ?2)
              ORDER BY r.id LIMIT {_PAGE}"""
    after = 0
    while True:
        page: list[tuple[int, dict[str, Json]]] = []
        with database.snapshot() as db:
            cursor = db.execute(sql, (after, owner))
            for id_, *values in cursor:
                names = [name for name, _ in cursor.getdescription()[1:]]
                columns = zip(names, values, strict=True)
                page.append(
                    (id_, {"kind": kind, **{name: _DECODED.get(name, _same)(one) for name, one in columns}})
                )
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _same(column: Any) -> Json:
    return column


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
