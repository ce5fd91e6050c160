"""Stored responses, each with the items it was asked, and conversations that responses add their items to.

A response that continues another names it; one that belongs to a conversation leaves its items there. Everything
belongs to a conversation of its owner, and is forgotten with it: a chain of responses to one that has the name of
its first response.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import apsw

from emberkeep.errors import InvalidField, MemoryFailed, NoSuchEntry
from emberkeep.memory.database import Database, rows, used_bytes, value
from emberkeep.memory.forget import forgotten_since, retain
from emberkeep.memory.records import make_conversation, make_owner, owner_id
from emberkeep.text import encodable
from emberkeep.types.memory import ApiConversation, StoredResponse
from emberkeep.types.request import Json

Item = dict[str, Json]

_NEWEST = (1 << 63) - 1
"""No id of a row is higher."""


class Responses:
    """Safe to use from several threads and processes; every method blocks. Raises MemoryFailed, and NoSuchEntry
    for what the owner does not have."""

    def __init__(self, database: Database, limit_bytes: int) -> None:
        self._database = database
        self._limit = limit_bytes
        self._most = limit_bytes // 2
        """Bytes of a response, and of the items of a conversation: none pushes out everything else."""

    # ── responses ──

    def save(self, owner: str, response: StoredResponse, *, as_of: int) -> bool:
        """Replaces one with the same id. False, and nothing is written, where its owner or its conversation was
        forgotten since `as_of` (see `Memory.last_forgetting`), or its conversation is gone. Raises MemoryFailed
        for one that is too large."""
        added = [*response.input, *response.data["output"]] if response.in_conversation else []
        with self._database.transaction() as db:
            if forgotten_since(db, as_of, owner, encodable(response.conversation)):
                return False
            if response.in_conversation and _find_list(db, owner, response.conversation) is None:
                return False
            before = used_bytes(db)
            owner_ = make_owner(db, owner)
            within = make_conversation(db, owner_, response.conversation)
            began = _newest_item(db, owner_, within, response.id)
            stored = put_response(db, owner_, within, response, began)
            if value(db, _RESPONSE_BYTES, stored) > self._most:
                raise MemoryFailed(f"The response is too large for the memory: {_WAY_OUT}")
            add_items(db, owner_, within, added)
            retain(db, self._limit, before=before, response=stored, conversation=within)
        return True

    def read(self, owner: str, response_id: str) -> StoredResponse:
        with self._database.snapshot() as db:
            return _read(db, owner, response_id)

    def delete(self, owner: str, response_id: str) -> None:
        with self._database.transaction() as db:
            sql = "DELETE FROM responses WHERE owner = ? AND name = ?"
            db.execute(sql, (owner_id(db, owner), encodable(response_id)))
            if not db.changes():
                raise _no_response(response_id)

    def items_until(self, owner: str, response_id: str, *, with_output: bool = True) -> list[Item]:
        """Everything that was said up to a response, and what it answered."""
        with self._database.snapshot() as db:
            return _items_until(db, owner, response_id, with_output)

    # ── conversations ──

    def create_conversation(
        self, owner: str, name: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> ApiConversation:
        with self._database.transaction() as db:
            owner_ = make_owner(db, owner)
            made = make_conversation(db, owner_, name)
            sql = "UPDATE conversations SET metadata = ?, created = ? WHERE id = ?"
            db.execute(sql, (json.dumps(metadata), time.time(), made))
            self._add_items(db, owner_, made, items)
            return _conversation(db, made)

    def conversation(self, owner: str, name: str) -> ApiConversation:
        with self._database.snapshot() as db:
            return _conversation(db, _find(db, owner, name))

    def set_metadata(self, owner: str, name: str, metadata: dict[str, str]) -> ApiConversation:
        with self._database.transaction() as db:
            found = _find(db, owner, name)
            db.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (json.dumps(metadata), found))
            return _conversation(db, found)

    def add_items(self, owner: str, name: str, items: Sequence[Item]) -> None:
        with self._database.transaction() as db:
            found = _find(db, owner, name)
            self._add_items(db, make_owner(db, owner), found, items)

    def items(self, owner: str, name: str) -> list[Item]:
        """The oldest first."""
        with self._database.snapshot() as db:
            return read_items(db, _find(db, owner, name))

    def delete_item(self, owner: str, name: str, item_id: str) -> None:
        with self._database.transaction() as db:
            found = _find(db, owner, name)
            db.execute("DELETE FROM items WHERE conversation = ? AND name = ?", (found, encodable(item_id)))
            if not db.changes():
                raise NoSuchEntry("The conversation has no such item: list its items.")

    def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, Item]:
        """Those among them that are in a conversation of the owner."""
        sql = "SELECT data FROM items WHERE owner = ? AND name = ? ORDER BY id DESC LIMIT 1"
        with self._database.snapshot() as db:
            owner_ = owner_id(db, owner)
            found = {item_id: value(db, sql, owner_, encodable(item_id)) for item_id in item_ids}
        return {item_id: json.loads(data) for item_id, data in found.items() if data is not None}

    def check_addition(self, owner: str, name: str, items: Sequence[Item]) -> None:
        """Raises InvalidField where a conversation has no room for these, or others with their ids."""
        with self._database.snapshot() as db:
            found = _find(db, owner, name)
            _check_ids(db, found, items, "input")
            self._check_room(db, found, "conversation", len(json.dumps(items)))

    def _check_room(self, db: apsw.Connection, conversation: int, param: str, more: int = 0) -> None:
        if used_bytes(db) + more <= self._most:
            return  # without a look at every item
        if value(db, _ITEM_BYTES, conversation) + more > self._most:
            raise InvalidField(param, f"the conversation would be too large for the memory: {_WAY_OUT}")

    def _add_items(self, db: apsw.Connection, owner: int, conversation: int, items: Sequence[Item]) -> None:
        before = used_bytes(db)
        _check_ids(db, conversation, items, "items")
        add_items(db, owner, conversation, items)
        self._check_room(db, conversation, "items")
        retain(db, self._limit, before=before, conversation=conversation)


_RESPONSE_BYTES = "SELECT octet_length(data) + octet_length(input) FROM responses WHERE id = ?"
_ITEM_BYTES = "SELECT coalesce(sum(octet_length(data)), 0) FROM items WHERE conversation = ?"
_WAY_OUT = "send less, begin another one, or set a larger memory_budget."


# ── rows: inside a transaction of the caller ──


def put_response(
    db: apsw.Connection, owner: int, within: int, response: StoredResponse, began: int | None = None
) -> int:
    """Its row. `began` is the newest item of its conversation before its own, where that is known."""
    sql = """INSERT OR REPLACE INTO responses
             (owner, conversation, name, previous, in_conversation, at, data, input, began)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
    previous = encodable(response.previous) if response.previous is not None else None
    content = response.data["created_at"], json.dumps(response.data), json.dumps(response.input)
    name = encodable(response.id)
    db.execute(sql, (owner, within, name, previous, response.in_conversation, *content, began))
    return db.last_insert_rowid()


