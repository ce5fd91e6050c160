"""Over a model that runs elsewhere: conversations, memory, tools, retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.remote import backend as module
from emberkeep.errors import (
    ContextExceeded,
    DeadlineExceeded,
    RemoteDown,
    RemoteFull,
    RemoteRefused,
    RequestError,
)
from emberkeep.tools.function import as_tool
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import CallEnded, Completed, Finished, MissReason, ReasoningDelta, TextDelta, Usage
from emberkeep.types.request import Message, ReasoningFormat, Recall, Request
from helpers.events import read_events, text_of
from helpers.remote_model import ScriptedProvider, Step, remote, said, tokens_of
from helpers.tool_calls import calling, depth

HELLO = Request(messages=(Message("user", "Hello"),))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.001)


def failing(*errors: Exception) -> ScriptedProvider:
    """Fails so often, then answers."""
    left = list(errors)

    def script(request: Request) -> Iterable[Step]:
        return [left.pop(0)] if left else said("At last.")

    return ScriptedProvider(script)


def test_events_pass_and_the_last_one_says_which_model_and_how_long() -> None:
    provider = ScriptedProvider(lambda request: said("Hello to you.", 12, 5))
    *events, completed = read_events(remote(provider), HELLO)
    assert text_of(events) == "Hello to you."
    assert isinstance(completed, Completed)
    assert completed.usage == Usage(12, 3, 5)
    assert completed.answered_by == "far"
    assert completed.lookup.reason is MissReason.REMOTE
    assert (completed.timings.cache_n, completed.timings.prompt_n, completed.timings.predicted_n) == (5, 7, 3)


def test_a_service_that_is_down_for_a_moment_is_asked_again() -> None:
    provider = failing(RemoteDown("Busy."), RemoteDown("Busy.", retry_after=0.0))
    backend = remote(provider)
    assert text_of(read_events(backend, HELLO)) == "At last."
    assert len(provider.asked) == 3
    assert backend.stats()["remote"]["retries"] == 2


def test_patience_has_an_end() -> None:
    provider = failing(*[RemoteDown("Busy.")] * 3)
    backend = remote(provider, retries=2)
    with pytest.raises(RemoteDown, match="Busy"):
        read_events(backend, HELLO)
    assert len(provider.asked) == 3
    assert backend.health()["error"] == "Busy."


def test_a_service_that_wants_to_be_left_alone_for_long_is_not_waited_for() -> None:
    provider = failing(RemoteDown("Come back tomorrow.", retry_after=3600))
    with pytest.raises(RemoteDown):
        read_events(remote(provider), HELLO)
    assert len(provider.asked) == 1


@pytest.mark.parametrize("error", [RemoteRefused("No key."), RequestError("No.")])
def test_what_waiting_cannot_mend_is_raised_at_once(error: Exception) -> None:
    provider = failing(error)
    with pytest.raises(type(error)):
        read_events(remote(provider), HELLO)
    assert len(provider.asked) == 1


def test_an_answer_that_broke_off_is_not_begun_anew() -> None:
    provider = ScriptedProvider(lambda request: [TextDelta(0, "Hel"), RemoteDown("Gone.")])
    with pytest.raises(RemoteDown):
        read_events(remote(provider), HELLO)
    assert len(provider.asked) == 1


def test_leaving_an_answer_closes_the_connection() -> None:
    provider = ScriptedProvider(lambda request: [TextDelta(0, "Hel"), 60.0, *said("lo")])

    async def leave() -> None:
        events = remote(provider).generate(HELLO)
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert provider.left == 1


def test_a_deadline_holds_here_too() -> None:
    provider = ScriptedProvider(lambda request: [60.0])
    with pytest.raises(DeadlineExceeded):
        read_events(remote(provider), replace(HELLO, deadline_s=0.5))
    assert provider.left == 1


def test_several_choices_are_asked_for_one_after_the_other() -> None:
    provider = ScriptedProvider(lambda request: said("Hi."))
    events = read_events(remote(provider), replace(HELLO, n=2))
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]
    assert sum(isinstance(event, Completed) for event in events) == 1
    assert events[-1].usage.completion_tokens == 6  # type: ignore[union-attr]


@pytest.mark.parametrize("asked", [Request(prompt="Once"), replace(HELLO, top_logprobs=0)])
def test_what_only_a_model_here_can_do_is_refused(asked: Request) -> None:
    with pytest.raises(RequestError, match="far"):
        read_events(remote(failing()), asked)


@pytest.mark.parametrize(
    ("format", "expected"),
    [(None, "Yes."), (ReasoningFormat.STRIP, "Yes."), (ReasoningFormat.INLINE, "Hm. Yes.")],
)
def test_reasoning_goes_where_it_is_wanted(format: ReasoningFormat | None, expected: str) -> None:
    provider = ScriptedProvider(lambda request: [ReasoningDelta(0, "Hm. "), *said("Yes.")])
    events = read_events(remote(provider), replace(HELLO, reasoning=format))
    assert text_of(events) == expected
    assert any(isinstance(event, ReasoningDelta) for event in events) == (format is None)


def test_the_models_own_limit_of_an_answer_holds_unless_a_request_says() -> None:
    provider = failing()
    backend = remote(provider, max_tokens=77)
    read_events(backend, HELLO)
    read_events(backend, replace(HELLO, max_tokens=5))
    assert [request.max_tokens for request in provider.asked] == [77, 5]


# ── conversations ──


class Talk:
    """A client that sends everything each time, to a service with a context of its own."""

    def __init__(
        self, folder: Path, *, context: int = 400, believed: int | None = None, **options: object
    ) -> None:
        self.context = context
        self.provider = ScriptedProvider(self._script)
        self.backend = remote(self.provider, folder, context=believed or context, **options)
        self.messages: list[Message] = [Message("system", "You keep the books of a harbour.")]
        self.refused = 0

    def _script(self, request: Request) -> list[Step]:
        count = tokens_of(request.messages)
        if count > self.context:
            self.refused += 1
            return [RemoteFull("Too long.")]
        return said("Noted.", count)

    def say(self, words: str) -> Completed:
        self.messages.append(Message("user", words))
        *_, completed = read_events(self.backend, Request(messages=tuple(self.messages)))
        self.messages.append(Message("assistant", "Noted."))
        assert isinstance(completed, Completed)
        return completed


def note(i: int) -> str:
    return f"Ship number {i} carries {i * 7} barrels of salt and {i * 3} bales of wool to the north."


def test_old_messages_leave_and_the_conversation_goes_on(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    evictions = [eviction for i in range(60) for eviction in talk.say(note(i)).fit.evictions]
    assert len(evictions) > 2
    assert all(eviction.archived for eviction in evictions)
    last = talk.provider.asked[-1].messages
    assert last[0].content == talk.messages[0].content
    assert last[-1].content == note(59)
    assert "left the context" in last[1].content
    assert talk.backend.memory is not None
    (found, *_) = talk.backend.memory.search("", "ship number 3 barrels", max_results=3)
    assert "number 3 " in found.user_text


def test_the_same_messages_stay_out_so_that_the_services_own_cache_works(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    begins = []
    for i in range(40):
        if not talk.say(note(i)).fit.evictions and i > 20:
            begins.append(talk.provider.asked[-1].messages[1].content)
    assert len(set(begins)) < len(begins) / 2


def test_a_service_with_less_room_than_was_thought_is_believed(tmp_path: Path) -> None:
    talk = Talk(tmp_path, context=150, believed=400)
    for i in range(40):
        talk.say(note(i))
    assert 0 < talk.refused < 10


def test_one_message_that_is_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    with pytest.raises(ContextExceeded):
        talk.say("barrels " * 1000)


def test_without_eviction_too_long_is_an_error(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    long = tuple(
        message for i in range(60) for message in (Message("user", note(i)), Message("assistant", "Yes."))
    )
    with pytest.raises(ContextExceeded, match="evict"):
        read_events(talk.backend, Request(messages=(*long, Message("user", "And?")), evict=False))


def test_what_left_comes_back_where_it_is_asked_for(tmp_path: Path) -> None:
    talk = Talk(tmp_path, recall=Recall.AUTO)
    talk.say("My boat is called Zephyr and has a red keel.")
    for i in range(40):
        talk.say(note(i))
    completed = talk.say("What is my boat called, the one with the red keel?")
    assert completed.fit.recalled
    assert "Zephyr" in talk.provider.asked[-1].messages[-1].content


# ── tools ──


def test_the_servers_tools_run_for_a_remote_model_too(tmp_path: Path) -> None:
    rounds = iter([calling("depth", '{"pier": 3}'), said("Seven metres.")])
    provider = ScriptedProvider(lambda request: next(rounds))
    tools = ToolBox([as_tool(depth)], ToolPolicy())
    events = read_events(remote(provider, tmp_path, tools=tools, tool_rounds=4), HELLO)
    assert [event.outcome.text for event in events if isinstance(event, CallEnded)] == ["7 metres"]
    assert text_of(events) == "Seven metres."
    assert [message.role for message in provider.asked[1].messages] == ["user", "assistant", "tool"]


def test_the_model_may_search_its_memory(tmp_path: Path) -> None:
    rounds = iter([calling("search_memory", '{"query": "boat"}'), said("I do not know.")])
    provider = ScriptedProvider(lambda request: next(rounds))
    events = read_events(remote(provider, tmp_path, recall=Recall.TOOL), HELLO)
    assert text_of(events) == "I do not know."
    assert provider.asked[0].tools[-1].name == "search_memory"
