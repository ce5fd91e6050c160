"""Over a model that runs elsewhere: conversations, memory, tools, retries."""

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
    RemoteRefused,
    RequestError,
)
from emberkeep.session.sessions import about_tokens
from emberkeep.tools.function import ToolFunction, as_tool
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    MissReason,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)
from emberkeep.types.request import JsonFormat, Message, ReasoningFormat, Recall, Request, Tool, ToolChoice
from helpers.remote_model import ScriptedProvider, Step, remote, said, tokens_of
from helpers.scripted_backend import calls_of, outcomes_of, read_events, text_of
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


def rounds(*scripts: Iterable[Step]) -> ScriptedProvider:
    """Answers each request with the next of them."""
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


def box(*functions: object) -> ToolBox:
    made: list[ToolFunction] = [as_tool(one) for one in functions]  # type: ignore[arg-type]
    return ToolBox(made, ToolPolicy())


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


async def test_leaving_an_answer_closes_the_connection() -> None:
    provider = ScriptedProvider(lambda request: [TextDelta(0, "Hel"), 60.0, *said("lo")])
    events = remote(provider).generate(HELLO)
    async for _ in events:
        break
    await events.aclose()  # type: ignore[attr-defined]
    assert provider.left == 1


def test_one_deadline_holds_over_all_rounds_and_their_tools() -> None:
    for settings, asked in (({}, replace(HELLO, deadline_s=0.2)), ({"deadline_s": 0.2}, HELLO)):
        provider = rounds(calling("depth", '{"pier": 1}'), [60.0])
        with pytest.raises(DeadlineExceeded):
            read_events(remote(provider, tools=box(depth), **settings), asked)
        assert (len(provider.asked), provider.left) == (2, 1)


def test_several_choices_are_asked_for_one_after_the_other_and_cost_the_tokens_of_all() -> None:
    completed = Completed(Usage(10, 7, 4, 2, 3, 1), Timings(), LookupRecord())
    provider = ScriptedProvider(lambda request: [Finished(0, FinishReason.STOP), completed])
    *events, last = read_events(remote(provider), replace(HELLO, n=3))
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1, 2]
    assert isinstance(last, Completed) and last.usage == Usage(10, 21, 4, 6, 9, 3)
    assert (last.timings.predicted_n, last.timings.draft_n, last.timings.draft_n_accepted) == (21, 12, 9)


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


async def test_leaving_while_it_waits_to_ask_again_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 600.0)
    provider = ScriptedProvider(lambda request: [RemoteDown("Busy.")])
    backend = remote(provider)

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
    assert len(provider.asked) == 1


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
    assert (about_tokens("船" * 30), about_tokens("ship" * 30)) == (30, 40)


# ── tools ──


def test_the_servers_tools_run_for_a_remote_model_too(tmp_path: Path) -> None:
    provider = rounds(calling("depth", '{"pier": 3}'), said("Seven metres."))
    events = read_events(remote(provider, tmp_path, tools=box(depth)), HELLO)
    assert outcomes_of(events) == [("7 metres", False)]
    assert text_of(events) == "Seven metres."
    assert [message.role for message in provider.asked[1].messages] == ["user", "assistant", "tool"]


def test_the_model_may_search_its_memory(tmp_path: Path) -> None:
    provider = rounds(calling("search_memory", '{"query": "boat"}'), said("I do not know."))
    events = read_events(remote(provider, tmp_path, recall=Recall.TOOL), HELLO)
    assert text_of(events) == "I do not know."
    assert provider.asked[0].tools[-1].name == "search_memory"


def test_a_tool_that_went_is_not_taken_for_a_search(tmp_path: Path) -> None:
    functions = [as_tool(depth)]
    tools = ToolBox(functions, ToolPolicy())

    def script(request: Request) -> Iterable[Step]:
        if len(request.messages) > 1:
            return said("It is gone.")
        functions.clear()
        return calling("depth", '{"pier": 3}')

    backend = remote(ScriptedProvider(script), tmp_path, recall=Recall.TOOL, tools=tools)
    events = read_events(backend, HELLO)
    assert "no tool 'depth'" in outcomes_of(events)[0][0]


def test_with_notools_services_are_told_of_none() -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    backend = remote(provider, tools=box(depth), no_tools=True)
    allowed = ToolChoice("auto", allowed=("ferry",))
    for choice in (ToolChoice(), allowed):
        read_events(backend, replace(HELLO, tools=(Tool("ferry"),), tool_choice=choice))
    assert [request.tools for request in provider.asked] == [(), ()]
    with pytest.raises(InvalidField, match="--tools off"):
        read_events(backend, replace(HELLO, tools=(Tool("ferry"),), tool_choice=ToolChoice("required")))


def test_services_are_told_of_allowed_tools_only() -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    choice = ToolChoice("required", allowed=("ferry",))
    read_events(remote(provider), replace(HELLO, tools=(Tool("ferry"), Tool("crane")), tool_choice=choice))
    assert provider.asked[0].tools == (Tool("ferry"),)
    assert provider.asked[0].tool_choice == ToolChoice("required")


def test_a_long_turn_of_calls_goes_on_when_the_context_is_full(tmp_path: Path) -> None:
    def read_log(page: int) -> str:
        """Read a page of the log."""
        return f"page {page}: " + "salt and wool, " * 40

    calls = [calling("read_log", f'{{"page": {i}}}', f"c{i}") for i in range(8)]
    provider = honest(*calls, said("All read."))
    events = read_events(remote(provider, tmp_path, context=600, tools=box(read_log)), HELLO)
    assert text_of(events) == "All read."
    assert len(outcomes_of(events)) == 8
    assert "left out to make room" in "".join(m.content for m in provider.asked[-1].messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": ToolChoice("none")},
        {"tools": (Tool("ferry"),)},
        {"tools": (Tool("ferry"),), "tool_choice": ToolChoice("named", "ferry")},
        {"format": JsonFormat()},
        {"n": 2},
    ],
    ids=str,
)
def test_services_are_told_of_our_tools_only_where_nothing_else_is_wanted(fields: dict[str, object]) -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    read_events(remote(provider, tools=box(depth)), replace(HELLO, **fields))  # type: ignore[arg-type]
    assert all(request.tools == fields.get("tools", ()) for request in provider.asked)


def test_what_a_tool_gave_is_found_when_its_turn_has_left(tmp_path: Path) -> None:
    provider = honest(calling("depth", '{"pier": 38}'), *(said("Noted.") for _ in range(30)))
    backend = remote(provider, tmp_path, tools=box(depth))
    messages: list[Message] = []
    for i in range(30):
        messages.append(Message("user", note(i)))
        messages.append(Message("assistant", text_of(read_events(backend, Request(messages=tuple(messages))))))
    assert backend.memory is not None
    found = backend.memory.search("", "ship number 0 metres", max_results=10)
    assert "42 metres" in [use.result for one in found for use in one.tool_uses]


@pytest.mark.parametrize("tools", [(), (Tool("ferry"),)])
def test_a_tool_that_there_is_not_is_for_a_client_that_has_tools_and_else_told_to_the_model(
    tmp_path: Path, tools: tuple[Tool, ...]
) -> None:
    backend = remote(rounds(calling("sail"), said("I cannot.")), tmp_path, recall=Recall.TOOL)
    events = read_events(backend, replace(HELLO, tools=tools))
    told = [("There is no tool 'sail': use search_memory, or answer.", True)]
    assert outcomes_of(events) == ([] if tools else told)
    assert [call.name for call in calls_of(events)] == (["sail"] if tools else [])
