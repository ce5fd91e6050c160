"""The model may search what has left; its client sees the answer and nothing of the search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.server_tools import ServerTools
from emberkeep.errors import ContextExceeded, InvalidField, MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.types.events import (
    Completed,
    Event,
    Eviction,
    Finished,
    FinishReason,
    Fit,
    LookupRecord,
    MissReason,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolEvent,
    Usage,
)
from emberkeep.types.request import JsonFormat, Message, Recall, Request, Tool, ToolChoice
from helpers.conversing import FERRY, SEARCH_CALL, Client, Harbour, ScriptedEngine, line
from helpers.remembering import PLENTY, turn

ASK_ZEPHYR = SEARCH_CALL.format("boat called")
FERRY_CALL = '<tool_call>\n{"name": "ferry", "arguments": {"pier": 3}}\n</tool_call>'
LONG = 600


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=1536)


@pytest.fixture
def harbour(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Harbour]:
    with Harbour(tmp_path, engine, recall="tool") as harbour:
        harbour.memory.archive("", [turn("My boat is called Zephyr.", "A fine name.")])
        yield harbour


# ── with a model ──


def test_a_search_is_executed_and_only_the_answer_is_seen(harbour, engine):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say("Let me see. " + ASK_ZEPHYR, "It is called Zephyr.")
    answer = client.say("What is my boat called?")
    assert answer.text == "Let me see.\n\nIt is called Zephyr."
    assert answer.calls == []
    assert answer.reason is FinishReason.STOP
    first, second = answer.prompts
    assert second.startswith(first)
    assert "user: My boat is called Zephyr." in second.removeprefix(first)
    assert sum(isinstance(event, Completed) for event in answer.events) == 1


def test_the_next_turn_has_the_search_and_its_results_at_the_same_place(harbour, engine):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say("Let me see. " + ASK_ZEPHYR, "It is called Zephyr.", "You are welcome.")
    before = client.say("What is my boat called?")
    answer = client.say("Thanks.")
    assert answer.prompt.startswith(before.prompt + "It is called Zephyr.<|im_end|>")
    assert answer.prompt.count("Let me see.") == 1
    assert answer.lookup.reused_tokens > answer.completed.usage.prompt_tokens - 40


def test_the_same_in_another_process(tmp_path, engine):
    client_messages = []
    for text in ("What is my boat called?", "Thanks."):
        scripted = ScriptedEngine(context=1536)
        with Harbour(tmp_path, scripted, recall="tool", disk_budget=1 << 30) as harbour:
            client = Client(harbour, max_tokens=LONG)
            client.messages = client_messages
            scripted.will_say(*([ASK_ZEPHYR] if not client_messages else []), "It is called Zephyr.")
            answer = client.say(text)
    assert "Nothing was found" in answer.prompt
    assert answer.lookup.cold_tokens > answer.completed.usage.prompt_tokens - 60


def test_several_searches_in_a_row_and_several_at_once(harbour, engine):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(ASK_ZEPHYR, ASK_ZEPHYR + SEARCH_CALL.format("gulls"), "Zephyr, and no gulls.")
    answer = client.say("What is my boat called, and what of gulls?")
    assert answer.text == "Zephyr, and no gulls."
    assert answer.prompt.count("A fine name.") == 2
    assert answer.prompt.count("Nothing was found: try other words.") == 1
    assert harbour.backend.stats()["sessions"]["searches"] == 3


def test_searches_come_to_an_end(harbour, engine):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(*[ASK_ZEPHYR] * 9)
    answer = client.say("What is my boat called?")
    assert len(answer.prompts) == 4
    assert answer.reason is FinishReason.STOP
    assert answer.calls == []


@pytest.mark.parametrize("arguments", ['{"text": "boat"}', '{"query": ""}', '{"query": 7}'])
def test_a_search_that_makes_no_sense_is_told_so(harbour, engine, arguments):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(f'<tool_call>\n{{"name": "search_memory", "arguments": {arguments}}}\n</tool_call>', "Well.")
    answer = client.say("What is my boat called?")
    assert "The call was not understood: it needs a query." in answer.prompt
    assert answer.text == "Well."


def test_a_memory_that_fails_is_told_to_the_model(harbour, engine, monkeypatch):
    def refuse(*args: object, **more: object) -> None:
        raise MemoryFailed("The disk is gone.")

    monkeypatch.setattr(harbour.memory, "search", refuse)
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(ASK_ZEPHYR, "I cannot tell.")
    answer = client.say("What is my boat called?")
    assert "Memory could not be searched: The disk is gone." in answer.prompt
    assert answer.text == "I cannot tell."


def test_the_results_stay_although_they_cannot_be_written_down(harbour, engine, monkeypatch):
    def refuse(*args: object, **more: object) -> None:
        raise MemoryFailed("Full.")

    monkeypatch.setattr(harbour.memory, "archive", refuse)
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(ASK_ZEPHYR, "It is called Zephyr.")
    assert "A fine name." in client.say("What is my boat called?").prompt
    assert "A fine name." in client.say("Thanks.").prompt
    monkeypatch.undo()
    client.say("Bye.")
    assert [row["about"] for row in harbour.memory.export("") if row["kind"] == "note"] == ["inserted"]


def test_a_search_leaves_the_context_with_its_question(harbour, engine):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say("Let me see. " + ASK_ZEPHYR, "It is called Zephyr.")
    client.say("What is my boat called?")
    while "A fine name." in (answer := client.say(line(len(client.messages)), max_tokens=4)).prompt:
        assert answer.completed.usage.prompt_tokens <= 1536
    assert "Let me see." not in answer.prompt
    assert "the tool search_memory finds them" in answer.prompt
    assert {"Let me see.", "It is called Zephyr."} <= set(harbour.archived_texts())


def test_where_nothing_may_leave_the_searches_are_still_there(harbour, engine):
    client = Client(harbour, max_tokens=LONG, evict=False)
    engine.will_say(ASK_ZEPHYR, "It is called Zephyr.", "Bye.")
    client.say("What is my boat called?")
    assert "A fine name." in client.say("Thanks.").prompt
    with pytest.raises(ContextExceeded):
        client.say(line(1, words=400))


def test_the_clients_own_calls_pass_through(harbour, engine):
    client = Client(harbour, max_tokens=LONG, tools=(FERRY,))
    engine.will_say(ASK_ZEPHYR, "Two. " + FERRY_CALL + FERRY_CALL.replace("3", "4"), "At noon.")
    answer = client.say("When does my boat meet the ferry?")
    assert [(call.name, call.arguments) for call in answer.calls] == [
        ("ferry", '{"pier": 3}'),
        ("ferry", '{"pier": 4}'),
    ]
    assert answer.reason is FinishReason.TOOL_CALLS
    client.messages += [Message("tool", "noon", tool_call_id=call.id) for call in answer.calls]
    later = client.go_on()
    assert later.text == "At noon."
    assert later.prompt.startswith(answer.prompt)


def test_the_tool_is_always_among_the_tools_so_that_prompts_begin_alike(harbour):
    client = Client(harbour, tools=(FERRY,))
    assert "<|im_start|>tools\nferry\nsearch_memory\n" in client.say("Hello.").prompt
    assert "<|im_start|>tools\nsearch_memory\n" in client.say("Hello?", tools=()).prompt


def test_a_client_with_a_tool_of_that_name_has_it_to_itself(harbour, engine):
    client = Client(harbour, max_tokens=LONG, tools=(Tool("search_memory", "Mine."),))
    engine.will_say(ASK_ZEPHYR)
    answer = client.say("What is my boat called?")
    assert [call.name for call in answer.calls] == ["search_memory"]
    assert answer.prompt.count("search_memory") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"recall": Recall.OFF},
        {"recall": Recall.AUTO},
        {"tool_choice": ToolChoice("none")},
        {"format": JsonFormat()},
        {"n": 2},
    ],
    ids=str,
)
def test_the_tool_is_offered_only_where_it_may_be_called(harbour, fields):
    client = Client(harbour)
    client.messages.append(Message("user", "Hello."))
    assert "search_memory" not in harbour.ask(client.request(**fields)).prompt


def test_a_conversation_without_a_question_has_nothing_to_search_for(harbour, engine):
    engine.will_say(ASK_ZEPHYR)
    answer = harbour.ask(Request(messages=(Message("system", "Begin."),), max_tokens=LONG))
    assert "search_memory" not in answer.prompt


def test_a_client_that_wants_a_call_and_has_no_tools_is_told_so(harbour):
    with pytest.raises(InvalidField, match="tool_choice"):
        Client(harbour, tool_choice=ToolChoice("required")).say("Call something.")


def test_a_request_is_explained_with_the_tool_that_it_will_have(harbour):
    client = Client(harbour)
    answer = client.say("Hello.")
    client.messages.pop()
    told = harbour.backend.cache.explain(client.request())
    assert told.lookup.reason is MissReason.NONE
    assert told.lookup.prompt_tokens == answer.completed.usage.prompt_tokens


def test_a_prefix_is_warmed_with_the_tool_that_its_conversations_will_have(harbour):
    client = Client(harbour, tools=(FERRY,))
    warmed = asyncio.run(harbour.backend.warmer.warm(client.request()))
    assert client.say("Hello.").lookup.reused_tokens == warmed.tokens > 40


def test_without_a_memory_there_is_no_tool(tmp_path):
    with Harbour(tmp_path, recall="tool", memory=False) as harbour:
        assert "search_memory" not in Client(harbour).say("Hello.").prompt


def test_a_client_that_leaves_stops_the_round_at_once(harbour, engine, monkeypatch):
    client = Client(harbour, max_tokens=LONG)
    engine.will_say(ASK_ZEPHYR, "x" * 100)
    engine.hold_before_the_end(harbour.backend.scheduler, monkeypatch)
    client.messages.append(Message("user", "What is my boat called?"))
    harbour.leave_in_the_middle(client.request(), 5)
    assert harbour.backend.scheduler.counters.cancelled == 1
    assert harbour.backend.scheduler.stats()["active"] == 0


# ── with any model ──


COMPLETED = Completed(Usage(10, 5, 3, 1), Timings(predicted_n=5, ttft_ms=7.0), LookupRecord(), Fit(evictions=()))
DONE = Finished(0, FinishReason.STOP)
CALLED = Finished(0, FinishReason.TOOL_CALLS)


class Model:
    """Answers with the given events, round by round."""

    def __init__(self, *rounds: Sequence[Event]) -> None:
        self.rounds = list(rounds)
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked.append(request)
        for event in self.rounds[len(self.asked) - 1]:
            yield event


def call(place: int, name: str, *arguments: str) -> list[Event]:
    """In pieces."""
    first: Event = ToolCallDelta(0, place, f"id{place}", name, "")
    return [first, *(ToolCallDelta(0, place, None, None, part) for part in arguments)]


SEARCHING = call(0, "search_memory", '{"que', 'ry": "boat"}')


@pytest.fixture
def server_tools(tmp_path: Path) -> Iterator[ServerTools]:
    memory = Memory(tmp_path / "memory.sqlite3", limit_bytes=PLENTY)
    yield ServerTools(Sessions(memory, Policy(1000, recall=Recall.TOOL)))
    memory.close()


def run(server_tools: ServerTools, model: Model, **fields: object) -> list[Event]:
    request = Request(messages=(Message("user", "Hello"),), **fields)
    assert server_tools.applies(request)

    async def events() -> list[Event]:
        return [event async for event in server_tools.run(request, model) if not isinstance(event, ToolEvent)]

    return asyncio.run(events())


def test_a_search_beside_other_calls_is_left_out_and_the_others_are_counted_without_it(server_tools):
    both = [
        *call(0, "look", "{", "}"),
        *call(1, "search_memory", '{"query": "x"}'),
        *call(2, "go", "{}"),
        CALLED,
        COMPLETED,
    ]
    model = Model(both)
    events = run(server_tools, model, tools=(Tool("look"), Tool("go")))
    assert events == [
        *call(0, "look", "{", "}"),
        *[replace(e, call_index=1) for e in call(2, "go", "{}")],
        CALLED,
        COMPLETED,
    ]
    assert len(model.asked) == 1


def test_what_all_rounds_cost_is_told_together(server_tools):
    completed = [
        replace(COMPLETED, fit=Fit(evictions=(Eviction(1, n, n),)), timings=Timings(ttft_ms=n)) for n in (2, 3)
    ]
    model = Model([*SEARCHING, CALLED, completed[0]], [TextDelta(0, "Hi"), DONE, completed[1]])
    *events, last = run(server_tools, model)
    assert events == [TextDelta(0, "Hi"), DONE]
    assert isinstance(last, Completed)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.reasoning_tokens) == (10, 10, 2)
    assert last.timings.ttft_ms == 2
    assert [eviction.tokens for eviction in last.fit.evictions] == [2, 3]


def test_tokens_that_are_spent_are_spent(server_tools):
    model = Model([*SEARCHING, CALLED, COMPLETED], [*SEARCHING, CALLED, COMPLETED])
    *events, _ = run(server_tools, model, max_tokens=10)
    assert [request.max_tokens for request in model.asked] == [10, 5]
    assert events == [Finished(0, FinishReason.LENGTH)]


def test_a_client_that_insists_on_a_call_gets_one_after_the_search(server_tools):
    model = Model([*SEARCHING, CALLED, COMPLETED], [*call(0, "go", "{}"), CALLED, COMPLETED])
    *events, _ = run(server_tools, model, tools=(Tool("go"),), tool_choice=ToolChoice("required"))
    assert [request.tool_choice.mode for request in model.asked] == ["required", "required"]
    assert events == [*call(0, "go", "{}"), CALLED]