def _read(db: apsw.Connection, owner: str, response_id: str) -> StoredResponse:
    sql = """SELECT r.name, c.name, previous, in_conversation, data, input
             FROM responses AS r JOIN conversations AS c ON c.id = r.conversation
             WHERE r.owner = ? AND r.name = ?"""
    for name, conversation, previous, within, data, given in rows(
        db, sql, owner_id(db, owner), encodable(response_id)
    ):
        return StoredResponse(name, conversation, previous, bool(within), json.loads(data), json.loads(given))
    raise _no_response(response_id)


def _items_until(db: apsw.Connection, owner: str, response_id: str, with_output: bool) -> list[Item]:
    """Walks a chain from its end to its beginning, which may be in a conversation."""
    last = _read(db, owner, response_id)
    parts: list[list[Item]] = [last.data["output"]] if with_output else []
    while True:
        parts.append(last.input)
        if last.in_conversation:
            parts.append(_items_before(db, owner, last))
        if last.previous is None:
            return [item for part in reversed(parts) for item in part]
        last = _read(db, owner, last.previous)
        parts.append(last.data["output"])


def _items_before(db: apsw.Connection, owner: str, response: StoredResponse) -> list[Item]:
    """What is left of what the conversation held before the response added its own."""
    within = _find(db, owner, response.conversation)
    began = _began(db, owner_id(db, owner), response.id)
    if began is not None:
        return read_items(db, within, until=began)
    # Imported, or of an earlier version: it is not known where it began.
    items = read_items(db, within)
    first = next(iter([*response.input, *response.data["output"]]), None)
    return items[: items.index(first)] if first in items else items


