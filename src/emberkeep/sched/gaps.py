"""What is done while no request is here: work that makes later work quicker, and giving memory back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from emberkeep.errors import EngineError
from emberkeep.sched.parts import SchedulerParts

log = logging.getLogger("emberkeep.sched")

GapWork = Callable[[Callable[[], bool]], bool]
"""Is given a function that says whether something waits; says whether all is done."""

GAP_S, REST_S = 1.0, 40.0
"""After so long without work, what makes later work quicker is done, and memory that is not used is given back."""


class Gaps:
    """Belongs to the engine's thread."""

    def __init__(self, parts: SchedulerParts, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted`: whether something waits now."""
        self._engine, self._slots, self._draft = parts.engine, parts.slots, parts.draft
        self._is_wanted = is_wanted
        self._work: deque[GapWork] = deque([self._improve])
        if self._draft is not None:
            self._work.append(self._draft.improve)
        self._is_resting = False

    @property
    def patience(self) -> float | None:
        """Seconds without work after which there is something to do; None: nothing."""
        return GAP_S if self._work else None if self._is_resting else REST_S

    def add(self, work: GapWork, *, empties: bool) -> None:
        def in_empty_engine(is_wanted: Callable[[], bool]) -> bool:
            self._slots.clear_the_way(None)
            return work(is_wanted)

        self._work.append(in_empty_engine if empties else work)

    def end_rest(self) -> None:
        """Something runs, or was given up: there may be memory to give back later."""
        self._is_resting = False

    def use(self) -> None:
        """Do some of what waits for a gap. What fails is in the log: it only makes later work quicker."""
        if self._work:
            self._do_work()
        elif not self._is_resting:
            self._rest()

    def _rest(self) -> None:
        """Gives memory back. Conversations that would keep the engine from it are given up: the store has them."""
        self._is_resting = True
        kept = self._engine.capabilities.resting_cells
        if kept is not None:
            self._slots.keep_latest(kept)
        try:
            self._engine.rest()
        except (EngineError, MemoryError) as error:
            log.warning("the engine could not give back memory, and forgets what is idle: %s", error)
            for sequence in self._slots.idle:
                self._slots.drop(sequence)
        if self._draft is not None:
            self._draft.rest()

    def _do_work(self) -> None:
        work = self._work.popleft()
        try:
            is_done = work(self._is_wanted)
        except Exception:
            log.exception("work for a gap failed")
            return
        if not is_done:
            self._work.append(work)

    def _improve(self, is_wanted: Callable[[], bool]) -> bool:
        if not self._engine.can_improve:
            return True  # and the next turn finds what it wants where it was
        self._slots.clear_the_way(None)
        return self._engine.improve(is_wanted)
