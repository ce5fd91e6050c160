"""One time limit for all events of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from emberkeep.backend.base import closable
from emberkeep.errors import DeadlineExceeded
from emberkeep.types import Event


async def with_deadline(events: AsyncIterator[Event], limit_s: float | None) -> AsyncGenerator[Event, None]:
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
        if not timer.expired():  # it is of the code that waits inside
            raise
        raise DeadlineExceeded(
            "The request took longer than it may: ask for less, or raise deadline_s."
        ) from error
