"""Turns in which a model acts: what runs, what is shown, what the model is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from emberkeep.errors import EngineError
from emberkeep.tools.function import ToolFunction, as_tool, tool
from emberkeep.tools.permissions import Agent, Permissions
from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy
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
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Execution, Message, Request, Tool, ToolCall
from helpers.scripted_backend import ScriptedBackend, Step, answer, outcomes_of, text_of
from helpers.tool_calls import calling_all, depth, sink

ASK = (Message("user", "How deep is the harbour?"),)


class Model:
    """Says one round after the other, and keeps what it was asked."""

    def __init__(self, *rounds: Iterable[Step]) -> None:
        self._rounds = list(rounds)
        self.backend = ScriptedBackend(self._next)

    def _next(self, request: Request) -> Iterable[Step]:
        return self._rounds[len(self.asked) - 1]

    @property
    def asked(self) -> list[Request]:
        return self.backend.requests


def box(*functions: Callable[..., object] | ToolFunction, **limits: float) -> ToolBox:
    made = [one if isinstance(one, ToolFunction) else as_tool(one) for one in functions]
    return ToolBox(made, ToolPolicy(asks=True), limits=ToolLimits(**limits))


def act(
    model: Model,
    toolbox: ToolBox,
    *,
    asks: bool = False,
    decide: Callable[[PermissionAsked, Permissions], None] | None = None,
    turns: int = 8,
    **fields: object,
) -> list[Event]:
    permissions = Permissions(asks=asks)
    agent = Agent(model.backend, toolbox, permissions, turns=turns)

    async def run() -> list[Event]:
        events = []
        async for event in agent.generate(Request(messages=ASK, **fields)):
            events.append(event)
            if isinstance(event, PermissionAsked):
                assert decide is not None
                decide(event, permissions)
        return events

    return asyncio.run(run())


def test_a_call_runs_and_the_model_goes_on_with_its_result() -> None:
    model = Model(calling_all(("depth", {"pier": 3}), text="Let me see."), answer("Seven metres."))
    events = act(model, box(depth))
    started, ended, exchanged = [
        event for event in events if isinstance(event, (CallStarted, CallEnded, Exchanged))
    ]
    assert started == CallStarted(ToolCall("c0", "depth", '{"pier": 3}'))
    assert ended.outcome.text == "7 metres"
    assert exchanged.messages == (
        Message("assistant", "Let me see.", tool_calls=(ToolCall("c0", "depth", '{"pier": 3}'),)),
        Message("tool", "7 metres", tool_call_id="c0", name="depth"),
    )
    assert model.asked[1].messages == (*ASK, *exchanged.messages)
    assert text_of(events) == "Let me see.Seven metres."
    assert not any(isinstance(event, ToolCallDelta) for event in events)


def test_the_end_comes_once_and_the_usage_is_of_all_rounds() -> None:
    model = Model(calling_all(("depth", {"pier": 1})), answer("Five metres."))
    events = act(model, box(depth))
    assert [event for event in events if isinstance(event, Finished)] == [Finished(0, FinishReason.STOP)]
    done = events[-1]
    assert isinstance(done, Completed)
    assert done.usage.completion_tokens == 5 + 2


def test_the_model_is_told_of_our_tools_and_of_the_clients() -> None:
    model = Model(answer("Hello."))
    act(model, box(depth), tools=(Tool("ferry"),))
    assert [one.name for one in model.asked[0].tools] == ["ferry", "depth", "more_output"]


def test_a_call_of_the_clients_tool_is_the_clients() -> None:
    model = Model(calling_all(("ferry", {}), ("depth", {"pier": 3})))
    events = act(model, box(depth), tools=(Tool("ferry"),))
    calls = [event.name for event in events if isinstance(event, ToolCallDelta) and event.name]
    assert calls == ["ferry"]
    assert outcomes_of(events) == []
    assert Finished(0, FinishReason.TOOL_CALLS) in events


def test_what_a_tool_raises_is_what_the_model_reads() -> None:
    def broken(ship: str) -> str:
        """Look for a ship."""
        raise RuntimeError("the radar is off")

    model = Model(calling_all(("broken", {"ship": "Ark"})), answer("I cannot see it."))
    events = act(model, box(broken))
    ((said, failed),) = outcomes_of(events)
    assert failed
    assert "the radar is off" in said
    assert model.asked[1].messages[-1].content == said


@pytest.mark.parametrize(
    ("arguments", "told"), [({"pier": "three"}, "pier"), ({}, "pier"), ({"pier": 3, "tide": 1}, "tide")]
)
def test_arguments_that_do_not_fit_are_explained(arguments: dict[str, object], told: str) -> None:
    model = Model(calling_all(("depth", arguments)), answer("Sorry."))
    ((said, failed),) = outcomes_of(act(model, box(depth)))
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

    model = Model(calling_all(("slow", {"name": "first"}), ("slow", {"name": "second"})), answer("Both."))
    events = act(model, box(slow))
    assert [message.content for message in model.asked[1].messages[-2:]] == ["first", "second"]
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

    model = Model(calling_all(*(("alone", {"name": str(i)}) for i in range(3))), answer("Done."))
    act(model, box(alone))
    assert most == [1, 1, 1]


def test_the_same_call_again_and_again_is_noticed_and_told() -> None:
    again = calling_all(("depth", {"pier": 3}))
    model = Model(again, again, again, answer("Seven."))
    said = outcomes_of(act(model, box(depth)))
    assert said[:2] == [("7 metres", False), ("7 metres", False)]
    assert said[2][1]
    assert "call number 3 of depth with the same arguments" in said[2][0]


def test_arguments_in_another_order_are_the_same_call() -> None:
    def berth(ship: str, pier: int) -> str:
        """Moor a ship."""
        return "moored"

    one, other = {"ship": "Ark", "pier": 1}, {"pier": 1, "ship": "Ark"}
    model = Model(
        calling_all(("berth", one)), calling_all(("berth", other)), calling_all(("berth", one)), answer(".")
    )
    assert [failed for _, failed in outcomes_of(act(model, box(berth)))] == [False, False, True]


def test_after_the_last_round_the_model_has_to_answer() -> None:
    model = Model(*(calling_all(("depth", {"pier": i})) for i in range(2)), answer("Enough."))
    events = act(model, box(depth), turns=2)
    assert [request.tool_choice.mode for request in model.asked] == ["auto", "auto", "none"]
    assert text_of(events) == "Enough."


def test_a_model_that_calls_even_then_ends_there() -> None:
    model = Model(*(calling_all(("depth", {"pier": i})) for i in range(3)))
    events = act(model, box(depth), turns=2)
    assert len(outcomes_of(events)) == 2
    assert Finished(0, FinishReason.LENGTH) in events


def test_a_model_that_falls_silent_over_results_is_asked_once_more() -> None:
    silent: list[Step] = [Finished(0, FinishReason.STOP), Completed(Usage(10, 1), Timings(), LookupRecord())]
    model = Model(calling_all(("depth", {"pier": 3})), silent, answer("Seven metres."))
    events = act(model, box(depth))
    assert text_of(events) == "Seven metres."
    assert model.asked[2].messages[:-1] == model.asked[1].messages
    assert model.asked[2].tool_choice.mode == "none"
    (exchanged,) = [event for event in events if isinstance(event, Exchanged)]
    assert len(exchanged.messages) == 2


def test_a_model_that_stays_silent_is_let_be() -> None:
    silent: list[Step] = [Finished(0, FinishReason.STOP), Completed(Usage(10, 1), Timings(), LookupRecord())]
    model = Model(calling_all(("depth", {"pier": 3})), silent, silent)
    assert text_of(act(model, box(depth))) == ""
    assert len(model.asked) == 3


def test_tokens_are_those_of_the_whole_turn() -> None:
    model = Model(calling_all(("depth", {"pier": 1})), answer("Five."))
    act(model, box(depth), max_tokens=12)
    assert [request.max_tokens for request in model.asked] == [12, 7]


def test_a_tool_knows_for_which_user_it_runs() -> None:
    seen: list[Caller] = []

    def who(caller: Caller) -> str:
        """Tell who asks."""
        seen.append(caller)
        return "you"

    namespace = private_namespace("ada", "")
    model = Model(calling_all(("who", {})), answer("You."))
    act(model, box(who), namespace=namespace, execution=Execution(depth=1))
    assert seen == [Caller(namespace, 1)]


def test_an_error_of_the_backend_in_a_later_round_is_raised() -> None:
    model = Model(calling_all(("depth", {"pier": 1})), [EngineError("It broke.")])
    with pytest.raises(EngineError, match="It broke"):
        act(model, box(depth))


# ── permission ──


def decide_always(decision: Decision) -> Callable[[PermissionAsked, Permissions], None]:
    return lambda event, permissions: permissions.decide(event.call, decision)


def test_a_dangerous_tool_waits_for_a_yes() -> None:
    model = Model(calling_all(("sink", {"ship": "Ark"})), answer("Gone."))
    events = act(model, box(sink), asks=True, decide=decide_always(Decision.ONCE))
    (asked,) = [event for event in events if isinstance(event, PermissionAsked)]
    assert asked.call.name == "sink"
    assert events.index(asked) < next(i for i, e in enumerate(events) if isinstance(e, CallStarted))
    assert outcomes_of(events) == [("Ark is gone", False)]


@pytest.mark.parametrize("decision", [Decision.NO, Decision.NEVER])
def test_a_no_is_told_to_the_model_and_nothing_runs(decision: Decision) -> None:
    model = Model(calling_all(("sink", {"ship": "Ark"}), ("depth", {"pier": 3})), answer("As you wish."))
    events = act(model, box(sink, depth), asks=True, decide=decide_always(decision))
    first, second = sorted(outcomes_of(events))
    assert first == ("7 metres", False)
    assert second[1]
    assert "did not allow" in second[0]


@pytest.mark.parametrize(
    ("decision", "questions"), [(Decision.ONCE, 2), (Decision.NO, 2), (Decision.ALWAYS, 1), (Decision.NEVER, 1)]
)
def test_always_and_never_hold_for_the_session(decision: Decision, questions: int) -> None:
    model = Model(calling_all(("sink", {"ship": "Ark"})), calling_all(("sink", {"ship": "Argo"})), answer("."))
    events = act(model, box(sink), asks=True, decide=decide_always(decision))
    assert sum(isinstance(event, PermissionAsked) for event in events) == questions
    assert [failed for _, failed in outcomes_of(events)] == [decision in (Decision.NO, Decision.NEVER)] * 2


def test_harmless_tools_ask_no_questions() -> None:
    model = Model(calling_all(("depth", {"pier": 3})), answer("Seven."))
    assert outcomes_of(act(model, box(depth), asks=True)) == [("7 metres", False)]


def test_an_answer_that_is_left_stops_its_calls() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def endless(n: int) -> str:
        """Never end."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    model = Model(calling_all(("endless", {"n": 1})), answer("."))
    agent = Agent(model.backend, box(endless), Permissions(asks=False), turns=4)

    async def leave() -> None:
        async def read() -> None:
            async for _ in agent.generate(Request(messages=ASK)):
                pass

        reading = asyncio.create_task(read())
        async with asyncio.timeout(20):
            await began.wait()
            reading.cancel()
            await stopped.wait()

    asyncio.run(leave())
