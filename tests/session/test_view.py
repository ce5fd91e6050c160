"""What may leave a conversation, what is said about it, what stands in it besides, and how it is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.session.recall import archived, notice
from emberkeep.session.view import Gone, Inserted, View, read_history, read_view
from emberkeep.types.memory import Note, NoteKind, ToolUse
from emberkeep.types.request import Message, Recall, ToolCall


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def call(name: str, *ids: str) -> Message:
    return Message("assistant", "", tool_calls=tuple(ToolCall(id_, name, "{}") for id_ in ids))


def result(id_: str | None, text: str) -> Message:
    return Message("tool", text, tool_call_id=id_)


def view(*messages: Message, gone: Gone | None = None, inserted: dict[int, Inserted] | None = None) -> View:
    return View(read_history(messages, None), gone or Gone(), inserted or {})


def leaving(*messages: Message) -> list[list[int]]:
    return [sorted(group) for group in view(*messages).leaving()]


def shown(view: View) -> list[str]:
    return [message.content for message in view.messages]


SYSTEM = Message("system", "Be kind.")
CHAT = (SYSTEM, user("a"), said("b"), user("c"), said("d"), user("e"))


# ── what may leave ──


def test_whole_turns_leave_oldest_first_and_the_last_question_stays():
    assert leaving(*CHAT) == [[0, 1], [2, 3]]
    assert leaving(*CHAT, said("f")) == [[0, 1], [2, 3]]


def test_what_has_left_does_not_leave_again():
    out = view(*CHAT, gone=Gone(frozenset({0, 1})))
    assert [sorted(group) for group in out.leaving()] == [[2, 3]]
    assert out.kept == [2, 3, 4]


def test_a_tool_call_leaves_with_its_results():
    turn = (user("a"), call("look", "1", "2"), result("1", "x"), result("2", "y"), said("b"))
    assert leaving(*turn, user("c")) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "turn",
    [
        (user("a"), call("look", "1")),
        (user("a"), call("look", "1", "2"), result("1", "x"), said("b")),
        (user("a"), result("9", "of an unknown call"), said("b")),
        (user("a"), call("look", "1", "2"), result(None, "one of two"), said("b")),
    ],
)
def test_a_call_without_its_result_stays_and_so_does_a_result_without_its_call(turn):
    assert leaving(*turn, user("c"), said("d"), user("e")) == [[len(turn), len(turn) + 1]]


def test_in_one_long_turn_of_an_agent_old_exchanges_leave_and_the_latest_stays():
    exchanges = [part for i in range(4) for part in (call("look", str(i)), result(str(i), "x"))]
    assert leaving(SYSTEM, user("do it"), *exchanges) == [[1, 2], [3, 4], [5, 6]]
    assert leaving(SYSTEM, user("a"), said("b"), user("do it"), *exchanges)[:2] == [[0, 1], [3, 4]]


def test_nothing_may_leave_a_single_question_or_what_no_user_said():
    assert leaving(SYSTEM, user("a")) == leaving(SYSTEM, said("a"), said("b")) == leaving(SYSTEM) == []


def test_system_messages_stay_wherever_they_stand():
    late = Message("developer", "Be brief.")
    out = view(SYSTEM, user("a"), late, said("b"), user("c"))
    assert [sorted(group) for group in out.leaving()] == [[0, 1]]
    assert shown(replace(out, gone=Gone(frozenset({0, 1})))) == ["Be kind.", "Be brief.", "c"]


# ── what is said about it ──


def test_the_first_user_message_that_is_left_tells_how_many_left():
    gone = Gone(frozenset({0, 1}), notice=notice(2, Recall.TOOL, is_archived=True))
    told = shown(view(*CHAT, gone=gone))
    assert told[0] == "Be kind."
    assert told[1].startswith("[2 earlier messages of this conversation have left the context")
    assert told[1].endswith("]\n\nc")
    assert told[2:] == ["d", "e"]


def test_in_the_turn_of_an_agent_the_question_tells_it():
    talk = (SYSTEM, user("do it"), call("look", "1"), result("1", "x"), call("look", "2"), result("2", "y"))
    told = view(*talk, gone=Gone(frozenset({1, 2}), notice="[gone]")).messages
    assert [message.content for message in told] == ["Be kind.", "[gone]do it", "", "y"]


@pytest.mark.parametrize(
    ("recall", "is_archived", "how"),
    [
        (Recall.TOOL, True, "search_memory"),
        (Recall.AUTO, True, "quoted"),
        (Recall.OFF, True, "archived"),
        (Recall.OFF, False, "cannot be read any more"),
    ],
)
def test_the_notice_says_how_to_find_them(recall, is_archived, how):
    assert how in notice(5, recall, is_archived=is_archived)
    assert notice(1, recall, is_archived=is_archived).startswith("[1 earlier message of this conversation has ")


# ── what stands in it besides ──


SEARCH = (call("search_memory", "s"), result("s", "found"))


def test_a_search_stands_after_its_message_and_what_was_said_with_it_is_not_said_twice():
    put = Inserted(after=SEARCH, said="Let me see. ")
    told = view(user("a"), said("Let me see. It was Tuesday."), user("b"), inserted={0: put}).messages
    assert told == (user("a"), *SEARCH, said("It was Tuesday."), user("b"))


def test_an_answer_that_was_edited_stays_as_it_is():
    put = Inserted(after=SEARCH, said="Let me see. ")
    assert shown(view(user("a"), said("It was Monday."), inserted={0: put}))[-1] == "It was Monday."


def test_what_was_said_with_a_search_is_cut_off_the_next_message_only():
    """The next one is gone; another that begins alike is whole."""
    put = Inserted(after=SEARCH, said="Well, ")
    more = (
        call("look", "1"),
        result("1", "x"),
        Message("assistant", "Well, y", tool_calls=call("l", "2").tool_calls),
    )
    out = view(user("a"), *more, result("2", "z"), gone=Gone(frozenset({1, 2})), inserted={0: put})
    assert "Well, y" in shown(out)


def test_quotes_stand_before_the_text_of_their_message_behind_the_notice():
    out = view(
        *CHAT, gone=Gone(frozenset({0, 1}), notice="[gone]"), inserted={2: Inserted("[quote]"), 4: Inserted("[q]")}
    )
    assert shown(out) == ["Be kind.", "[gone][quote]c", "d", "[q]e"]


# ── as notes ──


def test_the_latest_note_tells_what_is_gone():
    history = read_history(CHAT, None)
    notes = [Gone(frozenset(out), 7, "root", "[n]").note(history) for out in ({0, 1, 2, 3}, {0, 1})]
    assert read_view(history, notes).gone == Gone(frozenset({0, 1, 2, 3}), 7, "root", "[n]")


places = st.frozensets(st.integers(0, 30), min_size=1)


@given(places, st.integers(0, 1000), st.text(max_size=9), st.text(max_size=9))
def test_what_is_gone_is_read_back_from_its_note(spoken, tokens, root, text):
    history = read_history([user(str(i)) for i in range(31)], None)
    gone = Gone(spoken, tokens, root, text)
    assert read_view(history, [gone.note(history)]).gone == gone


def test_what_was_put_in_is_read_back_from_its_note():
    history = read_history(CHAT, None)
    put = Inserted("before", (4, 5), (replace(SEARCH[0], reasoning="hm"), SEARCH[1]), "said")
    note = put.note(history.keys[2])
    assert read_view(history, [Note(note.key, NoteKind.INSERTED, note.data)]).inserted == {2: put}


# ── as turns ──


def test_a_turn_of_the_archive_has_what_was_said_and_what_tools_gave():
    talk = (user("a"), call("look", "1", "2"), result("2", "y"), result("1", "x"), said("b"), user("c"))
    history = read_history(talk, "talk")
    (turn,) = archived(View(history), view(*talk).leaving())
    assert (turn.user_text, turn.assistant_text, turn.conversation) == ("a", "b", "talk")
    assert turn.tool_uses == (ToolUse("look", "{}", "x"), ToolUse("look", "{}", "y"))
    assert turn.key == history.keys[4]


def test_results_without_ids_belong_to_the_calls_in_turn():
    talk = (user("a"), call("look", "1", "2"), result(None, "x"), result(None, "y"), user("c"))
    (turn,) = archived(view(*talk), view(*talk).leaving())
    assert [use.result for use in turn.tool_uses] == ["x", "y"]


def test_calls_that_the_client_knows_nothing_of_are_archived_too_but_not_what_memory_said():
    ours = (call("look", "1"), result("1", "seven metres"), *SEARCH)
    asked = view(user("a"), said("b"), user("c"), inserted={0: Inserted(after=ours)})
    (turn,) = archived(asked, asked.leaving())
    assert turn.tool_uses == (ToolUse("look", "{}", "seven metres"),)
    assert (turn.user_text, turn.assistant_text) == ("a", "b")


def test_what_is_left_without_a_notice_is_in_order():
    messages = (Message("system", "Be kind."), user("1"), said("1"), user("2"), said("2"), user("3"))
    whole = view(*messages)
    turns = whole.leaving()
    assert whole.without([]).messages == messages
    assert whole.without(turns[:1]).messages == (messages[0], *messages[3:])
    assert whole.without(turns).messages == (messages[0], user("3"))


# ── how a conversation is known ──

TALK = [
    Message("system", "Be kind."),
    Message("user", "Hello."),
    Message("assistant", "Good day."),
    Message("user", "Which day is it?"),
    Message("assistant", tool_calls=(ToolCall("c1", "calendar", '{"of": "today"}'),)),
    Message("tool", "Monday", tool_call_id="c1"),
]

texts = st.text(st.characters(exclude_categories=()), max_size=4)  # halves of characters too
some_calls = st.builds(ToolCall, texts, texts, texts)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    texts,
    tool_calls=st.lists(some_calls, max_size=2).map(tuple),
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


def meaning(talk: list[Message]) -> list[object]:
    """What is said, without how it is written: ids are numbered as they come, arguments are values."""
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
