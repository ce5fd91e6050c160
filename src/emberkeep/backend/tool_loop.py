"""Answers in several rounds: the model calls tools that run here, reads what they gave, and goes on.

The loop reads aloud: run a round, execute its calls, add what was exchanged to the transcript, until the model
calls nothing more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from itertools import islice
from typing import Protocol

from emberkeep.errors import ContextExceeded
from emberkeep.session.recall import exchange_messages
from emberkeep.text import shorten
from emberkeep.types.events import (
    CallEnded,
    Caller,
    CallStarted,
    Completed,
    Event,
    Events,
    Exchanged,
    Finished,
    FinishReason,
    PermissionAsked,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolOutcome,
    Usage,
    merge_usage,
)
from emberkeep.types.request import Json, Message, Request, ToolCall, ToolChoice, new_call_id
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.tools")

SAME_CALLS = 2
"""How often a call with the same arguments is executed in one turn."""
MOST_CALLS = 64
"""Calls of one answer that are executed; a model that writes more is in a loop."""
_REPEATED_CHARS = 1000
_BESIDE = 8
"""Calls that run at the same time."""
_LOGGED_NAME, _LOGGED_TEXT = 64, 160
"""Characters of a name, which a model may have made up, and of arguments or a result."""
_GAP = "\n\n"
"""Separates the texts before and after a call, where the client gets both as one answer."""


class LoopTools(Protocol):
    def may_run_beside(self, name: str) -> bool:
        """While other calls run."""

    async def run(self, call: ToolCall, caller: Caller) -> ToolOutcome:
        """Never raises. Cancelling it cancels the call."""


class Gate:
    """Decides which calls may run. This one lets all of them."""

    async def ask(self, calls: Sequence[ToolCall]) -> AsyncGenerator[PermissionAsked, None]:
        """Asks the user, before any of `calls` runs, and waits for the answers. Closing it stops the questions."""
        questions: tuple[PermissionAsked, ...] = ()
        for question in questions:
            yield question

    def refusal(self, call: ToolCall) -> str | None:
        """What the model is told instead of a result; read when the call is about to run. None: it may."""
        return None


class Transcript(Protocol):
    """Keeps what was exchanged in an answer, so that the next round's prompt has it."""

    @property
    def is_shown(self) -> bool:
        """The client gets the messages too. Otherwise it sees one answer, and nothing of the calls."""

    async def add(self, asked: Request, messages: tuple[Message, ...], usage: Usage) -> Request:
        """`asked`, in a conversation that has these: a message with calls, and the results.

        `usage`: of the round that made the calls.
        """

    async def shorten(self, asked: Request) -> Request | None:
        """`asked` with shorter results, because they do not fit. None: they cannot be shortened."""


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """For one answer. Belongs to the event loop."""

    generate: Callable[[Request], Events]
    tools: LoopTools
    gate: Gate
    transcript: Transcript

    async def run(self, request: Request, rounds: int, is_ours: Callable[[str], bool]) -> Events:
        """The events of all rounds as those of one answer, with what happens to calls in between.

        `rounds`: at most so many, of which the last has to be an answer. `is_ours`: whether a tool of that name
        runs here; others are the client's, and a call of one ends the answer.
        """
        completed: list[Completed] = []
        history, was_forced = CallHistory(request.messages), False
        for left in reversed(range(rounds)):
            current = Round(request, is_ours)
            async with aclosing(self._run_round(current, completed)) as events:
                async for event in events:
                    yield event
            following = next_request(current.request, completed[-1].usage, may_call=left > 1)
            if not left or following is None:
                break
            if current.is_speechless and len(completed) > 1 and not was_forced:
                request, was_forced = force_answer(following), True
                continue
            if not current.calls:
                break
            if current.text and not self.transcript.is_shown:
                current.text += _GAP
                yield TextDelta(0, _GAP)
            calls, ended = history.distinguish(current.calls), list[ToolOutcome]()
            async with aclosing(self._execute(current.request, calls, history)) as happening:
                async for event in happening:
                    if isinstance(event, CallEnded):
                        ended.append(event.outcome)
                    yield event
            messages = exchange_messages(current.text, calls, _results(calls, ended), current.reasoning)
            if self.transcript.is_shown:
                yield Exchanged(messages)
            request = await self.transcript.add(following, messages, completed[-1].usage)
            # A client that insists on a call still gets one.
            if left == 1 and request.tool_choice.mode in ("auto", "none"):
                request = force_answer(request)
        if (end := current.end()) is not None:
            yield end
        yield merge_usage(completed, are_rounds=True)

    async def _run_round(self, current: Round, completed: list[Completed]) -> Events:
        """The events of one round that its client gets; the rest of them goes into `current` and `completed`.

        Results that do not fit into the context are shortened as long as they can be.
        """
        while True:
            try:
                async with aclosing(self.generate(current.request)) as events:
                    async for event in events:
                        if isinstance(event, Completed):
                            completed.append(event)
                        elif (passed := current.take(event)) is not None:
                            yield passed
                return
            except ContextExceeded:
                shorter = await self.transcript.shorten(current.request) if completed else None
                if shorter is None:
                    raise
                current.request = shorter

    async def _execute(self, asked: Request, calls: Sequence[ToolCall], history: CallHistory) -> Events:
        caller = Caller(asked.namespace, asked.execution.depth)
        repeated = {call.id: reason for call in calls if (reason := history.refusal(call)) is not None}
        async with aclosing(self.gate.ask([call for call in calls if call.id not in repeated])) as questions:
            async for question in questions:
                yield question

        async def run(call: ToolCall) -> ToolOutcome:
            reason = repeated.get(call.id) or self.gate.refusal(call)
            outcome = ToolOutcome(call, reason, failed=True) if reason else await self.tools.run(call, caller)
            log_outcome(outcome)
            return outcome

        async with aclosing(execute_calls(calls, run, self.tools.may_run_beside)) as happening:
            async for event in happening:
                yield event


