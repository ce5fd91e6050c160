"""How many requests there may be at a time, and how long one may take."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import aclosing

from emberkeep.errors import DeadlineExceeded, Overloaded, RateLimited
from emberkeep.types.events import Event, Events


async def with_deadline(events: Events, limit_s: float | None) -> Events:
    """All of them within that time, whatever it is spent on. Raises DeadlineExceeded."""
    deadline = asyncio.get_running_loop().time() + limit_s if limit_s else None
    async with aclosing(events) as waiting:
        while (event := await _next(waiting, deadline)) is not None:
            yield event


async def _next(events: Events, deadline: float | None) -> Event | None:
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


_RETRY_AFTER_S = 2


class Permits:
    """Safe to use from any thread. Requests that name no user are those of one user."""

    def __init__(self, limit: int, per_user: int | None = None) -> None:
        self._limit = limit
        self._per_user = per_user
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._lock = threading.Lock()

    def acquire(self, user: str, choices: int | None = None) -> Permit:
        """For a request of `user` with that many choices; None: until it is released.

        Raises RateLimited, Overloaded.
        """
        with self._lock:
            self._check(user)
            self._held += 1
            self._held_by[user] += 1
        return Permit(self, user, choices)

    def give_back(self, permit: Permit) -> None:
        """Twice is harmless: a request may end while its last choice ends on the engine's thread."""
        with self._lock:
            if not permit.is_held:
                return
            permit.is_held = False
            self._held -= 1
            self._held_by[permit.user] -= 1
            if not self._held_by[permit.user]:
                del self._held_by[permit.user]

    def _check(self, user: str) -> None:
        if self._per_user is not None and self._held_by[user] >= self._per_user:
            raise RateLimited(
                f"Requests of one user are limited to {self._per_user} at a time: "
                "try again when one of them is done.",
                retry_after=_RETRY_AFTER_S,
            )
        if self._held >= self._limit:
            raise Overloaded(
                f"{self._held} requests are being served or waiting already: try again in a moment.",
                retry_after=_RETRY_AFTER_S,
            )


class Permit:
    """Released when every choice is over, however slowly its client reads, or when the request ends."""

    def __init__(self, permits: Permits, user: str, choices: int | None) -> None:
        self.user = user
        self.is_held = True
        self._permits = permits
        self._choices = choices

    def choice_over(self) -> None:
        """Called by one thread at a time."""
        if self._choices is None:
            return
        self._choices -= 1
        if self._choices == 0:
            self.release()

    def release(self) -> None:
        self._permits.give_back(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
