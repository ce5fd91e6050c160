"""Who is let in: as many requests as can be served at once, and a number of others that wait."""

from __future__ import annotations

import threading

from emberkeep.errors import Overloaded

_RETRY_AFTER_S = 2


class Places:
    """Safe to use from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, choices: int) -> Place:
        """A place for a request with that many choices. Raises Overloaded."""
        with self._lock:
            if self._taken >= self._limit:
                raise Overloaded(
                    f"{self._taken} requests are being served or waiting already: try again in a moment.",
                    retry_after=_RETRY_AFTER_S,
                )
            self._taken += 1
        return Place(self, choices)

    def give_back(self, place: Place) -> None:
        """Twice is harmless: a request may leave while its last choice ends on the engine's thread."""
        with self._lock:
            self._taken -= place.is_taken
            place.is_taken = False


class Place:
    """Free again when every choice is over, however slowly its client reads, or when the request leaves."""

    def __init__(self, places: Places, choices: int) -> None:
        self.is_taken = True
        self._places = places
        self._choices = choices

    def choice_over(self) -> None:
        """Called by one thread at a time."""
        self._choices -= 1
        if self._choices == 0:
            self.leave()

    def leave(self) -> None:
        self._places.give_back(self)
