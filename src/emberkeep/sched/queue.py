"""Jobs that wait for a place, in order, never more than the limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from emberkeep.errors import Overloaded
from emberkeep.sched.job import Job
from emberkeep.sched.slots import HotMatch


class WaitingLine:
    """`reserve` and `len` may be called from any thread, everything else belongs to the engine's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._reserved = 0
        self._jobs: dict[Job, HotMatch | None] = {}

    def __len__(self) -> int:
        return self._reserved

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def reserve(self) -> None:
        """Claim a place for a job that is about to be added. Raises Overloaded."""
        with self._lock:
            if self._reserved >= self._limit:
                raise Overloaded(
                    f"{self._limit} requests are waiting already: try again in a moment.", retry_after=2
                )
            self._reserved += 1

    def add(self, job: Job) -> None:
        self._jobs[job] = None

    def remove(self, job: Job) -> None:
        """Does nothing for a job that is not waiting."""
        if job in self._jobs:
            del self._jobs[job]
            with self._lock:
                self._reserved -= 1

    def wait_for(self, job: Job, coming: HotMatch) -> None:
        """Let `job` wait until that sequence has computed what they share."""
        self._jobs[job] = coming

    def still_waits(self, job: Job) -> bool:
        coming = self._jobs[job]
        if coming is None or coming.sequence is None:
            return False
        return coming.sequence.is_active and coming.sequence.computed < coming.tokens

    def expired(self, now: float) -> list[Job]:
        return [job for job in self._jobs if job.deadline is not None and now > job.deadline]
