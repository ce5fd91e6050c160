"""The store's own time: seconds that only go forward, also over restarts.

While a store is open it follows the monotonic clock, so a machine's clock that jumps changes nothing. The time
between two openings is what the wall clock says it was, and never less than nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """What the clock said when it was last written down, and the wall clock beside it."""

    seconds: float
    wall: float


class StoreClock:
    def __init__(
        self,
        saved: Saved | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        before = saved or Saved(0.0, wall())
        self._offset = before.seconds + max(wall() - before.wall, 0.0) - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()

    def saved(self) -> Saved:
        return Saved(self.now(), self._wall())
