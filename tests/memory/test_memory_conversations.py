from __future__ import annotations

from emberkeep.memory.memory import Memory
from emberkeep.types.request import Message, ToolCall
from helpers.remembering import turn

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


def test_saved_conversations_belong_to_one_owner(memory: Memory) -> None:
    memory.save_messages("a", "c", TALK, model="m")
    assert memory.conversations("b") == [] and memory.conversation("b", "c") is None
