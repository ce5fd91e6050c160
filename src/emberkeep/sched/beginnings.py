"""How sequences begin: whose turn it is, what is worth waiting for, and when stored state is in the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from emberkeep.sched.endings import Endings
from emberkeep.sched.output import EndReason
from emberkeep.sched.parts import SchedulerParts
from emberkeep.sched.sequence import Phase, Sequence


class Beginnings:
    """Belongs to the engine's thread."""

    def __init__(
        self, parts: SchedulerParts, endings: Endings, report_progress: Callable[[Sequence], None]
    ) -> None:
        self._parts = parts
        self._engine, self._slots, self._cache = parts.engine, parts.slots, parts.cache
        self._waiting = parts.waiting
        self._endings, self._only = endings, endings.only
        self._report_progress = report_progress

    def admit(self) -> None:
        """Start waiting sequences in turn, passing over those for which waiting saves work."""
        if not len(self._waiting):
            return
        for sequence in self._waiting.in_turn(self._running_by_user()):
            busy = self._slots.active
            taken = sum(s.cells for s in busy)
            if (
                len(busy) >= self._parts.settings.parallel
                or taken + sequence.cells > self._engine.capabilities.cells
            ):
                return
            if self._lacks_memory(sequence, busy):
                return
            if self._waiting.still_waits(sequence):
                continue
            try:
                has_slot = self._start(sequence, alone=all(s.output is None for s in busy))
            except Exception as error:
                self._endings.refuse(sequence, error)
                continue
            if not has_slot:
                return

    def _start(self, sequence: Sequence, *, alone: bool) -> bool:
        """Bring a sequence into the engine, unless waiting saves work; False when there is no slot for it.

        Raises whatever goes wrong, and then nothing of it is in the engine.
        """
        if coming := self._cache.worth_waiting_for(sequence):
            self._waiting.wait_for(sequence, coming)
            return True
        self._commit_before_fork(sequence)
        if not self._cache.acquire(sequence):
            return False
        self._waiting.remove(sequence)
        self.note_forks(self._waiting)
        with self._only(sequence):
            self._parts.watch.started(sequence, alone=alone)
            self._report_progress(sequence)
            self._end_if_all_is_there(sequence)
        return True

    def note_forks(self, waiting: Iterable[Sequence]) -> None:
        """Where state is stored only as a whole, it has to be known before it is computed where others part from
        it, also while there is no slot for them."""
        if not self._engine.capabilities.kv_unit.has_snapshots:
            return
        for sequence in waiting:
            try:
                if coming := self._cache.worth_waiting_for(sequence):
                    self._waiting.wait_for(sequence, coming)
            except Exception as error:
                self._endings.refuse(sequence, error)

    def _lacks_memory(self, sequence: Sequence, busy: list[Sequence]) -> bool:
        if self._parts.settings.memory is None or not busy:
            return False  # alone it fits: that is what admission looked at
        return sum(s.memory for s in busy) + sequence.memory > self._parts.settings.memory

    def _running_by_user(self) -> Counter[str]:
        return Counter(s.request.user for s in self._slots.active if s.output is not None)

    def _commit_before_fork(self, newcomer: Sequence) -> None:
        hot = self._slots.computed_match(newcomer.prompt.lineage, newcomer.wanted)
        if hot.sequence and hot.sequence.is_active:
            with self._only(hot.sequence):
                self._cache.commit_fork(hot.sequence, hot.tokens)

    def pump_loads(self) -> None:
        """Take into the engine what has arrived of stored state."""
        for sequence in self._slots.active:
            if sequence.phase is Phase.LOADING:
                with self._only(sequence):
                    self._cache.pump(sequence)
                    self._end_if_all_is_there(sequence)

    def _end_if_all_is_there(self, sequence: Sequence) -> None:
        """A prefix that is only to be ready may need no step at all."""
        if sequence.phase is Phase.EVALUATING and not sequence.pending:
            self._endings.end(sequence, EndReason.LENGTH)
