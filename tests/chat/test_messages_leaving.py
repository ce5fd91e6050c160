from __future__ import annotations

from emberkeep.chat.messages import leaving_turns
from emberkeep.types.request import Message, ToolCall

SYSTEM = Message("system", "Be brief.")


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


def call(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(id_, "look", "{}") for id_ in ids))


def result(id_: str | None) -> Message:
    return Message("tool", "found", tool_call_id=id_)


def left(*messages: Message) -> list[list[int]]:
    return [sorted(turn) for turn in leaving_turns(messages)]


def test_turns_leave_whole_and_the_last_one_stays():
    assert left(SYSTEM, user("1"), answer("1"), user("2"), answer("2"), user("3")) == [[1, 2], [3, 4]]
    assert left(SYSTEM, user("1"), answer("1"), user("2"), answer("2")) == [[1, 2]]


def test_what_an_assistant_said_before_the_first_question_may_leave():
    assert left(answer("Hello!"), user("1"), answer("1"), user("2")) == [[0], [1, 2]]


def test_system_messages_stay_wherever_they_are():
    developer = Message("developer", "In French.")
    assert left(SYSTEM, user("1"), developer, answer("1"), user("2")) == [[1, 3]]


def test_a_tool_call_leaves_with_its_result():
    assert left(user("1"), call("a", "b"), result("a"), result("b"), answer("1"), user("2")) == [[0, 1, 2, 3, 4]]
    assert left(user("1"), call("a"), result(None), user("2")) == [[0, 1, 2]]


def test_a_call_that_is_not_answered_yet_stays():
    assert left(user("1"), call("a", "b"), result("a"), user("2")) == []
    assert left(user("1"), answer("1"), user("2"), call("a"), user("3"), result("a")) == [[0, 1]]
    assert left(user("1"), call("a"), user("2"), result("a"), user("3")) == []


def test_without_a_user_nothing_leaves():
    assert left(SYSTEM, answer("Hello!")) == []
    assert left() == []
