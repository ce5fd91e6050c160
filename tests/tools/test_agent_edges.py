"""Turns in which a model acts, and something comes in between: a client leaves, a tool goes, an id comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from emberkeep.errors import RequestError
from emberkeep.tools.function import ToolFunction, as_tool, tool
from emberkeep.tools.permissions import Agent, Permissions
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Decision,
    Event,
    Exchanged,
    Finished,
    FinishReason,
    PermissionAsked,
    TextDelta,
    ToolCallDelta,
)
from emberkeep.types.request import Message, Request, Tool, ToolCall
from helpers.scripted_backend import ScriptedBackend, Step, answer, outcomes_of, text_of
from helpers.tool_calls import calling_all, depth, sink

ASK = Request(messages=(Message("user", "How deep is the harbour?"),))


def rounds(*scripts: Iterable[Step]) -> ScriptedBackend:
    left = iter(scripts)
    return ScriptedBackend(lambda request: next(left))


class Coming:
    """A source whose tools come and go."""

    def __init__(self, *functions: ToolFunction) -> None:
        self.now: list[ToolFunction] = list(functions)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def functions(self) -> Sequence[ToolFunction]:
        return self.now

    def withdrawn(self, name: str) -> str | None:
        return None


def agent(
    backend: ScriptedBackend, *functions: Callable[..., object], asks: bool = False, source: Coming | None = None
) -> tuple[Agent, Permissions]:
    permissions = Permissions(asks=asks)
    made = [as_tool(one) for one in functions]
    box = ToolBox(made, ToolPolicy(asks=True), sources=(source,) if source else ())
    return Agent(backend, box, permissions, turns=8), permissions


def read(
    acting: tuple[Agent, Permissions],
    request: Request = ASK,
    *,
    on_question: Callable[[PermissionAsked], Decision] = lambda asked: Decision.ONCE,
) -> list[Event]:
    one, permissions = acting

    async def run() -> list[Event]:
        events = []
        async for event in one.generate(request):
            events.append(event)
            if isinstance(event, PermissionAsked):
                permissions.decide(event.call, on_question(event))
        return events

    return asyncio.run(run())


# ── what is called ──


def test_a_tool_that_the_model_made_up_is_told_to_it_and_not_to_the_client() -> None:
    backend = rounds(calling_all(("dephth", {"pier": 3})), answer("I was wrong."))
    events = read(agent(backend, depth))
    ((said, failed),) = outcomes_of(events)
    assert failed
    assert "did you mean depth?" in said
    assert not any(isinstance(event, ToolCallDelta) for event in events)
    assert text_of(events) == "I was wrong."


def test_beside_tools_of_the_client_a_made_up_one_is_still_ours() -> None:
    backend = rounds(calling_all(("dephth", {})), answer("I was wrong."))
    events = read(agent(backend, depth), replace(ASK, tools=(Tool("ferry"),)))
    assert outcomes_of(events)[0][1]


def test_a_tool_that_went_before_it_was_called_is_told() -> None:
    source = Coming(as_tool(depth))

    def script(request: Request) -> Iterable[Step]:
        if len(request.messages) > 1:
            return answer("It is gone.")
        source.now.clear()
        return calling_all(("depth", {"pier": 3}))

    events = read(agent(ScriptedBackend(script), source=source))
    ((said, failed),) = outcomes_of(events)
    assert failed
    assert "no tool 'depth'" in said
    assert text_of(events) == "It is gone."


def test_a_dangerous_tool_that_comes_while_the_user_decides_does_not_run_unasked() -> None:
    sunk: list[str] = []

    @tool(dangerous=True)
    def scuttle(ship: str) -> str:
        """Let water in."""
        sunk.append(ship)
        return "done"

    source = Coming(as_tool(sink))

    def decide(asked: PermissionAsked) -> Decision:
        source.now.append(as_tool(scuttle))
        return Decision.ONCE

    calls = calling_all(("scuttle", {"ship": "Ark"}), ("sink", {"ship": "Ark"}))
    events = read(agent(rounds(calls, answer(".")), asks=True, source=source), on_question=decide)
    assert sunk == []
    assert ("Ark is gone", False) in outcomes_of(events)
    assert any("call it again" in said for said, _ in outcomes_of(events))


def test_of_several_calls_only_the_one_that_was_denied_does_not_run() -> None:
    def decide(asked: PermissionAsked) -> Decision:
        return Decision.ONCE if "Argo" in asked.call.arguments else Decision.NEVER

    calls = calling_all(("sink", {"ship": "Argo"}), ("depth", {"pier": 3}), ("sink", {"ship": "Ark"}))
    backend = rounds(calls, answer("."))
    read(agent(backend, sink, depth, asks=True), on_question=decide)
    argo, pier, ark = backend.requests[1].messages[-3:]
    assert (argo.content, pier.content) == ("Argo is gone", "7 metres")
    assert "did not allow" in ark.content


def test_a_call_that_was_cut_is_not_executed() -> None:
    backend = rounds([ToolCallDelta(0, 0, "c0", "depth", ""), *calling_all(reason=FinishReason.LENGTH)])
    events = read(agent(backend, depth))
    assert outcomes_of(events) == []
    assert Finished(0, FinishReason.LENGTH) in events


def test_one_answer_at_a_time() -> None:
    with pytest.raises(RequestError, match="n = 1"):
        read(agent(rounds(answer("Hi.")), depth), replace(ASK, n=2))


# ── ids ──


def test_servers_that_count_their_calls_anew_get_ids_that_differ() -> None:
    backend = rounds(calling_all(("depth", {"pier": 1})), calling_all(("depth", {"pier": 2})), answer("Both."))
    events = read(agent(backend, depth))
    ids = [m.tool_call_id for e in events if isinstance(e, Exchanged) for m in e.messages if m.role == "tool"]
    assert ids[0] == "c0"
    assert len(set(ids)) == 2
    results = [message.content for message in backend.requests[-1].messages if message.role == "tool"]
    assert results == ["5 metres", "6 metres"]


def test_two_answers_at_once_are_decided_on_apart_even_with_the_same_ids() -> None:
    async def both() -> list[list[tuple[str, bool]]]:
        permissions = Permissions(asks=True)
        box = ToolBox([as_tool(sink)], ToolPolicy(asks=True))
        asked: dict[str, ToolCall] = {}
        all_asked = asyncio.Event()

        async def one(ship: str) -> list[tuple[str, bool]]:
            acting = Agent(rounds(calling_all(("sink", {"ship": ship})), answer(".")), box, permissions, turns=2)
            events = []
            async for event in acting.generate(ASK):
                events.append(event)
                if isinstance(event, PermissionAsked):
                    asked[ship] = event.call
                    if len(asked) == 2:
                        all_asked.set()
            return outcomes_of(events)

        async with asyncio.timeout(20):
            running = [asyncio.create_task(one(ship)) for ship in ("Ark", "Argo")]
            await all_asked.wait()
            permissions.decide(asked["Argo"], Decision.ONCE)
            permissions.decide(asked["Ark"], Decision.NEVER)
            return list(await asyncio.gather(*running))

    (ark,), (argo,) = asyncio.run(both())
    assert argo == ("Argo is gone", False)
    assert ark[1]


# ── leaving ──


def test_leaving_while_a_permission_is_pending_leaves_nothing_behind() -> None:
    acting, permissions = agent(rounds(calling_all(("sink", {"ship": "Ark"})), answer(".")), sink, asks=True)

    async def leave() -> ToolCall:
        asked = asyncio.Event()
        calls: list[ToolCall] = []

        async def reading() -> None:
            async for event in acting.generate(ASK):
                if isinstance(event, PermissionAsked):
                    calls.append(event.call)
                    asked.set()

        task = asyncio.create_task(reading())
        async with asyncio.timeout(20):
            await asked.wait()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        permissions.decide(calls[0], Decision.ALWAYS)  # too late
        return calls[0]

    asyncio.run(leave())
    assert permissions.verdict(as_tool(sink)) is None


@pytest.mark.parametrize("at", [CallStarted, PermissionAsked, TextDelta])
def test_a_client_that_stops_reading_has_stopped_everything(at: type[Event]) -> None:
    stopped: list[str] = []

    @tool(dangerous=True)
    async def endless(n: int) -> str:
        """Never end."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("tool")
        return ""

    backend = rounds([TextDelta(0, "Let me see."), *calling_all(("depth", {"pier": 1}), ("endless", {"n": 1}))])
    acting, permissions = agent(backend, depth, endless, asks=True)

    async def leave() -> set[str]:
        async with asyncio.timeout(20), aclosing(acting.generate(ASK)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, at):
                    break
                if isinstance(event, PermissionAsked):
                    permissions.decide(event.call, Decision.ONCE)
        return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]

    assert asyncio.run(leave()) == set()


def test_leaving_after_the_first_of_two_calls_stops_the_other() -> None:
    stopped: list[str] = []

    async def endless(n: int) -> str:
        """Never end."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("tool")
        return ""

    acting, _ = agent(rounds(calling_all(("depth", {"pier": 1}), ("endless", {"n": 1}))), depth, endless)

    async def leave() -> list[str]:
        async with asyncio.timeout(20), aclosing(acting.generate(ASK)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, CallEnded):
                    break
        return list(stopped)

    assert asyncio.run(leave()) == ["tool"]


def test_arguments_that_are_nested_without_end_are_only_a_call_that_failed() -> None:
    deep = [ToolCallDelta(0, 0, "c0", "depth", "[" * 100_000), *calling_all()]
    events = read(agent(rounds(deep, answer("Sorry.")), depth))
    assert outcomes_of(events)[0][1]
    assert text_of(events) == "Sorry."
