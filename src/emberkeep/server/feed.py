"""The events of one HTTP request, read as they come and taken in batches.

One task per source reads ahead, so that a slow client never slows an engine step down, and whatever has piled
up goes out in one write. It piles up only so far: a client that does not read on in time loses its answer, and the
engine's slot with it. One more task waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import cast

from starlette.types import Receive

from emberkeep.api.errors import Failure, Refused
from emberkeep.server.limits import Limits
from emberkeep.types import Completed, Event, ReasoningDelta, TextDelta, ToolCallDelta

_LIMITS = Limits()
_EVENT_BYTES = 256
"""Of an event and its frame, besides the text."""
_LOGPROB_BYTES = 128


class ClientGone(Exception):
    """Nobody is left to answer."""


class ReadTooSlowly(Refused):
    """What piled up for a client was not read in time."""

    def __init__(self) -> None:
        message = "The answer was not read in time, and was given up: ask again, and read it as it comes."
        super().__init__(Failure(408, "invalid_request_error", message, "read_timeout"))


def closing(source: AsyncIterator[Event]) -> aclosing[AsyncGenerator[Event, None]]:
    """A backend's iterator can be closed, although its type does not say so."""
    return aclosing(cast("AsyncGenerator[Event, None]", source))


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Feed:
    """Starts reading at once; needs a running loop. Close it, also after an error."""

    def __init__(
        self,
        sources: Sequence[AsyncIterator[Event]],
        receive: Receive,
        bills: list[Completed] | None = None,
        limits: Limits = _LIMITS,
    ) -> None:
        """`bills` gets the Completed of every source."""
        self._limits = limits
        self._unsent = 0
        self._taken = asyncio.Event()
        self._bills = [] if bills is None else bills
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._reading = len(sources)
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(source)) for source in sources]
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    @property
    def ended(self) -> bool:
        """Every event was taken, and no error is waiting."""
        return not self._reading and not self._events and self._error is None

    async def take(self) -> list[Event]:
        """Everything that came since the last call; waits for something; empty at the end.

        Raises, after the events that came before, what a source raised, or ClientGone.
        """
        await self._news.wait()
        batch, self._events = self._events, []
        self._unsent = 0
        self._taken.set()
        if self._error is not None and not batch:
            raise self._error
        if self._reading and self._error is None:
            self._news.clear()
        return batch

    async def close(self) -> None:
        """Stops all work for this request and waits until it has stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self, source: AsyncIterator[Event]) -> None:
        async with closing(source):
            try:
                await self._read_to_completed(source)
            except Exception as error:
                self._error = self._error or error
            finally:
                self._reading -= 1
                self._news.set()

    async def _read_to_completed(self, source: AsyncIterator[Event]) -> None:
        async for event in source:
            self._events.append(event)
            self._news.set()
            self._unsent += _size(event)
            if self._unsent > self._limits.unsent_bytes:
                await self._room()
            if type(event) is Completed:
                self._bills.append(event)
                return
        raise RuntimeError("the backend's events ended without Completed")

    async def _room(self) -> None:
        """Waits until what has piled up was taken. Raises ReadTooSlowly."""
        self._taken.clear()
        try:
            async with asyncio.timeout(self._limits.stalled_s):
                await self._taken.wait()
        except TimeoutError:
            raise ReadTooSlowly from None

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._error = ClientGone()
        self._news.set()


def _size(event: Event) -> int:
    """About as much as it takes here and on the wire."""
    match event:
        case TextDelta():
            shown = sum(1 + len(token.top) for token in event.logprobs)
            return _EVENT_BYTES + len(event.text) + _LOGPROB_BYTES * shown
        case ReasoningDelta():
            return _EVENT_BYTES + len(event.text)
        case ToolCallDelta():
            return _EVENT_BYTES + len(event.arguments)
    return _EVENT_BYTES
