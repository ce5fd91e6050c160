"""Events on their way from the engine's thread to the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """Many puts from one foreign thread cost one wake-up of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._signalled = False

    def put(self, item: T) -> None:
        """From any thread; never blocks."""
        self._items.append(item)
        if not self._signalled:
            self._signalled = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> T:
        """The next item, in order."""
        while not self._items:
            await self._ready.wait()
            self._ready.clear()
            self._signalled = False
        return self._items.popleft()
