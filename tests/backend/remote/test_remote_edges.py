"""Over a model that runs elsewhere: tools in several rounds, time, usage, other scripts, no memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.remote import backend as module
from emberkeep.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidField,
    RemoteDown,
    RemoteError,
    RemoteFull,
)
from emberkeep.session.sessions import Policy, Sessions, about_tokens
from emberkeep.tools.function import ToolFunction, as_tool
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import JsonFormat, Message, Recall, Request, Tool, ToolChoice
from helpers.events import outcomes_of, read_events, text_of
from helpers.remote_model import ScriptedProvider, Step, remote, said, tokens_of
from helpers.tool_calls import calling, depth

HELLO = Request(messages=(Message("user", "Hello"),))


def rounds(*scripts: Iterable[Step]) -> ScriptedProvider:
    left = iter(scripts)
    return ScriptedProvider(lambda request: next(left))


def honest(*scripts: list[Step]) -> ScriptedProvider:
    """Counts what it was sent."""
    left = iter(scripts)

    def script(request: Request) -> list[Step]:
        *events, completed = next(left)
        assert isinstance(completed, Completed)
        return [*events, replace(completed, usage=Usage(tokens_of(request.messages), 5))]

    return ScriptedProvider(script)


async def tide() -> str:
    """Wait for the tide."""
    await asyncio.Event().wait()
    return ""


def box(*functions: object) -> ToolBox:
    made: list[ToolFunction] = [as_tool(one) for one in functions]  # type: ignore[arg-type]
    return ToolBox(made, ToolPolicy())


def outcomes(events: list[Event]) -> list[str]:
    return [said for said, _ in outcomes_of(events)]


# ── tools ──


def test_a_tool_that_the_model_made_up_is_told_to_it() -> None:
    provider = rounds(calling("dephth"), said("Sorry."))
    events = read_events(remote(provider, tools=box(depth), tool_rounds=4), HELLO)
    assert "did you mean depth?" in outcomes(events)[0]
    assert not any(isinstance(event, ToolCallDelta) for event in events)
    assert text_of(events) == "Sorry."


def test_a_tool_that_went_is_not_taken_for_a_search(tmp_path: Path) -> None:
    functions = [as_tool(depth)]
    tools = ToolBox(functions, ToolPolicy())

    def script(request: Request) -> Iterable[Step]:
        if len(request.messages) > 1:
            return said("It is gone.")
        functions.clear()
        return calling("depth", '{"pier": 3}')

    backend = remote(ScriptedProvider(script), tmp_path, recall=Recall.TOOL, tools=tools, tool_rounds=4)
    events = read_events(backend, HELLO)
    assert "no tool 'depth'" in outcomes(events)[0]


def test_who_may_only_search_is_told_so(tmp_path: Path) -> None:
    events = read_events(remote(rounds(calling("sail"), said(".")), tmp_path, recall=Recall.TOOL), HELLO)
    assert outcomes(events) == ["There is no tool 'sail': use search_memory, or answer."]


def test_a_client_with_tools_gets_calls_of_unknown_tools(tmp_path: Path) -> None:
    backend = remote(rounds(calling("sail")), tmp_path, recall=Recall.TOOL)
    events = read_events(backend, replace(HELLO, tools=(Tool("ferry"),)))
    assert [event.name for event in events if isinstance(event, ToolCallDelta)] == ["sail"]


def test_ids_that_come_again_in_every_round_are_told_apart(tmp_path: Path) -> None:
    provider = rounds(calling("depth", '{"pier": 1}'), calling("depth", '{"pier": 2}'), said("Both."))
    read_events(remote(provider, tmp_path, tools=box(depth), tool_rounds=4), HELLO)
    asked = provider.asked[-1].messages
    assert len({call.id for message in asked for call in message.tool_calls}) == 2
    results = {message.tool_call_id: message.content for message in asked if message.role == "tool"}
    assert list(results.values()) == ["5 metres", "6 metres"]


def test_without_a_memory_and_without_eviction_the_calls_are_still_in_the_conversation() -> None:
    provider = rounds(calling("depth", '{"pier": 3}'), said("Seven metres."), said("Welcome."))
    backend = remote(provider, tools=box(depth), tool_rounds=4)
    backend._sessions.policy = replace(backend._sessions.policy, evict=False)
    answered = text_of(read_events(backend, HELLO))
    later = (*HELLO.messages, Message("assistant", answered), Message("user", "Thanks."))
    read_events(backend, Request(messages=later))
    roles = [message.role for message in provider.asked[-1].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": ToolChoice("none")},
        {"tools": (Tool("ferry"),)},
        {"tools": (Tool("ferry"),), "tool_choice": ToolChoice("named", "ferry")},
        {"format": JsonFormat()},
        {"n": 2},
    ],
)
def test_who_asks_for_something_else_gets_no_tools_of_ours(fields: dict[str, object]) -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    read_events(remote(provider, tools=box(depth), tool_rounds=4), replace(HELLO, **fields))  # type: ignore[arg-type]
    assert all(tool.name == "ferry" for tool in provider.asked[0].tools)


def test_with_notools_services_are_told_of_none() -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    backend = remote(provider, tools=box(depth), tool_rounds=4, no_tools=True)
    allowed = ToolChoice("auto", allowed=("ferry",))
    for choice in (ToolChoice(), allowed):
        read_events(backend, replace(HELLO, tools=(Tool("ferry"),), tool_choice=choice))
    assert [request.tools for request in provider.asked] == [(), ()]
    with pytest.raises(InvalidField, match="--notools"):
        read_events(backend, replace(HELLO, tools=(Tool("ferry"),), tool_choice=ToolChoice("required")))


def test_services_are_told_of_allowed_tools_only() -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    choice = ToolChoice("required", allowed=("ferry",))
    read_events(remote(provider), replace(HELLO, tools=(Tool("ferry"), Tool("crane")), tool_choice=choice))
    assert provider.asked[0].tools == (Tool("ferry"),)
    assert provider.asked[0].tool_choice == ToolChoice("required")


def test_when_the_tokens_are_spent_on_calls_the_answer_ends_there() -> None:
    provider = rounds(calling("depth", '{"pier": 1}'), calling("depth", '{"pier": 2}'))
    events = read_events(remote(provider, tools=box(depth), tool_rounds=9), replace(HELLO, max_tokens=8))
    assert [request.max_tokens for request in provider.asked] == [8, 3]
    assert Finished(0, FinishReason.LENGTH) in events
    assert outcomes(events) == ["5 metres"]


def test_a_long_turn_of_calls_goes_on_when_the_context_is_full(tmp_path: Path) -> None:
    def read_log(page: int) -> str:
        """Read a page of the log."""
        return f"page {page}: " + "salt and wool, " * 40

    calls = [calling("read_log", f'{{"page": {i}}}', f"c{i}") for i in range(8)]
    provider = honest(*calls, said("All read."))
    events = read_events(remote(provider, tmp_path, context=600, tools=box(read_log), tool_rounds=9), HELLO)
    assert text_of(events) == "All read."
    assert len(outcomes(events)) == 8
    assert "left out to make room" in "".join(m.content for m in provider.asked[-1].messages)


def test_what_a_tool_gave_is_found_when_its_turn_has_left(tmp_path: Path) -> None:
    provider = honest(calling("depth", '{"pier": 38}'), *(said("Noted.") for _ in range(40)))
    backend = remote(provider, tmp_path, tools=box(depth), tool_rounds=4)
    messages: list[Message] = []
    for i in range(30):
        messages.append(Message("user", f"Ship number {i} carries salt and wool and barrels of tar to the north."))
        messages.append(Message("assistant", text_of(read_events(backend, Request(messages=tuple(messages))))))
    assert backend.memory is not None
    found = backend.memory.search("", "ship number 0 metres", max_results=10)
    assert any(use.result == "42 metres" for one in found for use in one.tool_uses)


# ── time, and leaving ──


def test_one_deadline_holds_over_all_rounds_and_their_tools() -> None:
    provider = rounds(calling("depth", '{"pier": 1}'), calling("tide"))
    backend = remote(provider, tools=box(depth, tide), tool_rounds=4)
    with pytest.raises(DeadlineExceeded):
        read_events(backend, replace(HELLO, deadline_s=0.2))
    assert len(provider.asked) == 2


def test_the_configured_deadline_does_the_same() -> None:
    backend = remote(rounds(calling("tide")), tools=box(tide), tool_rounds=4, deadline_s=0.05)
    with pytest.raises(DeadlineExceeded):
        read_events(backend, HELLO)


def test_leaving_while_it_waits_to_ask_again_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 600.0)
    provider = ScriptedProvider(lambda request: [RemoteDown("Busy.")])
    backend = remote(provider)

    async def leave() -> None:
        async def asking() -> None:
            async with aclosing(backend.generate(HELLO)) as events:  # type: ignore[type-var]
                async for _ in events:
                    pass

        task = asyncio.create_task(asking())
        async with asyncio.timeout(20):
            while not backend.stats()["remote"]["retries"]:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert len(provider.asked) == 1


# ── usage ──


def test_the_usage_of_several_choices_has_the_tokens_of_all() -> None:
    completed = Completed(Usage(10, 7, 4, 2, 3, 1), Timings(), LookupRecord())
    provider = ScriptedProvider(lambda request: [Finished(0, FinishReason.STOP), completed])
    *_, last = read_events(remote(provider), replace(HELLO, n=3))
    assert isinstance(last, Completed)
    assert last.usage == Usage(10, 21, 4, 6, 9, 3)
    assert (last.timings.predicted_n, last.timings.draft_n, last.timings.draft_n_accepted) == (21, 12, 9)


def test_the_usage_of_several_rounds_has_the_tokens_of_all() -> None:
    provider = rounds(calling("depth", '{"pier": 1}'), said("Five.", 30, 10))
    *_, last = read_events(remote(provider, tools=box(depth), tool_rounds=4), HELLO)
    assert isinstance(last, Completed)
    assert last.usage == Usage(30, 5 + 3, 10)
    assert (last.timings.cache_n, last.timings.prompt_n, last.answered_by) == (10, 20, "far")


# ── other scripts ──


def chinese(i: int) -> Message:
    return Message("user", f"第{i}艘船今天早上从港口出发，船上装着盐和羊毛，船长说天气很好，一路向北航行。")


@pytest.mark.parametrize("refuses", [True, False])
def test_a_conversation_in_chinese_fits_from_the_first_answer_on(tmp_path: Path, refuses: bool) -> None:
    """Some services refuse what is too long, others cut it without a word."""
    too_long: list[int] = []

    def script(request: Request) -> list[Step]:
        tokens = sum(len(message.content) for message in request.messages)
        if tokens > 1000:
            too_long.append(tokens)
            if refuses:
                return [RemoteFull("Too long.")]
        return said("好的。", tokens)

    history = [message for i in range(60) for message in (chinese(i), Message("assistant", "好的。"))]
    backend = remote(ScriptedProvider(script), tmp_path, context=1000)
    *_, completed = read_events(backend, Request(messages=(*history, chinese(60))))
    assert isinstance(completed, Completed)
    assert completed.fit.evictions
    assert too_long == []


def test_without_a_count_chinese_has_more_tokens_than_english() -> None:
    assert about_tokens("船" * 30) == 30
    assert about_tokens("ship" * 30) == 40


def test_without_eviction_what_is_too_long_says_what_would_help() -> None:
    provider = ScriptedProvider(lambda request: [RemoteFull("Too long.")])
    backend = remote(provider)
    backend._sessions = Sessions(None, Policy(400, evict=False))
    with pytest.raises(ContextExceeded, match="evict"):
        read_events(backend, replace(HELLO, evict=False))
    assert len(provider.asked) == 1


# ── providers of others ──


def test_what_a_provider_does_wrong_is_its_fault_and_its_words_are_not_repeated() -> None:
    class Careless(ScriptedProvider):
        async def answer(self, request: Request) -> AsyncIterator[Event]:
            raise KeyError("sk-secret")
            yield

    with pytest.raises(RemoteError, match="far failed with KeyError") as caught:
        read_events(remote(Careless(lambda request: [])), HELLO)
    assert "sk-secret" not in str(caught.value)


def test_an_answer_without_usage_is_an_error() -> None:
    provider = ScriptedProvider(lambda request: said("Hello.")[:-1])
    with pytest.raises(RemoteError, match="without its usage"):
        read_events(remote(provider), HELLO)
