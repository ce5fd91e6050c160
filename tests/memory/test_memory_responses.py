"""Stored responses and conversations of items: kept, continued, exported, and gone with their owner."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from emberkeep.errors import InvalidField, MemoryFailed, NoSuchEntry
from emberkeep.memory.database import m001_initial, m002_forgettings, m003_responses, migrate, rows
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import StoredResponse
from emberkeep.types.request import Message
from helpers.remembering import PLENTY, owners, turn

ANN, BOB = '["ann", ""]', '["bob", ""]'


def item(text: str) -> dict[str, Any]:
    return {
        "id": f"msg_{text[:40]}",
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


def test_an_id_names_one_item_of_a_conversation(memory: Memory) -> None:
    one, other = item("one"), {**item("other"), "id": "msg_one"}
    memory.responses.create_conversation(ANN, "conv", {}, [one, item("two"), one])
    memory.responses.add_items(ANN, "conv", [one, item("three")])
    for refused in ([other], [item("four"), {**other, "id": "msg_four"}]):
        with pytest.raises(InvalidField, match="another item of the conversation has this id"):
            memory.responses.add_items(ANN, "conv", refused)
    assert texts(memory.responses.items(ANN, "conv")) == ["one", "two", "three"]
    memory.responses.create_conversation(ANN, "another", {}, [other])
    assert texts(memory.responses.items(ANN, "another")) == ["other"]


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
    memory.archive(ANN, [turn("an old turn")])
    for number in range(60):
        save(memory, response(f"r{number}", at=1e10 + number, asked="x" * 10_000))
    with pytest.raises(NoSuchEntry):
        memory.responses.read(ANN, "r0")
    assert memory.responses.read(ANN, "r59").id == "r59"
    assert memory.search(ANN, "old turn") == []  # it was older
    assert memory.stats()["bytes"] <= 500_000
    memory.close()


def test_the_conversations_that_were_not_used_for_longest_go_when_the_file_is_full(path: Path) -> None:
    memory = Memory(path, limit_bytes=400_000)
    for name in ("used", "saved", "old"):
        memory.responses.create_conversation(ANN, name, {}, [item(name)])
    memory.save_messages(ANN, "saved", [Message("user", "hello")], model="m")
    save(memory, replace(response("in old", of="old", at=time.time() + 100), in_conversation=True))
    for number in range(60):
        memory.responses.create_conversation(BOB, f"c{number}", {}, [item("x" * 10_000)])
        memory.responses.add_items(ANN, "used", [item(f"used {number}")])
    for name in ("old", "saved"):
        with pytest.raises(NoSuchEntry):
            memory.responses.items(ANN, name)
    with pytest.raises(NoSuchEntry):  # its history is gone
        memory.responses.read(ANN, "in old")
    assert [one.id for one in memory.conversations(ANN)] == ["saved"]
    assert len(memory.responses.items(ANN, "used")) == 61
    assert len(memory.responses.items(BOB, "c59")) == 1
    assert memory.stats()["bytes"] <= 500_000
    with memory._database.snapshot() as db:
        orphans = "SELECT count(*) FROM items WHERE conversation NOT IN (SELECT id FROM conversations)"
        assert rows(db, orphans) == [(0,)]
    memory.close()


def test_a_conversation_that_would_push_out_everything_is_refused(path: Path) -> None:
    memory = Memory(path, limit_bytes=1_000_000)
    save(memory, response("a"), owner=BOB)
    memory.responses.create_conversation(ANN, "conv", {}, [])
    for number in range(9):
        memory.responses.add_items(ANN, "conv", [item(str(number) * 50_000)])
    with pytest.raises(InvalidField, match="too large for the memory"):
        memory.responses.add_items(ANN, "conv", [item("x" * 50_000)])
    with pytest.raises(InvalidField, match="too large for the memory"):
        memory.responses.check_addition(ANN, "conv", [item("x" * 50_000)])
    with pytest.raises(InvalidField, match="too large for the memory"):
        memory.responses.create_conversation(ANN, "other", {}, [item("x" * 600_000)])
    with pytest.raises(MemoryFailed, match="too large for the memory"):
        save(memory, response("b", asked="x" * 600_000))
    memory.responses.check_addition(ANN, "conv", [item("x")])
    assert len(memory.responses.items(ANN, "conv")) == 9
    assert memory.responses.read(BOB, "a") == response("a")
    with pytest.raises(NoSuchEntry):
        memory.responses.conversation(ANN, "other")
    memory.close()


def test_a_response_is_there_after_it_was_saved_however_full_the_file_is(path: Path) -> None:
    memory = Memory(path, limit_bytes=600_000)
    for number in range(8):
        memory.responses.create_conversation(ANN, f"c{number}", {}, [item("x" * 100_000)])
        save(memory, response(f"r{number}", at=number, asked="y" * 10_000), owner=BOB)
        assert memory.responses.read(BOB, f"r{number}").id == f"r{number}"
    memory.close()


def test_large_items_do_not_outrun_the_removal_of_small_turns(path: Path) -> None:
    memory = Memory(path, limit_bytes=2_000_000)
    while memory.stats()["bytes"] < 1_900_000:
        begin = memory.stats()["turns"]
        memory.archive(ANN, [turn(f"{number} " + "word " * 100) for number in range(begin, begin + 100)])
    for number in range(4):
        memory.responses.create_conversation(BOB, f"c{number}", {}, [item("x" * 300_000)])
    assert memory.stats()["bytes"] <= 2_100_000
    memory.close()


def test_a_response_to_a_conversation_that_went_meanwhile_is_not_written(memory: Memory) -> None:
    late = replace(response("a", of="conv"), in_conversation=True)
    assert not memory.responses.save(ANN, late, as_of=memory.last_forgetting())
    assert owners(memory) == []


def test_what_is_exported_is_imported_whole(memory: Memory, tmp_path: Path) -> None:
    memory.responses.create_conversation(ANN, "conv", {"k": "v"}, [item("first")])
    save(
        memory, replace(response("a", of="conv"), in_conversation=True), response("b"), response("c", "b", of="b")
    )
    told = [json.loads(json.dumps(row)) for row in memory.export(ANN)]
    assert [row["kind"] for row in told] == ["header", "item_list", "response", "response", "response"]
    other = Memory(tmp_path / "other.sqlite", limit_bytes=PLENTY)
    assert other.import_(told) == 4
    assert other.import_(told) == 0
    assert list(other.export(ANN))[1:] == told[1:]
    assert other.responses.items_until(ANN, "c") == memory.responses.items_until(ANN, "c")
    other.close()


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


def test_a_conversation_of_before_is_as_old_as_its_last_response(path: Path) -> None:
    path.parent.mkdir(parents=True)
    db = apsw.Connection(str(path))
    migrate(db, [m001_initial, m002_forgettings, m003_responses])
    db.execute("INSERT INTO owners (name) VALUES ('ann')")
    for name, created, metadata in (("new", 7, "{}"), ("used", 5, "{}"), ("archived", 3, None)):
        sql = "INSERT INTO conversations (owner, name, created, metadata) VALUES (1, ?, ?, ?)"
        db.execute(sql, (name, created, metadata))
    sql = """INSERT INTO responses (owner, conversation, name, in_conversation, at, data, input)
             VALUES (1, 2, 'a', 1, 9, '{}', '[]')"""
    db.execute(sql)
    migrate(db)
    assert rows(db, "SELECT name, updated FROM conversations") == [("new", 7), ("used", 9), ("archived", 0)]
    db.close()
