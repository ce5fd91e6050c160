"""What other threads want from the engine's: jobs, and things to be done between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from emberkeep.errors import EmberkeepError, Overloaded
from emberkeep.sched.job import Job

SHUTTING_DOWN = "The server is shutting down: try again in a moment."


@dataclass(frozen=True, slots=True)
class Cancel:
    job: Job


@dataclass(frozen=True, slots=True)
class Call:
    action: Callable[[], None]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class BetweenJobs:
    action: Callable[[], None]
    future: Future[Any]


class Wake:
    """Something has arrived that the loop waits for."""


class Stop:
    pass


Command = Job | Cancel | Call | BetweenJobs | Wake | Stop


class Inbox:
    """`enter`, `put` and `shut` may be called from any thread, `take` only by the engine's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._refusal: Callable[[], EmberkeepError] | None = None
        """What those hear who come when it is shut."""
        self._door = threading.Lock()
        """Held while somebody enters, so that none comes in behind the one who shuts."""

    @property
    def is_shut(self) -> bool:
        return self._refusal is not None

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def enter(self, command: Job | Call | BetweenJobs) -> None:
        """Raises what it was shut with."""
        with self._door:
            if self._refusal is not None:
                raise self._refusal()
            self._commands.put(command)

    def put(self, command: Cancel | Wake | Stop) -> None:
        """For what must come in at any time."""
        self._commands.put(command)

    def shut(self, refusal: Callable[[], EmberkeepError] = lambda: Overloaded(SHUTTING_DOWN)) -> None:
        """`refusal` says why. The first reason counts."""
        with self._door:
            self._refusal = self._refusal or refusal

    def take(self, *, wait: bool = False, seconds: float | None = None) -> Command | None:
        """The next command; None when there is none, after waiting for it if asked to."""
        try:
            return self._commands.get(block=wait, timeout=seconds if wait else None)
        except queue.Empty:
            return None
