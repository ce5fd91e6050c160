"""What is known of a conversation, in the archive or (until it is there) in RAM."""

from __future__ import annotations

import logging
import threading

import pytest

from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.session.view import View
from emberkeep.types.events import Eviction, Usage
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Recall, Request, ToolCall
from helpers.remembering import raw_bytes

POLICY = Policy(context=1000)
SAID = ["anchor", "barge", "cargo", "dock", "eddy", "the anchor?"]
TALK = tuple(message for text in SAID for message in (Message("user", text), Message("assistant", "Yes.")))
SEARCH = ToolCall("s", "search_memory", '{"query": "barge"}')


class Failing:
    """A memory whose disk is full as long as `is_full`."""

    def __init__(self, memory: Memory) -> None:
        self._archive = memory.archive
        self.is_full = True
        memory.archive = self.archive  # type: ignore[method-assign]

    def archive(self, *args, **more) -> int:
        if self.is_full:
            raise MemoryFailed("The disk is full.")
        return self._archive(*args, **more)


def request(length: int = 11, **fields: object) -> Request:
    return Request(messages=TALK[:length], **fields)


def evict(sessions: Sessions, asked: Request, count: int = 1) -> tuple[View, Eviction]:
    view = sessions.view(asked)
    groups = view.leaving()[:count]
    return sessions.left(asked, sessions.without(view, asked, groups), groups, 100, 0.0)


def searched(sessions: Sessions, asked: Request, said: str) -> None:
    sessions.exchanged(asked, Usage(1000), said, [SEARCH], [sessions.search(asked, SEARCH)])


def notes(memory: Memory, owner: str = "") -> list[str]:
    return [row["about"] for row in memory.export(owner) if row["kind"] == "note"]


def turns(memory: Memory, owner: str = "") -> list[str]:
    return [row["user_text"] for row in memory.export(owner) if row["kind"] == "turn"]


def test_what_left_is_out_on_the_next_turn_and_in_another_process(memory):
    view, eviction = evict(Sessions(memory, POLICY), request(), 2)
    assert (eviction.messages, eviction.out, eviction.archived, eviction.error) == (4, 4, True, "")
    for length in (11, 12):
        assert Sessions(memory, POLICY).view(request(length)).gone == view.gone
    assert turns(memory) == SAID[:2]


def test_what_leaves_is_logged_without_its_words(memory, caplog):
    for sessions, ending in ((Sessions(memory, POLICY), "archived"), (Sessions(None, POLICY), "not archived")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "emberkeep.session"):
            evict(sessions, request(), 2)
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
        assert line == f"4 messages (100 tokens) left the context, {ending}"


def test_each_eviction_adds_to_the_one_before(memory):
    sessions = Sessions(memory, POLICY)
    first, _ = evict(sessions, request(), 2)
    second, eviction = evict(sessions, request(), 1)
    assert (eviction.messages, eviction.out) == (2, 6)
    assert second.gone.tokens == 200
    assert second.gone.root == first.gone.root
    assert turns(memory) == SAID[:3]


def test_without_a_memory_they_are_out_as_long_as_this_lives():
    sessions = Sessions(None, POLICY)
    view, eviction = evict(sessions, request())
    assert not eviction.archived
    assert "cannot be read any more" in view.gone.notice
    assert sessions.view(request(12)).gone == view.gone
    assert not Sessions(None, POLICY).view(request(12)).gone.spoken


def test_who_asks_for_everything_gets_everything(memory):
    sessions = Sessions(memory, POLICY)
    evict(sessions, request())
    assert sessions.view(request(evict=False)).messages == TALK[:11]
    assert Sessions(memory, Policy(1000, evict=False)).view(request()).messages == TALK[:11]
    assert Sessions(memory, Policy(1000, evict=False)).view(request(evict=True)).gone.spoken


def test_nothing_of_one_user_is_known_of_another(memory):
    sessions = Sessions(memory, POLICY)
    evict(sessions, request(namespace=private_namespace("ann")))
    assert not sessions.view(request()).gone.spoken
    assert not sessions.view(request(namespace=private_namespace("bob"))).gone.spoken


# ── a memory that fails ──


def test_what_is_not_archived_is_out_all_the_same_and_archived_later_once(memory):
    failing, sessions = Failing(memory), Sessions(memory, POLICY)
    view, eviction = evict(sessions, request(), 2)
    assert (eviction.archived, eviction.error) == (False, "The disk is full.")
    again, _ = evict(sessions, request(), 1)
    assert again.gone.spoken > view.gone.spoken
    assert turns(memory) == notes(memory) == []
    failing.is_full = False
    assert sessions.view(request(12)).gone == again.gone
    assert turns(memory) == SAID[:3]
    assert sessions.view(request(12)).gone == again.gone
    assert turns(memory) == SAID[:3]
    assert sessions.stats()["archived_turns"] == 3
    assert Sessions(memory, POLICY).view(request()).gone == again.gone


def test_a_dry_run_knows_what_is_out_and_writes_nothing(memory):
    failing, sessions = Failing(memory), Sessions(memory, POLICY)
    view, _ = evict(sessions, request())
    failing.is_full = False
    assert sessions.view(request(), is_dry_run=True).gone == view.gone
    assert turns(memory) == []


def test_what_left_and_what_was_put_in_at_one_place_do_not_replace_each_other(memory):
    """A search at a message that is the last of its turn, which leaves later."""
    failing, sessions = Failing(memory), Sessions(memory, POLICY)
    searched(sessions, request(2), "")
    view, _ = evict(sessions, request(), 1)
    failing.is_full = False
    assert sessions.view(request()).gone == view.gone
    assert turns(memory) == SAID[:1]
    assert sorted(notes(memory)) == ["evicted", "inserted"]


