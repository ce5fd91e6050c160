"""How much may be written to the SSD in a day."""

from __future__ import annotations

import time
from collections.abc import Callable

_DAY_S = 86_400


class WriteBudget:
    """Bytes written today, whoever asks. `limit` None: as much as there is."""

    def __init__(
        self, limit: int | None, day: int = 0, spent: int = 0, *, wall: Callable[[], float] = time.time
    ) -> None:
        self.limit = limit
        self._wall = wall
        self._day = day
        self._spent = spent

    @property
    def spent(self) -> int:
        """Since midnight (UTC)."""
        self._turn_page()
        return self._spent

    def spend(self, count: int) -> None:
        self._turn_page()
        self._spent += count

    def saved(self) -> tuple[int, int]:
        """(day, spent), for the constructor of the next process."""
        return self._day, self._spent

    def _turn_page(self) -> None:
        today = int(self._wall() // _DAY_S)
        if today != self._day:
            self._day, self._spent = today, 0
