from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("messages", "leaving"),
    [
        ((SYSTEM, user("1"), answer("1"), user("2"), answer("2"), user("3")), [[1, 2], [3, 4]]),
        ((SYSTEM, user("1"), answer("1"), user("2"), answer("2")), [[1, 2]]),
        ((answer("Hello!"), user("1"), answer("1"), user("2")), [[0], [1, 2]]),
        ((SYSTEM, user("1"), Message("developer", "In French."), answer("1"), user("2")), [[1, 3]]),
        ((user("1"), call("a", "b"), result("a"), result("b"), answer("1"), user("2")), [[0, 1, 2, 3, 4]]),
        ((user("1"), call("a"), result(None), user("2")), [[0, 1, 2]]),
        ((user("1"), call("a", "b"), result("a"), user("2")), []),
        ((user("1"), answer("1"), user("2"), call("a"), user("3"), result("a")), [[0, 1]]),
        ((user("1"), call("a"), user("2"), result("a"), user("3")), []),
        ((SYSTEM, answer("Hello!")), []),
        ((), []),
    ],
)
def test_turns_leave_whole_and_the_last_one_system_messages_and_open_calls_stay(
    messages: tuple[Message, ...], leaving: list[list[int]]
) -> None:
    assert [sorted(turn) for turn in leaving_turns(messages)] == leaving
