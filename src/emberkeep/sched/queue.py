"""Jobs that wait for a slot, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import count

from emberkeep.sched.job import Job
from emberkeep.sched.slots import HotMatch


class WaitingLine:
    """`len` may be called from any thread, everything else belongs to the engine's."""

    def __init__(self) -> None:
        self._jobs: dict[Job, HotMatch | None] = {}
        self._by_user: dict[str, dict[Job, None]] = {}
        """Who has waited longest, since coming or since being served, is first."""
        self._served: set[str] = set()
        """Who had jobs in the engine, or was given one, when it was last asked whose turn it is."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """In order of arrival."""
        return iter(list(self._jobs))

    def in_turn(self, running: Mapping[str, int]) -> Iterator[Job]:
        """Every waiting job; `running` counts the jobs of each user that are in the engine.

        First comes the user with the fewest running, among those the one who has waited longest; the jobs of one
        user come in order of arrival. A job that is removed before the next one is asked for counts as running.
        So a user with nothing running, however many jobs others have here, waits for those that run when it comes,
        and for one more of each who was waiting with nothing running as well.
        """
        self._send_back(self._served)
        self._served = set(running)
        place = count()
        waiting = [(user, iter(list(jobs))) for user, jobs in self._by_user.items()]
        turns = [(running.get(user, 0), next(place), user, jobs) for user, jobs in waiting]
        heapify(turns)
        while turns:
            runs, _, user, jobs = turns[0]
            job = next(jobs, None)
            if job is None:
                heappop(turns)
                continue
            yield job
            if job not in self._jobs:
                self._served.add(user)
                self._send_back({user})
                heapreplace(turns, (runs + 1, next(place), user, jobs))

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self._by_user.setdefault(job.user, {})[job] = None

    def remove(self, job: Job) -> None:
        """Does nothing for a job that is not waiting."""
        if job not in self._jobs:
            return
        del self._jobs[job]
        mine = self._by_user[job.user]
        del mine[job]
        if not mine:
            del self._by_user[job.user]

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

    def _send_back(self, users: set[str]) -> None:
        """They are being served, or were a moment ago: the others have waited longer now."""
        for user in [user for user in self._by_user if user in users]:
            self._by_user[user] = self._by_user.pop(user)
