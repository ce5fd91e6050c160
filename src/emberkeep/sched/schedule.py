"""Who runs next: which waiting sequence gets a slot, and which tokens the next step evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import count

from emberkeep.engine.base import Rows
from emberkeep.kv.policy import Rate
from emberkeep.sched.sequence import FAIR_SLICE, Phase, Sequence
from emberkeep.sched.slots import HotMatch

_STEP_S = 2.5
"""About the longest step while only prompts are evaluated: newcomers and cancellations wait for its end."""
_STEP_BESIDE_DECODES_S = 0.25
"""The same while answers are being written: each of them gets one token per step."""
_SMALLEST_SLICE = FAIR_SLICE
_SMALLEST_SLICE_BESIDE_DECODES = 32


class Planner:
    """`speed` is prompt tokens per second, measured as steps are run."""

    def __init__(self, batch: int, largest_slice: int, speed: Rate) -> None:
        self._batch = batch
        self._largest_slice = largest_slice
        self._speed = speed

    def plan(self, active: list[Sequence]) -> list[tuple[Sequence, Rows]]:
        """One row for every sequence that decodes; prompts share the rest of the step, those apart that blend.

        The shortest goes first, which makes waits shortest on the whole; a quarter is kept for the oldest, so
        that no prompt waits for ever. One that has to go alone does.
        """
        runnable = [s for s in active if s.is_runnable and not s.is_blending]
        runnable = [s for s in runnable if s.is_apart][:1] or runnable
        decoding = [s for s in runnable if not s.in_prompt and s.phase is Phase.EVALUATING]
        filling = [s for s in runnable if s.in_prompt or s.phase is Phase.CLOSING]
        room = min(self._slice(beside_decodes=bool(decoding)), self._batch - len(decoding))
        plan = [(s, *s.next_slice(1)) for s in decoding]
        oldest = min(filling, key=lambda s: s.started, default=None)
        kept = room // 4 if len(filling) > 1 else 0
        for sequence in sorted(filling, key=lambda s: s.pending):
            if sequence is oldest:
                kept = 0
            tokens, wants = sequence.next_slice(room - kept)
            room -= len(tokens)
            plan.append((sequence, tokens, wants))
        return [(s, Rows(s.slot, s.computed, tokens, wants)) for s, tokens, wants in plan if len(tokens)]

    def blend_room(self, active: list[Sequence]) -> int:
        """How many prompt tokens a step may cost that blends one sequence."""
        decoding = any(s.is_runnable and not s.in_prompt for s in active)
        return self._slice(beside_decodes=decoding)

    def measure(self, tokens: int, seconds: float) -> None:
        """A step took that long. Steps that hardly evaluate prompts say nothing about their speed."""
        if tokens >= _SMALLEST_SLICE_BESIDE_DECODES:
            self._speed.measure(tokens, seconds)

    def _slice(self, *, beside_decodes: bool) -> int:
        """Prompt tokens for the next step."""
        seconds, least = _STEP_S, _SMALLEST_SLICE
        if beside_decodes:
            seconds, least = _STEP_BESIDE_DECODES_S, _SMALLEST_SLICE_BESIDE_DECODES
        fitting = int(self._speed.value * seconds) // least * least if self._speed.value else least
        return min(max(fitting, least), self._largest_slice)


class WaitingQueue:
    """`len` may be called from any thread, everything else belongs to the engine's."""

    def __init__(self) -> None:
        self._sequences: dict[Sequence, HotMatch | None] = {}
        self._by_user: dict[str, dict[Sequence, None]] = {}
        """Who has waited longest, since coming or since being served, is first."""
        self._served: set[str] = set()
        """Who had sequences in the engine, or was given one, when it was last asked whose turn it is."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival."""
        return iter(list(self._sequences))

    def in_turn(self, running: Mapping[str, int]) -> Iterator[Sequence]:
        """Every waiting sequence; `running` counts the sequences of each user that are in the engine.

        First comes the user with the fewest running, among those the one who has waited longest; the sequences of
        one user come in order of arrival. A sequence that is removed before the next one is asked for counts as
        running. So a user with nothing running, however many sequences others have here, waits for those that run
        when it comes, and for one more of each who was waiting with nothing running as well.
        """
        self._send_back(self._served)
        self._served = set(running)
        place = count()
        waiting = [(user, iter(list(sequences))) for user, sequences in self._by_user.items()]
        turns = [(running.get(user, 0), next(place), user, sequences) for user, sequences in waiting]
        heapify(turns)
        while turns:
            runs, _, user, sequences = turns[0]
            sequence = next(sequences, None)
            if sequence is None:
                heappop(turns)
                continue
            yield sequence
            if sequence not in self._sequences:
                self._served.add(user)
                self._send_back({user})
                heapreplace(turns, (runs + 1, next(place), user, sequences))

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence] = None
        self._by_user.setdefault(sequence.request.user, {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Does nothing for a sequence that is not waiting."""
        if sequence not in self._sequences:
            return
        del self._sequences[sequence]
        mine = self._by_user[sequence.request.user]
        del mine[sequence]
        if not mine:
            del self._by_user[sequence.request.user]

    def wait_for(self, sequence: Sequence, coming: HotMatch) -> None:
        """Let `sequence` wait until that sequence has computed what they share."""
        self._sequences[sequence] = coming

    def still_waits(self, sequence: Sequence) -> bool:
        coming = self._sequences[sequence]
        if coming is None or coming.sequence is None:
            return False
        return coming.sequence.is_active and coming.sequence.computed < coming.tokens

    def expired(self, now: float) -> list[Sequence]:
        return [
            sequence for sequence in self._sequences if sequence.deadline is not None and now > sequence.deadline
        ]

    def _send_back(self, users: set[str]) -> None:
        """They are being served, or were a moment ago: the others have waited longer now."""
        for user in [user for user in self._by_user if user in users]:
            self._by_user[user] = self._by_user.pop(user)