def test_a_memory_that_cannot_be_read_shows_everything(memory, monkeypatch):
    sessions = Sessions(memory, POLICY)
    evict(sessions, request())

    def refuse(*args: object) -> None:
        raise MemoryFailed("No.")

    monkeypatch.setattr(memory, "notes", refuse)
    assert sessions.view(request()).messages == TALK[:11]


# ── what comes back ──


def test_what_was_put_in_is_forgotten_with_its_conversation(memory):
    sessions = Sessions(memory, Policy(1000, recall=Recall.AUTO))
    view, _ = evict(sessions, request(conversation_id="talk"), 3)
    put = sessions.recalled(request(conversation_id="talk"), view, len, room=1000)
    assert put.inserted
    searched(sessions, request(conversation_id="talk"), "")
    assert sorted(notes(memory)) == ["evicted", "inserted"]
    memory.forget("", "talk")
    assert notes(memory) == turns(memory) == []


def test_nothing_is_recalled_into_no_room(memory):
    sessions = Sessions(memory, Policy(1000, recall=Recall.AUTO))
    view, _ = evict(sessions, request(), 3)
    for room in (-50, 0, 20):
        assert sessions.recalled(request(), view, len, room) is view
    assert notes(memory) == ["evicted"]
    assert sessions.recalled(request(), view, len, 1000).inserted


def test_a_search_is_there_when_it_was_written_and_searches_add_up(memory):
    sessions = Sessions(memory, POLICY)
    with sessions.answering(request(1)):
        searched(sessions, request(1), "One moment. ")
        searched(sessions, request(1), "And another. ")
        (now,) = sessions.view(request(1)).inserted.values()
    (put,) = Sessions(memory, POLICY).view(request(2)).inserted.values()
    assert put == now
    assert put.said == "One moment. And another. "
    assert [message.content for message in put.after if message.role == "assistant"] == [
        "One moment.",
        "And another.",
    ]
    assert sessions.stats()["searches"] == 2


def test_what_was_found_when_the_same_was_asked_before_is_no_part_of_a_new_answer(memory):
    sessions = Sessions(memory, POLICY)
    for said in ("Then.", "Now."):
        with sessions.answering(request(1)), sessions.answering(request(1)):
            assert not sessions.view(request(1)).inserted
            searched(sessions, request(1), said)
        assert not sessions.view(request(1)).inserted
    (put,) = sessions.view(request(2)).inserted.values()
    assert put.said == "Now."


# ── forgotten meanwhile ──


def leave(sessions: Sessions, asked: Request, view: View) -> None:
    groups = view.leaving()[:2]
    sessions.left(asked, sessions.without(view, asked, groups), groups, 100, 0.0)


def nothing_is_left(memory: Memory) -> bool:
    return SAID[0].encode() not in raw_bytes(memory._database.path) and turns(memory) == []


@pytest.mark.parametrize("conversation", [None, "c"])
def test_what_leaves_after_the_user_was_forgotten_is_not_archived(memory, conversation):
    sessions, asked = Sessions(memory, POLICY), request(conversation_id="c")
    view = sessions.view(asked)
    memory.forget("", conversation)
    leave(sessions, asked, view)
    assert nothing_is_left(memory)


def test_another_conversation_and_another_user_are_archived(memory):
    sessions = Sessions(memory, POLICY)
    asked = [request(conversation_id="c"), request(conversation_id="d"), request(namespace="ann")]
    views = [sessions.view(one) for one in asked]
    memory.forget("", "c")
    for one, view in zip(asked, views, strict=True):
        leave(sessions, one, view)
    assert turns(memory) == turns(memory, "ann") == SAID[:2]


def test_what_could_not_be_written_before_is_not_written_afterwards(memory):
    failing, sessions = Failing(memory), Sessions(memory, POLICY)
    evict(sessions, request())
    failing.is_full = False
    memory.forget("")
    assert sessions.view(request()).gone.spoken == frozenset()
    assert nothing_is_left(memory)


def test_what_tools_said_in_a_forgotten_conversation_is_not_written(memory):
    sessions, asked = Sessions(memory, POLICY), request()
    with sessions.answering(asked):
        sessions.view(asked)
        memory.forget("")
        sessions.exchanged(asked, Usage(), "", [ToolCall("1", "look", "{}")], [SAID[0]])
    assert nothing_is_left(memory)


def test_another_process_writes_nothing_either(memory):
    theirs = Memory(memory._database.path, limit_bytes=1 << 30)
    sessions = Sessions(theirs, POLICY)
    view = sessions.view(request())
    memory.forget("")
    leave(sessions, request(), view)
    assert nothing_is_left(memory)
    theirs.close()


def test_a_conversation_that_is_sent_again_is_archived_again(memory):
    sessions = Sessions(memory, POLICY)
    for _ in range(2):
        memory.forget("")
        evict(sessions, request(), 2)
        assert turns(memory) == SAID[:2]


# ── many threads ──


def test_many_threads_of_one_conversation_archive_everything_once(memory):
    sessions = Sessions(memory, POLICY)
    failures: list[BaseException] = []

    def work(count: int) -> None:
        try:
            view, _ = evict(sessions, request(), count)
            assert len(view.gone.spoken) >= 2 * count
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1 + i % 3,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(turns(memory)) == SAID[: len(turns(memory))]
    assert len(sessions.view(request()).gone.spoken) == 2 * len(turns(memory))


# ── how long a prompt may be ──


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(None, 875), (0, 991), (1, 991), (100, 892), (125, 875), (500, 875)]
)
def test_a_prompt_leaves_room_for_its_answer(max_tokens, limit):
    assert POLICY.limit(request(max_tokens=max_tokens)) == limit
