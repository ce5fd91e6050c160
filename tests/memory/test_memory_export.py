from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind, ToolUse
from emberkeep.types.request import Message, ToolCall
from helpers.remembering import PLENTY, owners, turn


def filled(memory: Memory) -> list[dict[str, Any]]:
    use = ToolUse("clock", "{}", "noon")
    for owner in ("", '["anna", ""]'):
        turns = [turn(f"thing {i} of {owner}", "yes", conversation="c", tool_uses=(use,)) for i in range(3)]
        memory.archive(owner, turns, [Note(turns[0].key, NoteKind.EVICTED, {"out": [[0, 2]]})])
        memory.set_fact(owner, "town", f"town of {owner}")
        memory.store_answer(owner, "who?", f"{owner} itself")
        calls = (ToolCall("1", "clock", "{}"),)
        memory.save_messages(
            owner, "c", [Message("user", "hi"), Message("assistant", tool_calls=calls)], model="m"
        )
    return [json.loads(json.dumps(row)) for row in memory.export()]


@pytest.fixture
def other(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "other.sqlite", limit_bytes=PLENTY)


def test_what_is_exported_is_imported_whole(memory: Memory, other: Memory) -> None:
    rows = filled(memory)
    assert next(iter(rows[0])) == "kind" and rows[0]["kind"] == "header"
    assert other.import_(rows) == len(rows) - 1
    assert list(other.export())[1:] == rows[1:]
    assert len(other.search("", "thing")) == 3
    assert other.conversation("", "c") == memory.conversation("", "c")


def test_importing_twice_adds_nothing(memory: Memory, other: Memory) -> None:
    rows = filled(memory)
    other.import_(rows)
    assert other.import_(rows) == 0
    assert memory.import_(rows) == 0
    assert list(other.export())[1:] == rows[1:]


def test_one_owner_can_be_exported_alone(memory: Memory) -> None:
    filled(memory)
    rows = list(memory.export('["anna", ""]'))
    assert {row["owner"] for row in rows[1:]} == {'["anna", ""]'}
    assert [row["kind"] for row in rows] == [
        "header",
        "fact",
        "turn",
        "turn",
        "turn",
        "answer",
        "note",
        "conversation",
    ]
    assert [row["kind"] for row in memory.export("no user")] == ["header"]


def test_the_newer_of_two_versions_stays(memory: Memory, other: Memory) -> None:
    rows = filled(memory)
    other.import_(rows)
    other.set_fact("", "town", "a newer one")
    other.store_answer("", "who?", "a newer person")
    other.save_messages("", "c", [Message("user", "more")], model="m")
    newer = list(other.export())
    assert other.import_(rows) == 0
    assert memory.import_(newer) == 3
    assert memory.facts("")[0].value == "a newer one"
    assert [one.assistant_text for one in memory.search("", "who")] == ["a newer person"]
    saved = memory.conversation("", "c")
    assert saved is not None and saved.messages[-1].content == "more"


def test_others_may_write_between_two_exported_rows(memory: Memory) -> None:
    filled(memory)
    for row in memory.export():
        memory.archive("late", [turn(f"written meanwhile {row['kind']}")])
    assert memory.stats("late")["turns"] > 1


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "surprise", "owner": ""},
        {"kind": "fact", "owner": ""},
        {"kind": "fact", "owner": 7, "name": "a", "value": "b", "at": 1},
        {"kind": "fact", "owner": "", "name": "password", "value": "hunter22", "at": 1},
        {"kind": "turn", "owner": "", "conversation": "c", "key": "not hex", "at": 1},
        {"kind": "note", "owner": "", "conversation": None, "key": "00", "about": "surprise", "data": 1},
        {"kind": "conversation", "owner": "", "id": "c", "title": "", "model": "", "created": 0, "updated": 0},
        {"kind": "fact", "owner": "", "name": "a", "value": "b", "at": float("nan")},
        {"kind": "conversation", "owner": "", "id": "c", "title": "", "model": "", "created": 0, "updated": 0}
        | {"messages": [{"role": "user", "content": 7, "reasoning": "", "tool_calls": []}]},
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
        {"kind": ["unhashable"], "owner": ""},
        ["kind"],
        7,
    ],
)
def test_a_bad_row_is_named_and_nothing_around_it_is_kept(memory: Memory, bad: Any) -> None:
    good = {"kind": "fact", "owner": "", "name": "town", "value": "Graz", "at": 1}
    with pytest.raises(MemoryFailed, match=r"^Line 3"):
        memory.import_([{"kind": "header", "version": 1}, good, bad, good])
    assert owners(memory) == []


@pytest.mark.parametrize(
    "header", [[], [{"kind": "fact"}], [{"kind": "header"}], [{"kind": "header", "version": 99}]]
)
def test_only_an_export_is_imported(memory: Memory, header: list[dict[str, Any]]) -> None:
    with pytest.raises(MemoryFailed, match="export"):
        memory.import_(header)


def test_secrets_of_a_file_from_elsewhere_are_left_out(memory: Memory, other: Memory) -> None:
    rows = filled(memory)
    rows[2]["user_text"] = "my key is sk-1234567890abcdefghijkl"
    other.import_(rows)
    assert not any("sk-123" in json.dumps(row) for row in other.export())
