from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind, ToolUse
from helpers.remembering import PLENTY, owners, turn


def test_only_the_owner_of_the_machine_can_read_the_file(memory: Memory, path: Path) -> None:
    memory.archive("", [turn("hello")])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_what_was_archived_survives_closing(memory: Memory, path: Path) -> None:
    use = ToolUse("clock", "{}", "noon")
    assert memory.archive("", [turn("what time is it", "noon", tool_uses=(use,))]) == 1
    memory.close()
    reopened = Memory(path, limit_bytes=PLENTY)
    (found,) = reopened.search("", "time")
    assert (found.user_text, found.assistant_text, found.tool_uses) == ("what time is it", "noon", (use,))
    assert found.conversation == "talk"
    reopened.close()


def test_a_turn_is_archived_once(memory: Memory) -> None:
    first, second = turn("one"), turn("two")
    assert memory.archive("", [first, first]) == 1
    assert memory.archive("", [first, second]) == 1
    assert memory.archive("another user", [first]) == 1
    assert memory.stats("")["turns"] == 2


def test_a_note_replaces_one_of_the_same_place_and_kind(memory: Memory) -> None:
    memory.archive("", [], [Note(b"k", NoteKind.EVICTED, 1), Note(b"k", NoteKind.INSERTED, 2)], conversation="c")
    memory.archive("", [], [Note(b"k", NoteKind.EVICTED, {"now": 3})], conversation="c")
    found = {note.kind: note.data for note in memory.notes("", [b"k", b"none"])}
    assert found == {NoteKind.EVICTED: {"now": 3}, NoteKind.INSERTED: 2}
    assert memory.notes("another user", [b"k"]) == []


def test_notes_are_found_among_thousands_of_places(memory: Memory) -> None:
    places = [i.to_bytes(16) for i in range(3000)]
    memory.archive("", [], [Note(places[i], NoteKind.EVICTED, i) for i in (0, 127, 128, 2999)])
    assert sorted(note.data for note in memory.notes("", places)) == [0, 127, 128, 2999]


def test_text_that_no_file_can_hold_is_archived_without_it(memory: Memory) -> None:
    memory.archive("", [turn("half \ud83d a character", "nul \x00 inside", conversation="\udc00")])
    (found,) = memory.search("", "character \ud83d")
    assert found.user_text == "half ? a character"
    assert found.assistant_text == "nul \x00 inside"


def test_many_threads_write_and_read_at_once(memory: Memory) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(20):
                memory.archive(name, [turn(f"thing number {i} of {name}")])
                assert memory.search(name, f"number {i}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"owner {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [memory.stats(owner)["turns"] for owner in owners(memory)] == [20] * 4


def test_two_memories_on_one_file_see_what_the_other_wrote(memory: Memory, path: Path) -> None:
    other = Memory(path, limit_bytes=PLENTY)
    other.archive("", [turn("written elsewhere")])
    assert memory.search("", "elsewhere")
    memory.forget("")
    assert other.search("", "elsewhere") == []
    other.close()


def test_a_closed_memory_says_so(memory: Memory) -> None:
    memory.close()
    memory.close()
    with pytest.raises(MemoryFailed, match="is closed"):
        memory.archive("", [turn("too late")])
    with pytest.raises(MemoryFailed, match="is closed"):
        memory.search("", "too late")
