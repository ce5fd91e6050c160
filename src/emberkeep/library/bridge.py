"""A bridge from ordinary code to an asyncio world: one event loop in a daemon thread."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from emberkeep.errors import EmberkeepError
from emberkeep.values import dataclass

T = TypeVar("T")

_CLOSED = "This Emberkeep is closed: load a new one."


class Bridge:
    """Every method may be called from any thread but the loop's own, and blocks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run_loop, name="emberkeep-loop", daemon=True)
        self._thread.start()
        # Daemon threads stand still once the interpreter shuts down: a stream that is still open then would wait
        # for ever to be cancelled.
        atexit.register(self.close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. An interrupted wait (Ctrl-C) cancels it."""
        self._check_open(work)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def call(self, read: Callable[[], T]) -> T:
        """The result of `read`, which is called on the loop."""

        async def called() -> T:
            return read()

        return self.run(called())

    def iterate(self, source: Callable[[], AsyncIterator[T]]) -> Generator[T, None, None]:
        """The items of `source()`, which is called on the loop at the first `next`.

        Closing the generator cancels the task that reads the items and waits until it has ended.
        """
        self._check_open()
        pump = _Pump(source, self._loop)
        try:
            # In here: it may have begun before this returns, and Ctrl-C does not wait for that.
            self._loop.call_soon_threadsafe(pump.start)
            while not isinstance(item := pump.items.get(), _Ended):
                yield item
        except BaseException:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(pump.cancel)
                pump.wait()
            raise
        if item.error is not None:
            raise item.error

    def close(self) -> None:
        """Cancel what still runs and stop the loop. Calling it twice is harmless."""
        if not self._loop.is_closed():
            atexit.unregister(self.close)
            self.run(_cancel_others())
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run_loop(self) -> None:
        """A task's SystemExit is for the thread that waits for the task. It leaves the loop as well, which goes
        on: else every thread would wait for ever."""
        while not self._is_closing:
            with suppress(BaseException):
                self._loop.run_forever()

    def _check_open(self, work: Coroutine[Any, Any, Any] | None = None) -> None:
        if self._loop.is_closed():
            if work is not None:
                work.close()
            raise EmberkeepError(_CLOSED)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


class _Pump(Generic[T]):
    """Moves items from an async iterator into a queue. `start`, then `cancel`, run on the loop.

    Where `start` was interrupted before it was asked for, `cancel` comes alone.
    """

    def __init__(self, source: Callable[[], AsyncIterator[T]], loop: asyncio.AbstractEventLoop) -> None:
        self.items: SimpleQueue[T | _Ended] = SimpleQueue()
        self._source = source
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._move())
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.items.put(_Ended(None))

    def wait(self) -> None:
        while not isinstance(self.items.get(), _Ended):
            pass

    async def _move(self) -> None:
        async for item in self._source():
            self.items.put(item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A callback, not a `finally`: a task that is cancelled before its first step runs none of its code.
        self.items.put(_Ended(EmberkeepError(_CLOSED) if task.cancelled() else task.exception()))
