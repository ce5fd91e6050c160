"""Events on their way from the engine's thread to the tasks that read them.

They are handed over once per step, all together, just before the engine computes and lets go of the
interpreter: the readers then work while it computes, and neither waits for the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox:
    """The channels that have something new. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._fresh: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
        self._fresh.setdefault(loop, []).append(ready)

    def flush(self) -> None:
        """Wake every reader: one wake-up per event loop. Cheap when there is nothing new."""
        while self._fresh:
            loop, events = next(iter(self._fresh.items()))
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(_set_all, events)
            del self._fresh[loop]  # not before: should that fail, it is tried again


class Channel(Generic[T]):
    """Made by the task that reads it; written to by the engine's thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()

    def put(self, item: T, *, wake: bool = True) -> None:
        """The reader hears of it at the next flush, or with the next item that wakes it."""
        self._items.append(item)
        if wake:
            self._outbox.add(self._loop, self._ready)

    async def take(self) -> T:
        """The next item, in order."""
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
