from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import made_up_turns
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind
from emberkeep.types.request import Message
from helpers.remembering import owners, turn

pytestmark = pytest.mark.slow

LIMIT = 1 << 20


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


def test_nothing_but_turns_ever_goes(path: Path) -> None:
    memory = Memory(path, limit_bytes=1)
    memory.set_fact("", "town", "Graz")
    memory.store_answer("", "who", "me")
    memory.save_messages("", "c", [Message("user", "hello")], model="m")
    memory.archive("", [turn("gone at once")])
    found = memory.stats("")
    assert (found["turns"], found["facts"], found["answers"], found["conversations"]) == (0, 1, 1, 1)
    memory.close()


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
