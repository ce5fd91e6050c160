"""The events of one HTTP request, read as they come and taken in batches.

One task per source reads ahead, so that a slow client never slows an engine step down, and whatever has piled
up goes out in one write. One more task waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import cast

from starlette.types import Receive

from emberkeep.types import Completed, Event


class ClientGone(Exception):
    """Nobody is left to answer."""


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
        self, sources: Sequence[AsyncIterator[Event]], receive: Receive, bills: list[Completed] | None = None
    ) -> None:
        """`bills` gets the Completed of every source."""
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
            if type(event) is Completed:
                self._bills.append(event)
                return
        raise RuntimeError("the backend's events ended without Completed")

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._error = ClientGone()
        self._news.set()
