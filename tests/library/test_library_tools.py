"""Functions of a program as tools of its model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from emberkeep import Emberkeep, tool
from emberkeep.errors import ConfigError, InvalidField
from emberkeep.types.events import CallEnded, FinishReason
from emberkeep.types.request import Message, ToolCall
from helpers.scripted_backend import ScriptedBackend, Step, answer
from helpers.tool_calls import calling

FERRY = {"type": "function", "function": {"name": "ferry", "parameters": {"type": "object"}}}


def depth(pier: int) -> dict[str, int]:
    """Measure the depth at a pier.

    Args:
        pier: Its number.
    """
    return {"metres": pier + 4}


@tool(dangerous=True)
async def sink(ship: str) -> str:
    """Sink a ship."""
    return f"{ship} is gone"


def scripted(*rounds: Iterable[Step]) -> tuple[Emberkeep, ScriptedBackend]:
    left = list(rounds)
    backend = ScriptedBackend(lambda request: left.pop(0))
    return Emberkeep(backend), backend


def test_a_function_runs_and_the_result_has_the_exchange() -> None:
    llm, backend = scripted(calling("depth", '{"pier": 3}'), answer("Seven metres."))
    with llm:
        result = llm.chat("How deep is it at pier 3?", tools=[depth])
    assert result.text == "Seven metres."
    assert result.tool_calls == ()
    assert result.messages == (
        Message("assistant", tool_calls=(ToolCall("c1", "depth", '{"pier": 3}'),)),
        Message("tool", '{"metres":7}', tool_call_id="c1", name="depth"),
        Message("assistant", "Seven metres."),
    )
    schema = backend.requests[0].tools[0].parameters["properties"]["pier"]
    assert schema == {"description": "Its number.", "type": "integer"}


def test_the_messages_can_be_sent_back() -> None:
    llm, backend = scripted(calling("depth", '{"pier": 3}'), answer("Seven."), answer("Welcome."))
    ask = Message("user", "How deep?")
    with llm:
        result = llm.chat([ask], tools=[depth])
        llm.chat([ask, *result.messages, Message("user", "Thanks")], tools=[depth])
    assert backend.requests[2].messages[:-1] == (ask, *result.messages)


def test_what_a_program_hands_over_needs_no_permission() -> None:
    llm, _ = scripted(calling("sink", '{"ship": "Ark"}'), answer("Gone."))
    with llm:
        stream = llm.stream("Sink it!", tools=[sink])
        ended = [event for event in stream.events() if isinstance(event, CallEnded)]
    assert [event.outcome.text for event in ended] == ["Ark is gone"]
    assert stream.result.text == "Gone."


def test_definitions_stay_the_callers_to_carry_out() -> None:
    llm, backend = scripted(calling("ferry", "{}"))
    with llm:
        result = llm.chat("When does it leave?", tools=[FERRY, depth])
    assert [call.name for call in result.tool_calls] == ["ferry"]
    assert result.finish_reason is FinishReason.TOOL_CALLS
    assert {one.name for one in backend.requests[0].tools} == {"ferry", "depth"}


def test_what_a_function_gives_reaches_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(day: int) -> str:
        """Read the harbour's log."""
        return "x" * 20_000

    llm, backend = scripted(calling("log", '{"day": 1}'), answer("Long."))
    monkeypatch.setattr(ScriptedBackend, "card", replace(backend.card, context=100_000))
    with llm:
        llm.chat("Read it.", tools=[log])
    assert len(backend.requests[1].messages[-1].content) == 20_000


def test_a_function_that_is_no_tool_says_what_is_missing() -> None:
    def mute(ship: str) -> str:
        return ship

    llm, backend = scripted()
    with llm, pytest.raises(ConfigError, match="docstring"):
        llm.chat("Hello", tools=[mute])
    assert backend.requests == []


def test_a_call_that_was_insisted_on_is_made_once() -> None:
    llm, backend = scripted(calling("depth", '{"pier": 3}'), answer("Seven metres."))
    with llm:
        result = llm.chat("How deep?", tools=[depth], tool_choice="required")
    assert result.text == "Seven metres."
    assert [request.tool_choice.mode for request in backend.requests] == ["required", "auto"]


def test_a_choice_that_names_nothing_is_refused() -> None:
    llm, backend = scripted()
    named = {"type": "function", "function": {"name": "sail"}}
    with llm, pytest.raises(InvalidField, match="tool_choice"):
        llm.chat("How deep?", tools=[depth], tool_choice=named)
    assert backend.requests == []
