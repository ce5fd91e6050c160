"""Jobs that wait for a slot, in order."""

from __future__ import annotations

from collections.abc import Iterator

from emberkeep.sched.job import Job
from emberkeep.sched.slots import HotMatch


class WaitingLine:
    """`len` may be called from any thread, everything else belongs to the engine's."""

    def __init__(self) -> None:
        self._jobs: dict[Job, HotMatch | None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def add(self, job: Job) -> None:
        self._jobs[job] = None

    def remove(self, job: Job) -> None:
        """Does nothing for a job that is not waiting."""
        self._jobs.pop(job, None)

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
