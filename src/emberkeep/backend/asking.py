"""Answers for which the model may search its memory first. The client sees the answer, not the search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from emberkeep.session.asking import SEARCH
from emberkeep.session.sessions import Sessions
from emberkeep.types import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Recall,
    Request,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

_ROUNDS = 4
"""Searches before one answer; then it has to be given."""

Answer = Callable[[Request], AsyncIterator[Event]]


@dataclass(slots=True)
class _Round:
    """What one round of generation brought."""

    text: str = ""
    searches: dict[int, ToolCall] = field(default_factory=dict)
    """By their place among the calls."""
    others: set[int] = field(default_factory=set)
    ended: list[Event] = field(default_factory=list)
    """What is passed on only when nothing follows."""

    @property
    def is_search(self) -> bool:
        return bool(self.searches) and not self.others


class Asking:
    """Belongs to the event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def applies(self, request: Request) -> bool:
        """It is a chat with one answer that may call tools, and has no tool of that name already."""
        is_free = request.n == 1 and request.format is None and request.tool_choice.mode != "none"
        is_chat = request.prompt is None and not request.is_prefix
        is_new = all(tool.name != SEARCH.name for tool in request.tools)
        return is_free and is_chat and is_new and self._sessions.recall_of(request) is Recall.TOOL

    async def run(self, request: Request, answer: Answer) -> AsyncIterator[Event]:
        """`answer` with the tool, again and again until it is not called."""
        asked = replace(request, tools=(*request.tools, SEARCH))
        bills: list[Completed] = []
        for left in reversed(range(_ROUNDS)):
            current = _Round()
            async for event in answer(asked):
                if isinstance(event, Completed):
                    bills.append(event)
                elif (passed := _seen(current, event)) is not None:
                    yield passed
            if not current.is_search or not left:
                break
            calls = tuple(current.searches.values())
            await asyncio.to_thread(self._sessions.searched, asked, current.text, calls)
            asked = replace(asked, tool_choice=ToolChoice() if left > 1 else ToolChoice("none"))
        for event in current.ended:
            yield _as_told(event, current)
        yield _together(bills)


def _seen(current: _Round, event: Event) -> Event | None:
    """What the client gets of an event now."""
    match event:
        case ToolCallDelta(call_index=place, name=name):
            if name == SEARCH.name:
                current.searches[place] = ToolCall(event.id or "", SEARCH.name, event.arguments)
                return None
            if place in current.searches:
                call = current.searches[place]
                current.searches[place] = replace(call, arguments=call.arguments + event.arguments)
                return None
            current.others.add(place)
            return replace(event, call_index=len([i for i in current.others if i < place]))
        case Finished():
            current.ended.append(event)
            return None
        case TextDelta(text=text):
            current.text += text
    return event


def _as_told(event: Event, current: _Round) -> Event:
    """A last search that is not carried out is no reason for the client to expect calls."""
    if isinstance(event, Finished) and current.is_search and event.reason is FinishReason.TOOL_CALLS:
        return replace(event, reason=FinishReason.STOP)
    return event


def _together(bills: list[Completed]) -> Completed:
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
