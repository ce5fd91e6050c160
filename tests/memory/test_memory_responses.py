"""Stored responses and conversations of items: kept, continued, exported, and gone with their owner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from emberkeep.errors import MemoryFailed, NoSuchEntry
from emberkeep.memory.memory import Memory
from emberkeep.memory.migrations import m001_initial, m002_forgettings, migrate
from emberkeep.types import StoredResponse
from helpers.remembering import PLENTY, turn

ANN, BOB = '["ann", ""]', '["bob", ""]'


def item(text: str) -> dict[str, Any]:
    return {
        "id": f"msg_{text}",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": text}],
    }


def response(
    name: str, previous: str | None = None, *, of: str = "", at: float = 5, asked: str = ""
) -> StoredResponse:
    data = {"id": name, "created_at": at, "output": [item(f"answer to {asked or name}")]}
    return StoredResponse(name, of or name, previous, False, data, [item(asked or name)])


def save(memory: Memory, *responses: StoredResponse, owner: str = ANN) -> None:
    for one in responses:
        assert memory.responses.save(owner, one, as_of=memory.last_forgetting())


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [one["content"][0]["text"] for one in items]


def test_a_response_is_read_as_it_was_saved(memory: Memory) -> None:
    save(memory, response("a"))
    assert memory.responses.read(ANN, "a") == response("a")
    with pytest.raises(NoSuchEntry):
        memory.responses.read(BOB, "a")


def test_a_response_is_replaced_by_one_with_its_id(memory: Memory) -> None:
    save(memory, response("a"), response("a", asked="again"))
    assert texts(memory.responses.read(ANN, "a").input) == ["again"]


def test_two_owners_may_have_the_same_id(memory: Memory) -> None:
    save(memory, response("a", asked="ann's"))
    save(memory, response("a", asked="bob's"), owner=BOB)
    assert texts(memory.responses.read(ANN, "a").input) == ["ann's"]
    memory.responses.delete(BOB, "a")
    assert texts(memory.responses.read(ANN, "a").input) == ["ann's"]


def test_a_chain_is_read_from_its_beginning(memory: Memory) -> None:
    save(memory, response("a"), response("b", "a", of="a"), response("c", "b", of="a"), response("d", "a", of="a"))
    assert texts(memory.responses.items_until(ANN, "c")) == [
        *["a", "answer to a", "b", "answer to b", "c", "answer to c"]
    ]
    assert texts(memory.responses.items_until(ANN, "d", with_output=False)) == ["a", "answer to a", "d"]


def test_a_deleted_response_breaks_its_chain(memory: Memory) -> None:
    save(memory, response("a"), response("b", "a", of="a"))
    memory.responses.delete(ANN, "a")
    with pytest.raises(NoSuchEntry, match="'a'"):
        memory.responses.items_until(ANN, "b")
    with pytest.raises(NoSuchEntry):
        memory.responses.delete(ANN, "a")


def test_a_conversation_has_the_items_of_its_responses(memory: Memory) -> None:
    made = memory.responses.create_conversation(ANN, "conv", {"k": "v"}, [item("first")])
    assert memory.responses.conversation(ANN, "conv") == made and made.metadata == {"k": "v"}
    for name in ("a", "b"):
        save(memory, replace(response(name, of="conv"), in_conversation=True))
    expected = ["first", "a", "answer to a", "b", "answer to b"]
    assert texts(memory.responses.items(ANN, "conv")) == expected
    assert texts(memory.responses.items_until(ANN, "a")) == expected[:3]
    assert list(memory.responses.find_items(ANN, ["msg_a", "msg_none"])) == ["msg_a"]
    assert memory.responses.find_items(BOB, ["msg_a"]) == {}


def test_what_was_before_a_response_is_known_after_its_first_item_was_deleted(memory: Memory) -> None:
    memory.responses.create_conversation(ANN, "conv", {}, [item("first")])
    for name in ("a", "b"):
        save(memory, replace(response(name, of="conv"), in_conversation=True))
    memory.responses.delete_item(ANN, "conv", "msg_a")
    assert texts(memory.responses.items_until(ANN, "a")) == ["first", "a", "answer to a"]
    memory.responses.delete_item(ANN, "conv", "msg_first")
    assert texts(memory.responses.items_until(ANN, "a", with_output=False)) == ["a"]


def test_what_was_before_a_response_is_known_though_its_first_item_was_there_before(memory: Memory) -> None:
    memory.responses.create_conversation(ANN, "conv", {}, [item("again"), item("second")])
    again = replace(response("a", of="conv", asked="again"), in_conversation=True)
    save(memory, again)
    expected = ["again", "second", "again", "answer to again"]
    assert texts(memory.responses.items_until(ANN, "a")) == expected
    save(memory, again)
    assert texts(memory.responses.items_until(ANN, "a")) == expected


def test_a_response_of_an_earlier_version_still_has_its_history(memory: Memory) -> None:
    memory.responses.create_conversation(ANN, "conv", {}, [item("first")])
    for name in ("a", "b"):
        save(memory, replace(response(name, of="conv"), in_conversation=True))
    with memory._database.transaction() as db:
        db.execute("UPDATE responses SET began = NULL")
    assert texts(memory.responses.items_until(ANN, "b")) == ["first", "a", "answer to a", "b", "answer to b"]


def test_a_name_under_which_turns_were_archived_is_no_conversation_of_items(memory: Memory) -> None:
    memory.archive(ANN, [turn("hello", conversation="c")])
    with pytest.raises(NoSuchEntry):
        memory.responses.conversation(ANN, "c")
    with pytest.raises(NoSuchEntry):
        memory.responses.add_items(ANN, "c", [item("x")])


def test_what_began_before_a_forgetting_is_not_written_after_it(memory: Memory) -> None:
    before = memory.last_forgetting()
    memory.forget(ANN)
    assert not memory.responses.save(ANN, response("a"), as_of=before)
    with pytest.raises(NoSuchEntry):
        memory.responses.read(ANN, "a")
    assert memory.responses.save(BOB, response("a"), as_of=before)


def test_forgetting_leaves_no_byte(memory: Memory, path: Path) -> None:
    memory.responses.create_conversation(ANN, "conv", {"k": "canarymetadata"}, [item("canaryitem")])
    save(memory, replace(response("canaryname", of="conv", asked="canaryinput"), in_conversation=True))
    save(memory, response("a"), owner=BOB)
    removed = memory.forget(ANN)
    assert (removed.responses, removed.conversations) == (1, 1)
    for word in (b"canarymetadata", b"canaryitem", b"canaryname", b"canaryinput"):
        assert word not in path.read_bytes()
    assert memory.responses.read(BOB, "a") == response("a")


def test_forgetting_one_conversation_takes_its_chain(memory: Memory) -> None:
    save(memory, response("a"), response("b", "a", of="a"), response("other"))
    assert memory.forget(ANN, "a").responses == 2
    assert memory.responses.read(ANN, "other") == response("other")
    with pytest.raises(NoSuchEntry):
        memory.responses.read(ANN, "b")


def test_the_oldest_responses_go_when_the_file_is_full(path: Path) -> None:
    memory = Memory(path, limit_bytes=400_000)
    memory.responses.create_conversation(ANN, "conv", {}, [item("kept")])
    memory.archive(ANN, [turn("an old turn")])
    for number in range(60):
        save(memory, response(f"r{number}", at=1e10 + number, asked="x" * 10_000))
    with pytest.raises(NoSuchEntry):
        memory.responses.read(ANN, "r0")
    assert memory.responses.read(ANN, "r59").id == "r59"
    assert texts(memory.responses.items(ANN, "conv")) == ["kept"]
    assert memory.search(ANN, "old turn") == []  # it was older
    stats = memory.stats()
    assert stats["bytes"] <= 500_000
    memory.close()


def test_what_is_exported_is_imported_whole(memory: Memory, tmp_path: Path) -> None:
    memory.responses.create_conversation(ANN, "conv", {"k": "v"}, [item("first")])
    save(
        memory, replace(response("a", of="conv"), in_conversation=True), response("b"), response("c", "b", of="b")
    )
    rows = [json.loads(json.dumps(row)) for row in memory.export(ANN)]
    assert [row["kind"] for row in rows] == ["header", "item_list", "response", "response", "response"]
    other = Memory(tmp_path / "other.sqlite", limit_bytes=PLENTY)
    assert other.import_(rows) == 4
    assert other.import_(rows) == 0
    assert list(other.export(ANN))[1:] == rows[1:]
    assert other.responses.items_until(ANN, "c") == memory.responses.items_until(ANN, "c")
    other.close()


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "response", "owner": "", "id": 3},
        {
            "kind": "response",
            "owner": "",
            "id": "a",
            "conversation": "a",
            "previous": None,
            "data": {},
            "input": [],
        },
        {"kind": "item_list", "owner": "", "id": "a", "created": 1, "metadata": {"k": 1}, "items": []},
        {"kind": "item_list", "owner": "", "id": "a", "created": 1, "metadata": {}, "items": [{"id": 3}]},
    ],
)
def test_a_bad_row_is_named(memory: Memory, row: dict[str, Any]) -> None:
    with pytest.raises(MemoryFailed, match="Line 2"):
        memory.import_([{"kind": "header", "version": 2}, row])


def test_a_file_of_before_can_keep_responses(path: Path) -> None:
    path.parent.mkdir(parents=True)
    db = apsw.Connection(str(path))
    migrate(db, [m001_initial, m002_forgettings])
    db.execute("INSERT INTO owners (name) VALUES ('ann')")
    db.execute("INSERT INTO conversations (owner, name, title) VALUES (1, 'c', 'saved')")
    db.close()
    memory = Memory(path, limit_bytes=PLENTY)
    assert [one.id for one in memory.conversations("ann")] == ["c"]
    save(memory, response("a"), owner="ann")
    assert memory.responses.read("ann", "a") == response("a")
    memory.close()