def _newest_item(db: apsw.Connection, owner: int, conversation: int, response_id: str) -> int:
    """Before the response came; one that is stored again has its own items there already."""
    began = _began(db, owner, response_id)
    newest = "SELECT coalesce(max(id), 0) FROM items WHERE conversation = ?"
    return began if began is not None else int(value(db, newest, conversation))


def _began(db: apsw.Connection, owner: int | None, response_id: str) -> int | None:
    sql = "SELECT began FROM responses WHERE owner = ? AND name = ?"
    found: int | None = value(db, sql, owner, encodable(response_id))
    return found


def _find(db: apsw.Connection, owner: str, name: str) -> int:
    found = _find_list(db, owner, name)
    if found is None:
        raise NoSuchEntry(f"No conversation has the id {name[:100]!r}: it was deleted, or is another user's.")
    return found


def _find_list(db: apsw.Connection, owner: str, name: str) -> int | None:
    """A conversation that was made as one, not what was archived under a name."""
    sql = "SELECT id FROM conversations WHERE owner = ? AND name = ? AND metadata IS NOT NULL"
    found: int | None = value(db, sql, owner_id(db, owner), encodable(name))
    return found


def _conversation(db: apsw.Connection, id_: int) -> ApiConversation:
    name, created, metadata = rows(db, "SELECT name, created, metadata FROM conversations WHERE id = ?", id_)[0]
    return ApiConversation(name, created, json.loads(metadata))


_NAMED_ITEM = "SELECT data FROM items WHERE owner = ?1 AND conversation = ?2 AND name = ?3"


def _check_ids(db: apsw.Connection, conversation: int, items: Sequence[Item], param: str) -> None:
    """Raises InvalidField for an id that another item of the conversation has: a client could reach only one of
    them. The same item again is no error, it is there."""
    owner = value(db, "SELECT owner FROM conversations WHERE id = ?", conversation)
    known: dict[str, Item] = {}
    for place, item in enumerate(items):
        stored = value(db, _NAMED_ITEM, owner, conversation, encodable(item["id"]))
        if known.setdefault(item["id"], json.loads(stored) if stored else item) != item:
            raise InvalidField(
                f"{param}[{place}].id", "another item of the conversation has this id: leave it out, or change it."
            )


def add_items(db: apsw.Connection, owner: int, conversation: int, items: Sequence[Item]) -> None:
    """But for those whose ids are there. The conversation counts as used now."""
    sql = f"""INSERT INTO items (owner, conversation, name, data)
              SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS ({_NAMED_ITEM})"""
    db.executemany(sql, [(owner, conversation, encodable(item["id"]), json.dumps(item)) for item in items])
    used = "UPDATE conversations SET updated = ? WHERE id = ? AND metadata IS NOT NULL"
    db.execute(used, (time.time(), conversation))


def read_items(db: apsw.Connection, conversation: int, *, until: int = _NEWEST) -> list[Item]:
    """The oldest first."""
    found = rows(db, "SELECT data FROM items WHERE conversation = ? AND id <= ? ORDER BY id", conversation, until)
    return [json.loads(data) for (data,) in found]


def _no_response(response_id: str) -> NoSuchEntry:
    shown = response_id[:100]
    return NoSuchEntry(f"No response has the id {shown!r}: it was deleted, not stored, or is another user's.")
