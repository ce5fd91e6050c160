"""One deadline for everything that an answer takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from emberkeep.backend.deadline import with_deadline
from emberkeep.errors import DeadlineExceeded
from emberkeep.types.events import Event, TextDelta


async def _slowly(seconds: float) -> AsyncIterator[Event]:
    for word in ("one", "two"):
        await asyncio.sleep(seconds)
        yield TextDelta(0, word)


def test_one_deadline_holds_for_everything_together() -> None:
    async def run() -> list[Event]:
        return [event async for event in with_deadline(_slowly(30.0), 0.02)]

    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())


def test_a_timeout_of_the_events_themselves_is_not_ours() -> None:
    async def failing() -> AsyncIterator[Event]:
        yield TextDelta(0, "one")
        raise TimeoutError("the socket")

    async def run() -> list[Event]:
        return [event async for event in with_deadline(failing(), 60.0)]

    with pytest.raises(TimeoutError, match="the socket"):
        asyncio.run(run())
