"""The events of an answer, and what is in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from emberkeep.types.events import CallEnded, Completed, Event, Finished, TextDelta, ToolCallDelta
from emberkeep.types.request import Request, ToolCall


def read_events(backend: Any, request: Request) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in backend.generate(request)]

    return asyncio.run(read())


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def calls_of(events: Iterable[Event]) -> list[ToolCall]:
    found: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            found[event.call_index] = event.added_to(found.get(event.call_index))
    assert list(found) == list(range(len(found)))
    return list(found.values())


def outcomes_of(events: Iterable[Event]) -> list[tuple[str, bool]]:
    """What each tool said, and whether that was a failure."""
    return [(event.outcome.text, event.outcome.failed) for event in events if isinstance(event, CallEnded)]


def end_of(events: list[Event]) -> tuple[Finished, Completed]:
    finished, completed = events[-2:]
    assert isinstance(finished, Finished) and isinstance(completed, Completed)
    return finished, completed
