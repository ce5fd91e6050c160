"""A whole answer at once, for whoever does not watch it being written."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from emberkeep.backend.remote.base import Provider
from emberkeep.types import Completed, Event, Request, TextDelta, Usage


@dataclass(frozen=True, slots=True)
class Gathered:
    text: str
    usage: Usage
    first_ms: float
    """Until its first event."""
    ms: float


async def gather(provider: Provider, request: Request) -> Gathered:
    """Raises as `Provider.answer`."""
    begin, first, text, usage = perf_counter(), 0.0, "", Usage()
    async with aclosing(cast("AsyncGenerator[Event, None]", provider.answer(request))) as events:
        async for event in events:
            first = first or perf_counter() - begin
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Completed):
                usage = event.usage
    return Gathered(text, usage, 1e3 * first, 1e3 * (perf_counter() - begin))
