"""What a conversation in flight has to archive is not written down once its user was forgotten."""

from __future__ import annotations

import pytest

from emberkeep.memory.memory import Memory
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.types.events import Usage
from emberkeep.types.request import Message, Request, ToolCall
from helpers.remembering import raw_bytes

CANARY = b"xqcanari"
TALK = [
    message
    for i in range(12)
    for message in (Message("user", f"xqcanaries {i}?"), Message("assistant", f"xqcanaries, {i}."))
]
POLICY = Policy(1000)


def request(count: int = 11, **fields) -> Request:
    return Request(messages=tuple(TALK[:count]), **fields)


def evict(sessions: Sessions, asked: Request, groups: int = 2) -> None:
    view = sessions.view(asked)
    leaving = view.leaving()[:groups]
    sessions.left(asked, sessions.without(view, asked, leaving), leaving, 100, 1.0)


def nothing_is_left(memory: Memory) -> bool:
    return CANARY not in raw_bytes(memory._database.path).lower() and memory.stats("")["turns"] == 0


@pytest.mark.parametrize("conversation", [None, "c"])
def test_what_leaves_after_the_user_was_forgotten_is_not_archived(
    memory: Memory, conversation: str | None
) -> None:
    sessions, asked = Sessions(memory, POLICY), request(conversation_id="c")
    view = sessions.view(asked)
    memory.forget("", conversation)
    leaving = view.leaving()[:2]
    sessions.left(asked, sessions.without(view, asked, leaving), leaving, 100, 1.0)
    assert nothing_is_left(memory)


def test_another_conversation_and_another_user_are_archived(memory: Memory) -> None:
    sessions = Sessions(memory, POLICY)
    asked = [request(conversation_id="c"), request(conversation_id="d"), request(namespace="ann")]
    views = [sessions.view(one) for one in asked]
    memory.forget("", "c")
    for one, view in zip(asked, views, strict=True):
        leaving = view.leaving()[:2]
        sessions.left(one, sessions.without(view, one, leaving), leaving, 100, 1.0)
    assert memory.stats("")["turns"] == memory.stats("ann")["turns"] == 2


def test_what_could_not_be_written_before_is_not_written_afterwards(memory: Memory, monkeypatch) -> None:
    sessions = Sessions(memory, POLICY)
    with monkeypatch.context() as broken:
        broken.setattr(Memory, "archive", _fails)
        evict(sessions, request())
    memory.forget("")
    assert sessions.view(request()).gone.spoken == frozenset()
    assert nothing_is_left(memory)
    assert not sessions._unwritten


def test_what_tools_said_in_a_forgotten_conversation_is_not_written(memory: Memory) -> None:
    sessions, asked = Sessions(memory, POLICY), request()
    call = ToolCall("1", "look", "{}")
    with sessions.answering(asked):
        sessions.view(asked)
        memory.forget("")
        sessions.exchanged(asked, Usage(), "", [call], ["xqcanaries"])
    assert nothing_is_left(memory)


def test_another_process_writes_nothing_either(memory: Memory) -> None:
    theirs = Memory(memory._database.path, limit_bytes=1 << 30)
    sessions, asked = Sessions(theirs, POLICY), request()
    view = sessions.view(asked)
    memory.forget("")
    sessions.left(asked, sessions.without(view, asked, view.leaving()[:2]), view.leaving()[:2], 100, 1.0)
    assert nothing_is_left(memory)
    theirs.close()


def test_a_conversation_that_is_sent_again_is_archived_again(memory: Memory) -> None:
    sessions = Sessions(memory, POLICY)
    evict(sessions, request())
    memory.forget("")
    evict(sessions, request())
    assert memory.stats("")["turns"] == 2


def _fails(*_, **__):
    from emberkeep.errors import MemoryFailed

    raise MemoryFailed("The disk is full.")
