"""Emberkeep asking Emberkeep: one's provider against the other's real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.openai import OpenAIProvider
from emberkeep.config.settings import Config
from emberkeep.errors import ContextExceeded, EmberkeepError, Overloaded, RemoteDown, RemoteFull
from emberkeep.types.events import Event, Finished, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request, Sampling, Tool
from helpers.scripted_backend import end_of, text_of
from helpers.scripted_server import COMPLETED, HANG, Running, ScriptedBackend, running, says
from helpers.vendors.wires import CALLED, HELLO, RAIN, events_of

WEATHER = Tool("weather", "Of a place.", {"type": "object", "properties": {"place": {"type": "string"}}})


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptedBackend(), Config()) as server:
        yield server


def using(server: Running, use: Callable[[Provider], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        provider = OpenAIProvider(RemoteModel("own", "compatible", base_url=server.url), None)
        try:
            return await use(provider)
        finally:
            await provider.close()

    return asyncio.run(run())


def ask(server: Running, request: Request) -> list[Event]:
    return using(server, lambda provider: events_of(provider, request))  # type: ignore[no-any-return]


def test_a_prediction_arrives_and_what_came_of_it_goes_back(server: Running) -> None:
    drafted = replace(COMPLETED.usage, accepted_prediction_tokens=2, rejected_prediction_tokens=1)
    server.backend.reset(*says("Good", " day")[:-1], replace(COMPLETED, usage=drafted))

    events = ask(server, replace(HELLO, prediction="Good day"))

    assert (server.backend.last.prediction, text_of(events)) == ("Good day", "Good day")
    assert end_of(events)[1].usage == drafted


def test_what_was_asked_arrives_as_it_was_asked(server: Running) -> None:
    server.backend.reset(*says("Rain."))
    request = Request(
        messages=(Message("user", "Rain?"), CALLED, RAIN),
        tools=(WEATHER,),
        parallel_tool_calls=False,
        sampling=Sampling(temperature=0.0, top_k=7, min_p=0.0, typical_p=0.5, repetition_penalty=1.5, seed=3),
        max_tokens=9,
        stop=("END",),
        user="ann",
    )

    ask(server, request)

    asked = server.backend.last
    assert asked.messages == request.messages
    assert asked.tools == request.tools and asked.parallel_tool_calls is False
    assert asked.sampling == request.sampling
    assert (asked.max_tokens, asked.stop, asked.user) == (9, ("END",), "ann")


def test_calls_and_thoughts_arrive_in_pieces(server: Running) -> None:
    pieces = [
        ReasoningDelta(0, "Hm."),
        ToolCallDelta(0, 0, "c1", "weather", ""),
        ToolCallDelta(0, 0, None, None, '{"place": "Lyon"}'),
    ]
    server.backend.reset(*pieces, Finished(0, FinishReason.TOOL_CALLS), COMPLETED)

    events = ask(server, Request(messages=HELLO.messages, tools=(WEATHER,)))

    assert events[:3] == pieces
    assert end_of(events)[0].reason is FinishReason.TOOL_CALLS


def test_leaving_stops_the_other_ones_work(server: Running) -> None:
    server.backend.reset(TextDelta(0, "Wait"), HANG)

    async def use(provider: Provider) -> Event:
        events: Any = provider.answer(HELLO)
        first: Event = await anext(events)
        await events.aclose()
        return first

    assert using(server, use) == TextDelta(0, "Wait")
    assert server.backend.stopped_early.wait(10)


def test_its_failures_keep_their_meaning(server: Running) -> None:
    failures: list[tuple[list[Any], type[EmberkeepError], float | None]] = [
        ([ContextExceeded(9000, 4096)], RemoteFull, None),
        ([Overloaded("The queue is full.", 3.0)], RemoteDown, 3.0),
        ([TextDelta(0, "Well"), Overloaded("Shutting down.")], RemoteDown, None),
    ]
    for steps, kind, wait_s in failures:
        server.backend.reset(*steps)
        with pytest.raises(kind) as caught:
            ask(server, HELLO)
        assert getattr(caught.value, "retry_after", None) == wait_s


def test_it_tells_about_itself(server: Running) -> None:
    assert using(server, lambda provider: provider.about()) == RemoteAbout(("org/tiny",), 4096)
