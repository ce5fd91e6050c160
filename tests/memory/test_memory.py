from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind, ToolUse
from emberkeep.types.request import Message, ToolCall
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


TALK = (
    Message("system", "Be brief."),
    Message("user", "What time\nis it?"),
    Message("assistant", "", reasoning="a clock", tool_calls=(ToolCall("1", "clock", '{"zone": "CET"}'),)),
    Message("tool", "noon \ud83d", tool_call_id="1", name="clock"),
    Message("assistant", "Noon.\x00"),
)


def test_messages_come_back_exactly_as_they_were_saved(memory: Memory) -> None:
    memory.save_messages("", "c", TALK[:2], model="m")
    memory.save_messages("", "c", TALK[2:], model="m")
    saved = memory.conversation("", "c")
    assert saved is not None and saved.messages == TALK
    assert (saved.title, saved.model, saved.message_count) == ("What time is it?", "m", 5)
    assert 0 < saved.created <= saved.updated


def test_a_title_is_short_and_tells_no_secret(memory: Memory) -> None:
    memory.save_messages(
        "", "c", [Message("user", "my key sk-1234567890abcdefghijkl " + "word " * 100)], model="m"
    )
    (saved,) = memory.conversations("")
    assert saved.title.startswith("my key [secret] word") and len(saved.title) == 80 and saved.title.endswith("…")


def test_a_conversation_gets_its_title_when_the_user_first_says_something(memory: Memory) -> None:
    memory.save_messages("", "c", [Message("system", "Be brief.")], model="m")
    memory.save_messages("", "c", [Message("user", "Hello")], model="m")
    memory.save_messages("", "c", [Message("user", "Another thing")], model="m")
    assert [saved.title for saved in memory.conversations("")] == ["Hello"]


def test_the_latest_conversation_comes_first_without_its_messages(memory: Memory) -> None:
    for name in ("a", "b", "c"):
        memory.save_messages("", name, [Message("user", name)], model="m")
    memory.save_messages("", "a", [Message("user", "again")], model="n")
    found = memory.conversations("", limit=2)
    assert [(saved.id, saved.message_count, saved.messages) for saved in found] == [("a", 2, ()), ("c", 1, ())]


def test_messages_can_be_replaced(memory: Memory) -> None:
    memory.save_messages("", "c", TALK, model="m")
    memory.replace_messages("", "c", [Message("system", "Start over.")], model="m")
    saved = memory.conversation("", "c")
    assert saved is not None and saved.messages == (Message("system", "Start over."),)
    memory.replace_messages("", "c", [], model="m")
    assert memory.conversations("")[0].message_count == 0


def test_a_conversation_of_which_only_turns_are_archived_is_not_a_saved_one(memory: Memory) -> None:
    memory.archive("", [turn("hello", conversation="c")])
    assert memory.conversations("") == [] and memory.conversation("", "c") is None


def test_a_clock_that_goes_back_does_not_keep_a_fact_from_changing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.set_fact("", "town", "Graz")
    first = memory.store_answer("", "who?", "me")
    monkeypatch.setattr("time.time", lambda: 1.0)
    memory.set_fact("", "town", "Linz")
    second = memory.store_answer("", "who?", "you")
    assert [fact.value for fact in memory.facts("")] == ["Linz"]
    assert second != first and [one.assistant_text for one in memory.search("", "who")] == ["you"]


def test_the_same_question_again_replaces_the_answer(memory: Memory) -> None:
    memory.store_answer("", "When is lunch?", "At noon")
    memory.store_answer("", "When is lunch?", "At one")
    assert [one.assistant_text for one in memory.search("", "lunch")] == ["At one"]
    assert memory.stats("")["answers"] == 1
