"""A conversation is known by what it says."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from emberkeep.session.view import read_history
from emberkeep.types.request import Message, ToolCall

TALK = [
    Message("system", "Be kind."),
    Message("user", "Hello."),
    Message("assistant", "Good day."),
    Message("user", "Which day is it?"),
    Message("assistant", tool_calls=(ToolCall("c1", "calendar", '{"of": "today"}'),)),
    Message("tool", "Monday", tool_call_id="c1"),
]

texts = st.text(st.characters(exclude_categories=()), max_size=4)  # halves of characters too
calls = st.builds(ToolCall, texts, texts, texts)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=texts,
    name=texts,
)


def keys(talk: list[Message], conversation_id: str | None = None) -> tuple[bytes, ...]:
    return read_history(talk, conversation_id).keys


def edited(index: int, **changes: object) -> list[Message]:
    return [replace(message, **changes) if i == index else message for i, message in enumerate(TALK)]


def test_a_longer_history_has_the_keys_of_the_shorter_one_and_more():
    for length in range(len(TALK)):
        shorter = keys(TALK[:length])
        assert keys(TALK)[: len(shorter)] == shorter
    assert len(set(keys(TALK))) == 5


def test_an_edit_changes_the_keys_from_there_on():
    before, after = keys(TALK), keys(edited(3, content="Which year is it?"))
    assert before[:2] == after[:2]
    assert not set(before[2:]) & set(after)


def test_everything_that_clients_send_back_counts():
    call = ToolCall("c1", "calendar", '{"of": "today"}')
    changes = [
        edited(5, content="Tuesday"),
        edited(5, tool_call_id="c2"),
        edited(5, name="calendar"),
        edited(4, tool_calls=()),
        edited(4, tool_calls=(call, call)),
        edited(4, tool_calls=(replace(call, name="clock"),)),
        edited(4, tool_calls=(replace(call, arguments="{}"),)),
        edited(4, role="user"),
    ]
    assert len({keys(talk)[-1] for talk in [TALK, *changes]}) == len(changes) + 1


def test_how_a_client_writes_calls_does_not_count():
    call = ToolCall("mine", "calendar", '{"of":"today"}')
    rewritten = [*TALK[:4], replace(TALK[4], tool_calls=(call,)), replace(TALK[5], tool_call_id="mine")]
    assert keys(rewritten) == keys(TALK)
    two = Message("assistant", tool_calls=(ToolCall("a", "x", '{"b": 1, "c": [2]}'), ToolCall("b", "x", "{")))
    again = Message("assistant", tool_calls=(ToolCall("q", "x", '{"c":[2],"b":1}'), ToolCall("p", "x", "{")))
    results = [Message("tool", "r", tool_call_id=id) for id in "abqp"]
    assert keys([two, results[1], results[0]]) == keys([again, results[3], results[2]])
    assert keys([two, results[0]]) != keys([two, results[1]])


def test_system_messages_and_reasoning_do_not_count():
    assert keys(edited(0, content="It is noon.")) == keys(TALK) == keys(TALK[1:])
    assert keys([*TALK[:3], Message("developer", "Be brief."), *TALK[3:]]) == keys(TALK)
    assert keys(edited(2, reasoning="They greet me.")) == keys(TALK)


def test_a_conversation_is_called_as_its_client_calls_it_or_by_its_first_exchange():
    assert read_history(TALK, "talk 7").conversation == "talk 7"
    assert read_history(TALK, None).conversation == read_history(TALK[:3], None).conversation
    for other in (edited(1, content="Hi."), edited(2, content="Oh, it is you.")):
        assert read_history(TALK, None).conversation != read_history(other, None).conversation
    assert read_history(TALK[:1], None).conversation == ""


def test_the_same_words_in_another_conversation_have_other_keys():
    assert not set(keys(TALK, "one")) & {*keys(TALK, "two"), *keys(TALK)}


def test_the_latest_user_is_found_among_what_was_spoken():
    assert read_history(TALK, None).last_user == 2
    assert read_history([TALK[0], TALK[2]], None).last_user is None


def meaning(talk: list[Message]) -> list[object]:
    """Without how it is written: ids are numbered as they come, arguments are values."""
    ids: dict[str, int] = {}
    meant: list[object] = []
    for message in talk:
        called = ids.setdefault(message.tool_call_id, len(ids)) if message.tool_call_id else None
        made = [(ids.setdefault(call.id, len(ids)), call.name, value(call)) for call in message.tool_calls]
        meant.append((message.role, message.content, called, message.name, made))
    return meant


def value(call: ToolCall) -> str:
    try:
        return repr(json.loads(call.arguments))
    except ValueError:
        return f"not JSON: {call.arguments}"


@given(st.lists(messages, max_size=3), st.lists(messages, max_size=3))
def test_no_two_histories_that_mean_different_things_have_the_same_key(some, others):
    assert (keys(some)[-1:] == keys(others)[-1:]) == (meaning(some) == meaning(others))
