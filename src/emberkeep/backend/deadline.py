"""One time limit for all events of an answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from emberkeep.errors import DeadlineExceeded
from emberkeep.types.events import Event, Events


async def with_deadline(events: Events, limit_s: float | None) -> Events:
    """All of them within that time, whatever it is spent on. Raises DeadlineExceeded."""
    deadline = asyncio.get_running_loop().time() + limit_s if limit_s else None
    async with aclosing(events) as waiting:
        while (event := await _next(waiting, deadline)) is not None:
            yield event


async def _next(events: Events, deadline: float | None) -> Event | None:
    """None at the end."""
    try:
        async with asyncio.timeout_at(deadline) as timer:
            return await anext(events, None)
    except TimeoutError as error:
        if not timer.expired():  # it is of the code that waits inside
            raise
        raise DeadlineExceeded(
            "The request took longer than it may: ask for less, or raise deadline_s."
        ) from error