# ── rounds ──


@dataclass(slots=True)
class Round:
    """The outcome of one round of generation."""

    request: Request
    """As it was sent."""
    is_ours: Callable[[str], bool]
    text: str = ""
    reasoning: str = ""
    finished: Finished | None = None
    _ours: dict[int, ToolCall] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)
    """The pieces in which calls of our tools came."""
    _others: set[int] = field(default_factory=set)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that run here; none where the client has to answer another one first, or the answer was cut: then
        what the last one would have been is unknown."""
        if self._others or self._is_cut:
            return ()
        ours = sorted(self._ours.items())
        return tuple(replace(call, arguments="".join(self._arguments[place])) for place, call in ours)

    @property
    def _is_cut(self) -> bool:
        return self.finished is not None and self.finished.reason is FinishReason.LENGTH

    def take(self, event: Event) -> Event | None:
        """What the client gets of an event now: nothing of our calls, and the end only when nothing follows."""
        match event:
            case ToolCallDelta(call_index=place, name=name):
                if place in self._ours:
                    self._arguments[place].append(event.arguments)
                    return None
                if name is not None and self.is_ours(name):
                    self._ours[place] = ToolCall(event.id or "", name, "")
                    self._arguments[place] = [event.arguments]
                    return None
                self._others.add(place)
                return replace(event, call_index=len([i for i in self._others if i < place]))
            case Finished():
                self.finished = event
                return None
            case TextDelta(text=text):
                self.text += text
            case ReasoningDelta(text=text):
                self.reasoning += text
        return event

    @property
    def is_speechless(self) -> bool:
        """The model ended the round without text and without calls."""
        ended = self.finished is not None and self.finished.reason is FinishReason.STOP
        return ended and not (self.text.strip() or self._ours or self._others)

    def end(self) -> Finished | None:
        """As the client is told: calls of ours that are not executed end the answer where it is."""
        if self.finished and self.calls and self.finished.reason is FinishReason.TOOL_CALLS:
            return replace(self.finished, reason=FinishReason.LENGTH)
        return self.finished


def next_request(asked: Request, usage: Usage, *, may_call: bool) -> Request | None:
    """The request of the next round, with the tokens that are left; None if none are. A `tool_choice` other than
    `auto` stays, even where no more calls run."""
    choice = asked.tool_choice if may_call or asked.tool_choice.mode != "auto" else ToolChoice("none")
    if asked.max_tokens is None:
        return replace(asked, tool_choice=choice)
    left = asked.max_tokens - usage.completion_tokens
    return replace(asked, tool_choice=choice, max_tokens=left) if left > 0 else None


def force_answer(asked: Request) -> Request:
    """`asked` without calls, and with the question repeated for this round only.

    Small models fall silent over results, or call the same tool for ever.
    """
    question = next((message.content for message in reversed(asked.messages) if message.role == "user"), "")
    again = Message("user", f"With these results, answer this in words: {question[-_REPEATED_CHARS:]}")
    return replace(asked, messages=(*asked.messages, again), tool_choice=ToolChoice("none"))


# ── calls ──


class CallHistory:
    """The calls of one turn: a model that makes the same one again and again is told so."""

    def __init__(self, messages: Iterable[Message]) -> None:
        """`messages`: what was said before."""
        self._ids = {call.id for message in messages for call in message.tool_calls}
        self._seen: Counter[tuple[str, str]] = Counter()

    def distinguish(self, calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
        """Each with an id of its own, for some servers begin to count anew with every answer; the first of very
        many."""
        return tuple(self._with_id(call) for call in islice(calls, MOST_CALLS))

    def _with_id(self, call: ToolCall) -> ToolCall:
        if not call.id or call.id in self._ids:
            call = replace(call, id=new_call_id())
        self._ids.add(call.id)
        return call

    def refusal(self, call: ToolCall) -> str | None:
        """Counts the call. What the model is told instead of a result, where it was made too often."""
        key = (call.name, _canonical(call.arguments))
        self._seen[key] += 1
        if self._seen[key] <= SAME_CALLS:
            return None
        return (
            f"This is call number {self._seen[key]} of {call.name} with the same arguments, and it was not "
            "carried out: the results are above. Use them, call something else, or answer."
        )


def _canonical(arguments: str) -> str:
    try:
        read: Json = json.loads(arguments or "{}", strict=False)
        return json.dumps(read, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def log_outcome(outcome: ToolOutcome) -> None:
    """Who reads the log is told what was said only where everything is logged."""
    if not log.isEnabledFor(logging.INFO):
        return
    call, ending = outcome.call, "failed" if outcome.failed else f"gave {len(outcome.text)} characters"
    log.info("the tool %s %s after %.0f ms", shorten(call.name, _LOGGED_NAME), ending, outcome.ms)
    given, got = shorten(call.arguments, _LOGGED_TEXT), shorten(outcome.text, _LOGGED_TEXT)
    log.debug("%s(%s): %r", shorten(call.name, _LOGGED_NAME), given, got)


async def execute_calls(
    calls: Sequence[ToolCall],
    run: Callable[[ToolCall], Awaitable[ToolOutcome]],
    may_run_beside: Callable[[str], bool],
) -> AsyncGenerator[CallStarted | CallEnded, None]:
    """Neighbours that may run beside others run side by side, and end in any order. Cancelling it cancels them."""
    for group in _groups(calls, may_run_beside):
        for call in group:
            yield CallStarted(call)
        tasks = [asyncio.ensure_future(run(call)) for call in group]
        try:
            for done in asyncio.as_completed(tasks):
                yield CallEnded(await done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _groups(calls: Sequence[ToolCall], may_run_beside: Callable[[str], bool]) -> list[list[ToolCall]]:
    groups: list[list[ToolCall]] = []
    is_open = False
    for call in calls:
        beside = may_run_beside(call.name)
        if beside and is_open and len(groups[-1]) < _BESIDE:
            groups[-1].append(call)
        else:
            groups.append([call])
        is_open = beside
    return groups


def _results(calls: Sequence[ToolCall], ended: Iterable[ToolOutcome]) -> list[str]:
    """The results in the order of the calls, whichever call ended first."""
    by_id = {outcome.call.id: outcome.text for outcome in ended}
    return [by_id[call.id] for call in calls]
