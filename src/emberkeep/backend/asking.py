"""Answers for which the model may search its memory first. The client sees the answer, not the search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
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

_GAP = "\n\n"
"""Between what was said before a search and what is said after it."""

Answer = Callable[[Request], AsyncGenerator[Event, None]]


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
        return not request.is_prefix and self.equipped(request) is not request

    def equipped(self, request: Request) -> Request:
        """With the tool, where it is a chat with one answer that may call tools, and has none of that name.

        What is warmed for such chats has it too.
        """
        choice = request.tool_choice.mode
        may_call = choice == "auto" or (choice != "none" and bool(request.tools))
        is_free = request.n == 1 and request.format is None and may_call
        is_chat = request.is_prefix or any(message.role == "user" for message in request.messages)
        is_new = request.prompt is None and all(tool.name != SEARCH.name for tool in request.tools)
        is_wanted = is_free and is_chat and is_new and self._sessions.recall_of(request) is Recall.TOOL
        return replace(request, tools=(*request.tools, SEARCH)) if is_wanted else request

    async def run(self, request: Request, answer: Answer) -> AsyncIterator[Event]:
        """`answer` with the tool, again and again until it is not called."""
        asked = self.equipped(request)
        bills: list[Completed] = []
        for left in reversed(range(_ROUNDS)):
            current = _Round()
            async with aclosing(answer(asked)) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        bills.append(event)
                    elif (passed := _seen(current, event)) is not None:
                        yield passed
            further = _further(asked, bills[-1], may_search=left > 1)
            if not current.is_search or not left or further is None:
                break
            if current.text:
                current.text += _GAP
                yield TextDelta(0, _GAP)
            calls = tuple(current.searches.values())
            await asyncio.to_thread(self._sessions.searched, asked, current.text, calls)
            asked = further
        for event in current.ended:
            yield _as_told(event, current)
        yield _together(bills)


def _further(asked: Request, bill: Completed, *, may_search: bool) -> Request | None:
    """The next round, with the tokens that are left; None where none are. A client that insists on a call still
    gets one."""
    choice = asked.tool_choice if may_search or asked.tool_choice.mode != "auto" else ToolChoice("none")
    if asked.max_tokens is None:
        return replace(asked, tool_choice=choice)
    left = asked.max_tokens - bill.usage.completion_tokens
    return replace(asked, tool_choice=choice, max_tokens=left) if left > 0 else None


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
    """A last search that is not carried out is no call for the client: its answer had to end there."""
    if isinstance(event, Finished) and current.is_search and event.reason is FinishReason.TOOL_CALLS:
        return replace(event, reason=FinishReason.LENGTH)
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
