"""The engine's own thread, there before the engine is, and how others talk to it: through an inbox.

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

from emberkeep.errors import EmberkeepError, Overloaded
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

T = TypeVar("T")


def promised(action: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
    """A future, and what another thread has to call to fulfil it."""
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


# ── the inbox ──

SHUTTING_DOWN = "The server is shutting down: try again in a moment."


@dataclass(frozen=True, slots=True)
class EngineCall:
    run: Callable[[], object]
    give_up: Callable[[], object] = lambda: None
    """Called instead where everything ends before its turn."""


class Inbox:
    """`enter`, `put` and `shut` may be called from any thread, `take` only by the engine's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[EngineCall] = queue.SimpleQueue()
        self._refusal: Callable[[], EmberkeepError] | None = None
        """The error for commands that come when it is shut."""
        self._door = threading.Lock()
        """Held while a command enters, so that none comes in after it was shut."""

    @property
    def is_shut(self) -> bool:
        return self._refusal is not None

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def enter(self, command: EngineCall) -> None:
        """Raises what it was shut with."""
        with self._door:
            if self._refusal is not None:
                raise self._refusal()
            self._commands.put(command)

    def put(self, command: EngineCall) -> None:
        """For what must come in at any time."""
        self._commands.put(command)

    def shut(self, refusal: Callable[[], EmberkeepError] = lambda: Overloaded(SHUTTING_DOWN)) -> None:
        """`refusal` says why. The first reason counts."""
        with self._door:
            self._refusal = self._refusal or refusal

    def take(self, *, wait: bool = False, seconds: float | None = None) -> EngineCall | None:
        """The next command; None when there is none, after waiting for it if asked to."""
        try:
            return self._commands.get(block=wait, timeout=seconds if wait else None)
        except queue.Empty:
            return None


def insist(action: Callable[[], object], what: str) -> bool:
    """Try twice. Never raises: what goes wrong is in the log. False: it went wrong both times."""
    for _ in range(2):
        try:
            action()
            return True
        except BaseException:
            log.exception("%s failed", what)
    return False
