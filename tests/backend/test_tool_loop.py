"""The loop with tiny parts: what is generated, what runs, what is kept for the next round."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from emberkeep.backend.tool_loop import CallHistory, Gate, ToolLoop
from emberkeep.errors import ContextExceeded
from emberkeep.types.events import (
    CallEnded,
    Caller,
    CallStarted,
    Completed,
    Event,
    Exchanged,
    Finished,
    FinishReason,
    LookupRecord,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolOutcome,
    Usage,
)
from emberkeep.types.request import Message, Request, ToolCall

ASK = Request(messages=(Message("user", "How deep is the harbour?"),))
COMPLETED = Completed(Usage(10, 5), Timings(), LookupRecord())
ANSWER = (TextDelta(0, "7 metres."), Finished(0, FinishReason.STOP), COMPLETED)


def calling(*piers: int, text: str = "") -> tuple[Event, ...]:
    said = (TextDelta(0, text),) if text else ()
    calls = [ToolCallDelta(0, i, f"c{i}", "depth", json.dumps({"pier": pier})) for i, pier in enumerate(piers)]
    return (*said, *calls, Finished(0, FinishReason.TOOL_CALLS), COMPLETED)


class Model:
    def __init__(self, *rounds: Sequence[Event] | Exception) -> None:
        self._rounds = iter(rounds)
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.asked.append(request)
        events = next(self._rounds)
        if isinstance(events, Exception):
            raise events
        for event in events:
            yield event


class Tools:
    def may_run_beside(self, name: str) -> bool:
        return True

    async def run(self, call: ToolCall, caller: Caller) -> ToolOutcome:
        return ToolOutcome(call, f"{json.loads(call.arguments)['pier'] + 4} metres")


@dataclass
class Kept:
    """A transcript that only keeps what it is told."""

    is_shown: bool = True
    exchanges: list[tuple[Message, ...]] = field(default_factory=list)
    shortened: int = 0

    async def add(self, asked: Request, messages: tuple[Message, ...], usage: Usage) -> Request:
        self.exchanges.append(messages)
        return replace(asked, messages=(*asked.messages, *messages))

    async def shorten(self, asked: Request) -> Request | None:
        self.shortened += 1
        return replace(asked, messages=asked.messages[:-1]) if self.shortened < 3 else None


class Closed(Gate):
    def refusal(self, call: ToolCall) -> str | None:
        return "No."


def run(model: Model, transcript: Kept, gate: Gate | None = None, rounds: int = 4) -> list[Event]:
    loop = ToolLoop(model.generate, Tools(), gate or Gate(), transcript)

    async def events() -> list[Event]:
        return [event async for event in loop.run(ASK, rounds, lambda name: True)]

    return asyncio.run(events())


def test_a_shown_exchange_is_told_and_the_next_round_has_it() -> None:
    model, transcript = Model(calling(3), ANSWER), Kept()
    events = run(model, transcript)
    kinds = [CallStarted, CallEnded, Exchanged, TextDelta, Finished, Completed]
    assert [type(event) for event in events] == kinds
    assert model.asked[1].messages == (*ASK.messages, *transcript.exchanges[0])
    assert [message.content for message in transcript.exchanges[0]] == ["", "7 metres"]


def test_what_the_gate_refuses_does_not_run_and_the_model_reads_why() -> None:
    transcript = Kept()
    run(Model(calling(3), ANSWER), transcript, Closed())
    assert [message.content for message in transcript.exchanges[0]] == ["", "No."]


@pytest.mark.parametrize(("gate", "ending"), [(Gate(), "gave 8 characters"), (Closed(), "failed")])
def test_a_call_is_logged_and_its_arguments_only_where_everything_is(
    gate: Gate, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "emberkeep.tools"):
        run(Model(calling(3), ANSWER), Kept(), gate)
    told, details = caplog.records
    assert (told.levelno, told.getMessage()) == (logging.INFO, f"the tool depth {ending} after 0 ms")
    assert details.levelno == logging.DEBUG
    assert details.getMessage().startswith('depth({"pier": 3}): ')


def test_the_last_round_is_forced_to_answer() -> None:
    model = Model(calling(1), calling(2), ANSWER)
    run(model, Kept(), rounds=3)
    assert [request.tool_choice.mode for request in model.asked] == ["auto", "auto", "none"]
    assert model.asked[-1].messages[-1].content.endswith(ASK.messages[0].content)


def test_results_are_shortened_until_they_fit() -> None:
    full = ContextExceeded(2000, 1000)
    model, transcript = Model(calling(3), full, full, ANSWER), Kept()
    run(model, transcript)
    assert [len(request.messages) for request in model.asked] == [1, 3, 2, 1]


@pytest.mark.parametrize("rounds", [(), (calling(3),)])
def test_a_prompt_that_cannot_be_shortened_is_refused(rounds: tuple[Sequence[Event], ...]) -> None:
    transcript = Kept(shortened=2)
    with pytest.raises(ContextExceeded):
        run(Model(*rounds, ContextExceeded(2000, 1000)), transcript)
    assert transcript.shortened == 2 + len(rounds)


def test_an_id_of_an_earlier_turn_is_not_used_again() -> None:
    before = Message("assistant", tool_calls=(ToolCall("c0", "depth", "{}"),))
    history = CallHistory([before])
    first, second, third = history.distinguish([ToolCall(id, "depth", "{}") for id in ("c0", "", "c1")])
    assert third.id == "c1"
    assert len({"c0", "", first.id, second.id, third.id}) == 5
