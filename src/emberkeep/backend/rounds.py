"""Answers in several rounds: the model calls tools that run here, reads what they gave, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast
from uuid import uuid4

from emberkeep.errors import ContextExceeded, DeadlineExceeded
from emberkeep.types import (
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    Json,
    Message,
    Outcome,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

SAME_CALLS = 2
"""How often a call with the same arguments is carried out in one turn."""
_REPEATED = 1000
_BESIDE = 8
"""Calls that run at the same time."""
MOST_CALLS = 64
"""Of one answer; a model that writes more goes round in circles."""


@dataclass(slots=True)
class Round:
    """What one round of generation brought."""

    is_ours: Callable[[str], bool]
    """Whether a tool of that name runs here; others are the client's."""
    text: str = ""
    reasoning: str = ""
    finished: Finished | None = None
    _ours: dict[int, ToolCall] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)
    """Of ours, in the pieces that they came in."""
    _others: set[int] = field(default_factory=set)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that run here; none where the client has to answer another one first, or the answer was cut: then
        nobody knows what the last one would have been."""
        if self._others or self._is_cut:
            return ()
        ours = sorted(self._ours.items())
        return tuple(replace(call, arguments="".join(self._arguments[place])) for place, call in ours)

    @property
    def _is_cut(self) -> bool:
        return self.finished is not None and self.finished.reason is FinishReason.LENGTH

    def seen(self, event: Event) -> Event | None:
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
        """It ended by itself, with nothing."""
        ended = self.finished is not None and self.finished.reason is FinishReason.STOP
        return ended and not (self.text.strip() or self._ours or self._others)

    def end(self) -> Finished | None:
        """As the client is told: calls of ours that are not carried out end the answer where it is."""
        if self.finished and self.calls and self.finished.reason is FinishReason.TOOL_CALLS:
            return replace(self.finished, reason=FinishReason.LENGTH)
        return self.finished


async def heard(
    answer: Callable[[], AsyncIterator[Event]],
    current: Round,
    bills: list[Completed],
    shorten: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[Event, None]:
    """The events of one round that its client gets; the rest of them goes into `current` and `bills`.

    Results that do not fit into the context are made shorter as long as `shorten` can.
    """
    while True:
        try:
            async with aclosing(closable(answer())) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        bills.append(event)
                    elif (passed := current.seen(event)) is not None:
                        yield passed
            return
        except ContextExceeded:
            if not bills or not await shorten():
                raise


async def timed(events: AsyncIterator[Event], limit_s: float | None) -> AsyncGenerator[Event, None]:
    """All of them within that time, whatever it is spent on. Raises DeadlineExceeded."""
    deadline = asyncio.get_running_loop().time() + limit_s if limit_s else None
    async with aclosing(closable(events)) as waiting:
        while (event := await _next(waiting, deadline)) is not None:
            yield event


async def _next(events: AsyncGenerator[Event, None], deadline: float | None) -> Event | None:
    """None at the end."""
    try:
        async with asyncio.timeout_at(deadline) as timer:
            return await anext(events, None)
    except TimeoutError as error:
        if not timer.expired():  # somebody else's
            raise
        raise DeadlineExceeded(
            "The request took longer than it may: ask for less, or raise deadline_s."
        ) from error


def closable(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """A backend's iterator can be closed, although its type does not say so."""
    return cast("AsyncGenerator[Event, None]", events)


def further(asked: Request, bill: Completed, *, may_call: bool) -> Request | None:
    """The next round, with the tokens that are left; None where none are. A client that insists on a call still
    gets one."""
    choice = asked.tool_choice if may_call or asked.tool_choice.mode != "auto" else ToolChoice("none")
    if asked.max_tokens is None:
        return replace(asked, tool_choice=choice)
    left = asked.max_tokens - bill.usage.completion_tokens
    return replace(asked, tool_choice=choice, max_tokens=left) if left > 0 else None


def urged(asked: Request) -> Request:
    """To answer now, with the question repeated for this round only.

    Small models fall silent over results, or call the same tool for ever.
    """
    question = next((message.content for message in reversed(asked.messages) if message.role == "user"), "")
    again = Message("user", f"With these results, answer this in words: {question[-_REPEATED:]}")
    return replace(asked, messages=(*asked.messages, again), tool_choice=ToolChoice("none"))


def together(bills: Sequence[Completed]) -> Completed:
    """The prompt of the last round, the tokens of all."""
    first, last = bills[0], bills[-1]
    return replace(
        last,
        usage=replace(
            last.usage,
            completion_tokens=sum(bill.usage.completion_tokens for bill in bills),
            reasoning_tokens=sum(bill.usage.reasoning_tokens for bill in bills),
        ),
        timings=replace(
            last.timings,
            predicted_n=sum(bill.timings.predicted_n for bill in bills),
            predicted_ms=sum(bill.timings.predicted_ms for bill in bills),
            ttft_ms=first.timings.ttft_ms,
            queue_ms=first.timings.queue_ms,
        ),
        fit=replace(last.fit, evictions=tuple(e for bill in bills for e in bill.fit.evictions)),
    )


def in_order(calls: Sequence[ToolCall], outcomes: Iterable[Outcome]) -> list[Outcome]:
    """As they were called, whatever ended first."""
    by_id = {outcome.call.id: outcome for outcome in outcomes}
    return [by_id[call.id] for call in calls]


class Repeats:
    """The calls of one turn: a model that makes the same one again and again is told so."""

    def __init__(self, messages: Iterable[Message]) -> None:
        """`messages`: what was said before."""
        self._ids = {call.id for message in messages for call in message.tool_calls}
        self._seen: Counter[tuple[str, str]] = Counter()

    def told_apart(self, calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
        """Each with an id of its own, for some servers begin to count anew with every answer; the first of very
        many."""
        return tuple(self._named(call) for call in islice(calls, MOST_CALLS))

    def _named(self, call: ToolCall) -> ToolCall:
        if not call.id or call.id in self._ids:
            call = replace(call, id=f"call_{uuid4().hex[:24]}")
        self._ids.add(call.id)
        return call

    def refusal(self, call: ToolCall) -> str | None:
        """What it is told instead of a result."""
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


async def carried_out(
    calls: Sequence[ToolCall],
    run: Callable[[ToolCall], Awaitable[Outcome]],
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
