"""The engine's own thread, there before the engine is.

An engine is opened, used and closed by one and the same thread. That is its contract, and it is also faster:
OpenMP keeps a team of workers for every thread that ever called it, and as soon as there are more workers than
cores they sleep at barriers instead of spinning, which makes a decode step of eight sequences 15% longer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

log = logging.getLogger("emberkeep.sched")

T = TypeVar("T")


def promised(action: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
    """A future, and what somebody else has to call to fulfil it."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    return future, run


class EngineThread:
    """Does what it is given, in order. A daemon: a program that forgets to close it can still end."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], T]) -> Future[T]:
        future, run = promised(action)
        self._tasks.put(run)
        return future

    def end(self) -> None:
        """Blocks until everything submitted is done."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException:
                # Its future has failed, if that was possible; those of the next tasks are waited for as well.
                log.exception("the engine's thread could not finish a task")
