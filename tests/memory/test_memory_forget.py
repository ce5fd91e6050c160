from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import made_up_turns
from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Forgotten, Note, NoteKind
from emberkeep.types.request import Message
from helpers.remembering import PLENTY, owners, raw_bytes, turn

CANARY = b"xqcanari"
"""As it is written in texts (xqcanaries), and as its stem is in the index."""


def fill(memory: Memory, owner: str) -> None:
    """Turns of two conversations in between each other; the one that goes says things the other does not."""
    chance = random.Random(owner)
    made_up = list(made_up_turns(600, begin=0))
    while made_up:
        goes = chance.random() < 0.3
        some = [made_up.pop() for _ in range(min(chance.randrange(1, 20), len(made_up)))]
        said = " xqcanaries" * chance.randrange(1, 90) if goes else ""
        notes = [Note(one.key, NoteKind.INSERTED, {"before": said}) for one in some[::3]]
        name = "goes" if goes else "stays"
        memory.archive(owner, [replace(t, user_text=t.user_text + said, conversation=name) for t in some], notes)
    memory.save_messages(owner, "goes", [Message("user", "xqcanaries " * 3000)], model="m")
    memory.save_messages(owner, "stays", [Message("user", "hello")], model="m")


def test_of_a_forgotten_conversation_no_byte_is_left_in_the_files(memory: Memory, path: Path) -> None:
    fill(memory, "")
    before = memory.stats("")
    assert raw_bytes(path).lower().count(CANARY) > 1000
    size = len(raw_bytes(path))
    forgotten = memory.forget("", "goes")
    assert CANARY not in raw_bytes(path).lower()
    assert memory.search("", "xqcanaries") == [] and memory.conversation("", "goes") is None
    after = memory.stats("")
    assert forgotten.turns == before["turns"] - after["turns"] > 50
    assert forgotten.conversations == 1 and forgotten.bytes > 0
    assert len(raw_bytes(path)) < size
    assert memory.conversation("", "stays") is not None and memory.search("", "people time", conversation="stays")


def test_everything_of_an_owner_goes_and_nothing_of_another(memory: Memory, path: Path) -> None:
    fill(memory, "a")
    fill(memory, "b")
    for owner in ("a", "b"):
        memory.set_fact(owner, "town", "xqcanaries of a" if owner == "a" else "Graz")
        memory.store_answer(owner, f"what of {owner}", "nothing")
    memory.forget("b", "goes")
    kept = {key: value for key, value in memory.stats("b").items() if key != "bytes"}
    forgotten = memory.forget("a")
    assert (forgotten.turns, forgotten.answers, forgotten.facts, forgotten.conversations) == (600, 1, 1, 2)
    assert CANARY not in raw_bytes(path).lower()
    assert owners(memory) == ["b"]
    assert {key: value for key, value in memory.stats("b").items() if key != "bytes"} == kept


def test_notes_are_forgotten_with_the_conversation_they_are_about(memory: Memory) -> None:
    memory.archive("", [turn("x", conversation="c")], [Note(b"1", NoteKind.EVICTED, 1)])
    memory.archive("", [], [Note(b"2", NoteKind.INSERTED, 2)], conversation="c")
    memory.archive("", [], [Note(b"3", NoteKind.INSERTED, 3)], conversation="d")
    memory.forget("", "c")
    assert [note.data for note in memory.notes("", [b"1", b"2", b"3"])] == [3]


def test_stored_answers_do_not_go_with_a_conversation(memory: Memory) -> None:
    memory.store_answer("", "when is lunch", "at noon")
    memory.archive("", [turn("lunch", conversation="")])
    memory.forget("", "")
    assert [one.assistant_text for one in memory.search("", "lunch")] == ["at noon"]


def test_what_is_not_there_is_forgotten_already(memory: Memory) -> None:
    memory.archive("", [turn("hello")])
    assert memory.forget("no user") == Forgotten()
    assert memory.forget("", "unknown") == Forgotten()
    assert memory.stats("")["turns"] == 1


