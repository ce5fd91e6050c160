"""Turns in which a model acts: what runs, what is shown, what the model is told, and what comes in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from emberkeep.errors import EngineError, RequestError
from emberkeep.tools.function import ToolFunction, as_tool, tool
from emberkeep.tools.permissions import Agent, Permissions
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    CallEnded,
    Caller,
    CallStarted,
    Completed,
    Decision,
    Event,
    Exchanged,
    Finished,
    FinishReason,
    LookupRecord,
    PermissionAsked,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Execution, Message, Request, Tool, ToolCall
from helpers.scripted_backend import ScriptedBackend, Step, answer, outcomes_of, text_of
from helpers.tool_calls import calling_all, depth, sink

ASK = Request(messages=(Message("user", "How deep is the harbour?"),))


def rounds(*scripts: Iterable[Step]) -> ScriptedBackend:
    """A model that says one after the other."""
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
    backend: ScriptedBackend,
    *functions: Callable[..., object],
    asks: bool = False,
    source: Coming | None = None,
    turns: int = 8,
) -> tuple[Agent, Permissions]:
    permissions = Permissions(asks=asks)
    box = ToolBox([as_tool(one) for one in functions], ToolPolicy(asks=True), sources=(source,) if source else ())
    return Agent(backend, box, permissions, turns=turns), permissions


def act(
    backend: ScriptedBackend,
    *functions: Callable[..., object],
    asks: bool = False,
    decide: Callable[[PermissionAsked], Decision] = lambda asked: Decision.ONCE,
    source: Coming | None = None,
    turns: int = 8,
    **fields: Any,
) -> list[Event]:
    acting, permissions = agent(backend, *functions, asks=asks, source=source, turns=turns)

    async def run() -> list[Event]:
        events = []
        async for event in acting.generate(Request(**{"messages": ASK.messages, **fields})):
            events.append(event)
            if isinstance(event, PermissionAsked):
                permissions.decide(event.call, decide(event))
        return events

    return asyncio.run(run())


def test_a_call_runs_and_the_model_goes_on_with_its_result() -> None:
    model = rounds(calling_all(("depth", {"pier": 3}), text="Let me see."), answer("Seven metres."))
    events = act(model, depth)
    started, ended, exchanged = [
        event for event in events if isinstance(event, (CallStarted, CallEnded, Exchanged))
    ]
    assert started == CallStarted(ToolCall("c0", "depth", '{"pier": 3}'))
    assert ended.outcome.text == "7 metres"
    assert exchanged.messages == (
        Message("assistant", "Let me see.", tool_calls=(ToolCall("c0", "depth", '{"pier": 3}'),)),
        Message("tool", "7 metres", tool_call_id="c0", name="depth"),
    )
    assert model.requests[1].messages == (*ASK.messages, *exchanged.messages)
    assert text_of(events) == "Let me see.Seven metres."
    assert not any(isinstance(event, ToolCallDelta) for event in events)


def test_the_end_comes_once_and_the_usage_is_of_all_rounds() -> None:
    model = rounds(calling_all(("depth", {"pier": 1})), answer("Five metres."))
    events = act(model, depth)
    assert [event for event in events if isinstance(event, Finished)] == [Finished(0, FinishReason.STOP)]
    done = events[-1]
    assert isinstance(done, Completed)
    assert done.usage.completion_tokens == 5 + 2


def test_the_model_is_told_of_our_tools_and_of_the_clients() -> None:
    model = rounds(answer("Hello."))
    act(model, depth, tools=(Tool("ferry"),))
    assert [one.name for one in model.requests[0].tools] == ["ferry", "depth", "more_output"]


def test_a_call_of_the_clients_tool_is_the_clients() -> None:
    model = rounds(calling_all(("ferry", {}), ("depth", {"pier": 3})))
    events = act(model, depth, tools=(Tool("ferry"),))
    calls = [event.name for event in events if isinstance(event, ToolCallDelta) and event.name]
    assert calls == ["ferry"]
    assert outcomes_of(events) == []
    assert Finished(0, FinishReason.TOOL_CALLS) in events


def test_what_a_tool_raises_is_what_the_model_reads() -> None:
    def broken(ship: str) -> str:
        """Look for a ship."""
        raise RuntimeError("the radar is off")

    model = rounds(calling_all(("broken", {"ship": "Ark"})), answer("I cannot see it."))
    events = act(model, broken)
    ((said, failed),) = outcomes_of(events)
    assert failed
    assert "the radar is off" in said
    assert model.requests[1].messages[-1].content == said


@pytest.mark.parametrize(
    ("arguments", "told"), [({"pier": "three"}, "pier"), ({}, "pier"), ({"pier": 3, "tide": 1}, "tide")]
)
def test_arguments_that_do_not_fit_are_explained(arguments: dict[str, object], told: str) -> None:
    model = rounds(calling_all(("depth", arguments)), answer("Sorry."))
    ((said, failed),) = outcomes_of(act(model, depth))
    assert failed
    assert told in said


def test_several_calls_run_side_by_side_and_their_results_keep_their_order() -> None:
    meeting = asyncio.Barrier(2)

    async def slow(name: str) -> str:
        """Wait for the other one."""
        async with asyncio.timeout(20):
            await meeting.wait()
        if name == "first":
            await asyncio.sleep(0)
        return name

    model = rounds(calling_all(("slow", {"name": "first"}), ("slow", {"name": "second"})), answer("Both."))
    events = act(model, slow)
    assert [message.content for message in model.requests[1].messages[-2:]] == ["first", "second"]
    kinds = [type(event) for event in events if isinstance(event, (CallStarted, CallEnded))]
    assert kinds == [CallStarted, CallStarted, CallEnded, CallEnded]


def test_a_tool_that_must_be_alone_is() -> None:
    running: list[str] = []
    most: list[int] = []

    @tool(parallel=False)
    async def alone(name: str) -> str:
        """Run alone."""
        running.append(name)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.remove(name)
        return name

    model = rounds(calling_all(*(("alone", {"name": str(i)}) for i in range(3))), answer("Done."))
    act(model, alone)
    assert most == [1, 1, 1]


def test_the_same_call_again_and_again_is_noticed_and_told() -> None:
    again = calling_all(("depth", {"pier": 3}))
    model = rounds(again, again, again, answer("Seven."))
    said = outcomes_of(act(model, depth))
    assert said[:2] == [("7 metres", False), ("7 metres", False)]
    assert said[2][1]
    assert "call number 3 of depth with the same arguments" in said[2][0]


def test_arguments_in_another_order_are_the_same_call() -> None:
    def berth(ship: str, pier: int) -> str:
        """Moor a ship."""
        return "moored"

    one, other = {"ship": "Ark", "pier": 1}, {"pier": 1, "ship": "Ark"}
    model = rounds(
        calling_all(("berth", one)), calling_all(("berth", other)), calling_all(("berth", one)), answer(".")
    )
    assert [failed for _, failed in outcomes_of(act(model, berth))] == [False, False, True]


def test_after_the_last_round_the_model_has_to_answer() -> None:
    model = rounds(*(calling_all(("depth", {"pier": i})) for i in range(2)), answer("Enough."))
    events = act(model, depth, turns=2)
    assert [request.tool_choice.mode for request in model.requests] == ["auto", "auto", "none"]
    assert text_of(events) == "Enough."


def test_a_model_that_calls_even_then_ends_there() -> None:
    model = rounds(*(calling_all(("depth", {"pier": i})) for i in range(3)))
    events = act(model, depth, turns=2)
    assert len(outcomes_of(events)) == 2
    assert Finished(0, FinishReason.LENGTH) in events


def test_a_model_that_falls_silent_over_results_is_asked_once_more() -> None:
    silent: list[Step] = [Finished(0, FinishReason.STOP), Completed(Usage(10, 1), Timings(), LookupRecord())]
    model = rounds(calling_all(("depth", {"pier": 3})), silent, answer("Seven metres."))
    events = act(model, depth)
    assert text_of(events) == "Seven metres."
    assert model.requests[2].messages[:-1] == model.requests[1].messages
    assert model.requests[2].tool_choice.mode == "none"
    (exchanged,) = [event for event in events if isinstance(event, Exchanged)]
    assert len(exchanged.messages) == 2


def test_a_model_that_stays_silent_is_let_be() -> None:
    silent: list[Step] = [Finished(0, FinishReason.STOP), Completed(Usage(10, 1), Timings(), LookupRecord())]
    model = rounds(calling_all(("depth", {"pier": 3})), silent, silent)
    assert text_of(act(model, depth)) == ""
    assert len(model.requests) == 3


def test_tokens_are_those_of_the_whole_turn() -> None:
    model = rounds(calling_all(("depth", {"pier": 1})), answer("Five."))
    act(model, depth, max_tokens=12)
    assert [request.max_tokens for request in model.requests] == [12, 7]


def test_a_tool_knows_for_which_user_it_runs() -> None:
    seen: list[Caller] = []

    def who(caller: Caller) -> str:
        """Tell who asks."""
        seen.append(caller)
        return "you"

    namespace = private_namespace("ada", "")
    model = rounds(calling_all(("who", {})), answer("You."))
    act(model, who, namespace=namespace, execution=Execution(depth=1))
    assert seen == [Caller(namespace, 1)]


def test_an_error_of_the_backend_in_a_later_round_is_raised() -> None:
    model = rounds(calling_all(("depth", {"pier": 1})), [EngineError("It broke.")])
    with pytest.raises(EngineError, match="It broke"):
        act(model, depth)


# ── permission ──


def test_a_dangerous_tool_waits_for_a_yes() -> None:
    model = rounds(calling_all(("sink", {"ship": "Ark"})), answer("Gone."))
    events = act(model, sink, asks=True, decide=lambda asked: Decision.ONCE)
    (asked,) = [event for event in events if isinstance(event, PermissionAsked)]
    assert asked.call.name == "sink"
    assert events.index(asked) < next(i for i, e in enumerate(events) if isinstance(e, CallStarted))
    assert outcomes_of(events) == [("Ark is gone", False)]


@pytest.mark.parametrize("decision", [Decision.NO, Decision.NEVER])
def test_a_no_is_told_to_the_model_and_nothing_runs(decision: Decision) -> None:
    model = rounds(calling_all(("sink", {"ship": "Ark"}), ("depth", {"pier": 3})), answer("As you wish."))
    events = act(model, sink, depth, asks=True, decide=lambda asked: decision)
    first, second = sorted(outcomes_of(events))
    assert first == ("7 metres", False)
    assert second[1]
    assert "did not allow" in second[0]


@pytest.mark.parametrize(
    ("decision", "questions"), [(Decision.ONCE, 2), (Decision.NO, 2), (Decision.ALWAYS, 1), (Decision.NEVER, 1)]
)
def test_always_and_never_hold_for_the_session(decision: Decision, questions: int) -> None:
    model = rounds(calling_all(("sink", {"ship": "Ark"})), calling_all(("sink", {"ship": "Argo"})), answer("."))
    events = act(model, sink, asks=True, decide=lambda asked: decision)
    assert sum(isinstance(event, PermissionAsked) for event in events) == questions
    assert [failed for _, failed in outcomes_of(events)] == [decision in (Decision.NO, Decision.NEVER)] * 2


def test_harmless_tools_ask_no_questions() -> None:
    model = rounds(calling_all(("depth", {"pier": 3})), answer("Seven."))
    assert outcomes_of(act(model, depth, asks=True)) == [("7 metres", False)]


# ── what is called ──


def test_a_tool_that_the_model_made_up_is_told_to_it_and_not_to_the_client() -> None:
    backend = rounds(calling_all(("dephth", {"pier": 3})), answer("I was wrong."))
    events = act(backend, depth)
    ((said, failed),) = outcomes_of(events)
    assert failed
    assert "did you mean depth?" in said
    assert not any(isinstance(event, ToolCallDelta) for event in events)
    assert text_of(events) == "I was wrong."


def test_beside_tools_of_the_client_a_made_up_one_is_still_ours() -> None:
    backend = rounds(calling_all(("dephth", {})), answer("I was wrong."))
    events = act(backend, depth, tools=(Tool("ferry"),))
    assert outcomes_of(events)[0][1]


def test_a_tool_that_went_before_it_was_called_is_told() -> None:
    source = Coming(as_tool(depth))

    def script(request: Request) -> Iterable[Step]:
        if len(request.messages) > 1:
            return answer("It is gone.")
        source.now.clear()
        return calling_all(("depth", {"pier": 3}))

    events = act(ScriptedBackend(script), source=source)
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
    events = act(rounds(calls, answer(".")), asks=True, source=source, decide=decide)
    assert sunk == []
    assert ("Ark is gone", False) in outcomes_of(events)
    assert any("call it again" in said for said, _ in outcomes_of(events))


def test_of_several_calls_only_the_one_that_was_denied_does_not_run() -> None:
    def decide(asked: PermissionAsked) -> Decision:
        return Decision.ONCE if "Argo" in asked.call.arguments else Decision.NEVER

    calls = calling_all(("sink", {"ship": "Argo"}), ("depth", {"pier": 3}), ("sink", {"ship": "Ark"}))
    backend = rounds(calls, answer("."))
    act(backend, sink, depth, asks=True, decide=decide)
    argo, pier, ark = backend.requests[1].messages[-3:]
    assert (argo.content, pier.content) == ("Argo is gone", "7 metres")
    assert "did not allow" in ark.content


def test_a_call_that_was_cut_is_not_executed() -> None:
    backend = rounds([ToolCallDelta(0, 0, "c0", "depth", ""), *calling_all(reason=FinishReason.LENGTH)])
    events = act(backend, depth)
    assert outcomes_of(events) == []
    assert Finished(0, FinishReason.LENGTH) in events


def test_one_answer_at_a_time() -> None:
    with pytest.raises(RequestError, match="n = 1"):
        act(rounds(answer("Hi.")), depth, n=2)


# ── ids ──


def test_servers_that_count_their_calls_anew_get_ids_that_differ() -> None:
    backend = rounds(calling_all(("depth", {"pier": 1})), calling_all(("depth", {"pier": 2})), answer("Both."))
    events = act(backend, depth)
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
    events = act(rounds(deep, answer("Sorry.")), depth)
    assert outcomes_of(events)[0][1]
    assert text_of(events) == "Sorry."
