"""Who is let in: as many requests as can be served at once and a number of others that wait; of one user fewer."""

from __future__ import annotations

import threading
from collections import Counter

from emberkeep.errors import Overloaded, RateLimited

_RETRY_AFTER_S = 2


class Places:
    """Safe to use from any thread. Requests that name no user are those of one user."""

    def __init__(self, limit: int, per_user: int | None = None) -> None:
        self._limit = limit
        self._per_user = per_user
        self._taken = 0
        self._taken_by: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, user: str, choices: int | None = None) -> Place:
        """A place for a request of `user` with that many choices; None: until it leaves.

        Raises RateLimited, Overloaded.
        """
        with self._lock:
            self._check(user)
            self._taken += 1
            self._taken_by[user] += 1
        return Place(self, user, choices)

    def give_back(self, place: Place) -> None:
        """Twice is harmless: a request may leave while its last choice ends on the engine's thread."""
        with self._lock:
            if not place.is_taken:
                return
            place.is_taken = False
            self._taken -= 1
            self._taken_by[place.user] -= 1
            if not self._taken_by[place.user]:
                del self._taken_by[place.user]

    def _check(self, user: str) -> None:
        if self._per_user is not None and self._taken_by[user] >= self._per_user:
            raise RateLimited(
                f"Requests of one user are limited to {self._per_user} at a time: "
                "try again when one of them is done.",
                retry_after=_RETRY_AFTER_S,
            )
        if self._taken >= self._limit:
            raise Overloaded(
                f"{self._taken} requests are being served or waiting already: try again in a moment.",
                retry_after=_RETRY_AFTER_S,
            )


class Place:
    """Free again when every choice is over, however slowly its client reads, or when the request leaves."""

    def __init__(self, places: Places, user: str, choices: int | None) -> None:
        self.user = user
        self.is_taken = True
        self._places = places
        self._choices = choices

    def choice_over(self) -> None:
        """Called by one thread at a time."""
        if self._choices is None:
            return
        self._choices -= 1
        if self._choices == 0:
            self.leave()

    def leave(self) -> None:
        self._places.give_back(self)