def test_forgetting_raises_while_a_reader_still_holds_the_old_bytes(
    memory: Memory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.memory.database._BUSY_S", 0.05)
    mine = Memory(path, limit_bytes=PLENTY)
    mine.archive("", [turn("xqcanaries")])
    with memory._database.snapshot() as db:
        db.execute("SELECT count(*) FROM turns").fetchall()
        with pytest.raises(MemoryFailed, match="held by another program"):
            mine.forget("")
    mine.archive("", [turn("xqcanaries")])
    mine.forget("")
    assert CANARY not in raw_bytes(path).lower()
    mine.close()


LIMIT = 1 << 20


@pytest.mark.slow
def test_the_oldest_turns_go_when_the_file_is_too_large(path: Path) -> None:
    memory = Memory(path, limit_bytes=LIMIT)
    memory.set_fact("", "town", "Graz")
    memory.store_answer("", "who is oldest", "the first")
    memory.save_messages("", "c", [Message("user", "hello")], model="m")
    memory.archive("", [turn("the aardvark came first")], [Note(b"k", NoteKind.EVICTED, 1)])
    made_up = list(made_up_turns(4000, begin=0))
    for i in range(0, 4000, 40):
        memory.archive("", made_up[i : i + 40])
    found = memory.stats("")
    assert found["bytes"] <= LIMIT * 1.1 and found["limit"] == LIMIT
    assert 500 < found["turns"] < 4000
    assert memory.search("", "aardvark") == []
    assert (found["facts"], found["answers"], found["conversations"], found["notes"]) == (1, 1, 1, 0)
    assert memory.search("", "who is oldest")
    assert memory.search("", made_up[-1].user_text)[0].user_text == made_up[-1].user_text
    memory.close()
    assert path.stat().st_size <= LIMIT * 1.5


@pytest.mark.slow
def test_a_smaller_limit_takes_effect_write_by_write(path: Path) -> None:
    memory = Memory(path, limit_bytes=1 << 40)
    memory.archive("", [turn(f"old {i} " + "word " * 1000) for i in range(800)])
    before = memory.stats("")["bytes"]
    memory.close()
    memory = Memory(path, limit_bytes=before // 4)
    kept = []
    for i in range(20):
        memory.archive("", [turn(f"one more {i}")])
        kept.append(memory.stats("")["turns"])
    assert kept[0] == 800 - 64 + 1
    assert memory.stats("")["bytes"] <= before // 4
    memory.close()
    assert path.stat().st_size < before * 3 // 4


@pytest.mark.slow
def test_nothing_but_turns_ever_goes(path: Path) -> None:
    memory = Memory(path, limit_bytes=1)
    memory.set_fact("", "town", "Graz")
    memory.store_answer("", "who", "me")
    memory.save_messages("", "c", [Message("user", "hello")], model="m")
    memory.archive("", [turn("gone at once")])
    found = memory.stats("")
    assert (found["turns"], found["facts"], found["answers"], found["conversations"]) == (0, 1, 1, 1)
    memory.close()


@pytest.mark.slow
def test_users_who_came_once_are_not_known_for_ever(path: Path) -> None:
    memory = Memory(path, limit_bytes=1 << 20)
    memory.set_fact("stays", "town", "Graz")
    for i in range(3000):
        said = [turn(f"hello {i} " + "word " * 60, conversation=f"talk {i}")]
        memory.archive(f"user {i}", said, [Note(str(i).encode(), NoteKind.EVICTED, i)])
    left = owners(memory)
    assert "stays" in left and "user 0" not in left and "user 2999" in left
    assert len(left) <= memory.stats()["turns"] + 32
    with memory._database.snapshot() as db:
        assert db.execute("SELECT count(*) FROM conversations").fetchall()[0][0] <= len(left)
    assert memory.stats()["bytes"] <= 1.1 * (1 << 20)
    memory.close()
