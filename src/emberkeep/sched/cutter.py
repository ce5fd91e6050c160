"""State of a long prompt becomes that of a shorter one: what left it is cut out, and what follows moves up.

    the longer    [ 0 ......... start ][ leaves ][ end .......... reached ]
    the shorter   [ 0 ......... start ][ insert ][ ..... computed ]

What follows was computed while the rest was still there, so the result is approximate from `start` on.
"""

from __future__ import annotations

import logging
from time import perf_counter

from emberkeep.engine.base import Engine, Outcome
from emberkeep.errors import EngineError
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import TokenArray
from emberkeep.sched.job import Cut, Job
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import Slots
from emberkeep.types import Lineage

log = logging.getLogger("emberkeep.sched")

_WORTH_CUTTING = 16
"""Tokens behind the cut that must have been computed for it to be better than evaluating them."""


class Cutter:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore, slots: Slots) -> None:
        self._engine = engine
        self._store = store
        self._slots = slots

    def useful(self, job: Job) -> Cut | None:
        """The job's cut, if more of its prompt can be had that way than as it is."""
        cut = job.cut
        if cut is None or not job.use_cache or not self._can(cut):
            return None
        reached = self._known(job.lineage, self.source(cut))
        if reached < cut.end + _WORTH_CUTTING:
            return None
        direct = self._known(job.lineage, job.tokens[: job.reusable])
        return cut if cut.length(reached) > direct else None

    def source(self, cut: Cut) -> TokenArray:
        """What of the longer prompt's state is of use: the engine cannot hold more."""
        return cut.source[: min(len(cut.source) - 1, self._engine.capabilities.context)]

    def _can(self, cut: Cut) -> bool:
        return self._engine.capabilities.can_shift and cut.saved > 0

    def _known(self, lineage: Lineage, tokens: TokenArray) -> int:
        stored = self._store.advance(self._store.origin(lineage), tokens)
        return max(stored.position, self._slots.computed_match(lineage, tokens).tokens)

    def finish(self, sequence: Sequence) -> None:
        """The longer prompt's state has been loaded, as far as there is any: make it that of the job's prompt.

        Blocks for one step.
        """
        cut, reached = sequence.cut, sequence.computed
        assert cut is not None
        if reached >= cut.end + _WORTH_CUTTING and self._splice(sequence, cut):
            sequence.cut = None
            sequence.was_cut(cut, reached)
            sequence.reused_only(cut.start, moved=reached - cut.end)
        else:
            self.give_up(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Keep only what both prompts begin with."""
        cut = sequence.cut
        if cut is None:
            return
        sequence.cut = None
        if sequence.computed > cut.start:
            self._engine.trim(sequence.slot, cut.start)
        sequence.holds_only(cut.start)
        sequence.reused_only(sequence.computed)

    def shorten(self, sequence: Sequence, cut: Cut) -> None:
        """Cut a sequence that is being answered. What cannot be moved is evaluated again. Blocks for one step."""
        reached = sequence.computed
        if cut.lineage is not None and self._can(cut) and self._splice(sequence, cut):
            sequence.becomes(cut)
            sequence.was_cut(cut, reached)
            return
        keep = 0 if self._engine.capabilities.kv_unit.has_snapshots else min(cut.start, sequence.computed)
        self._engine.trim(sequence.slot, keep)
        sequence.computed = keep
        sequence.becomes(cut)
        sequence.holds_only(keep)

    def _splice(self, sequence: Sequence, cut: Cut) -> bool:
        """False: it was not possible, and the sequence holds what it held before, or nothing."""
        begin = perf_counter()
        try:
            while (
                outcome := self._engine.splice(sequence.slot, cut.start, cut.end, cut.insert)
            ) is Outcome.NO_ROOM and self._slots.free_cells(avoid=sequence):
                pass
        except EngineError as error:
            log.warning("state was not cut, and is evaluated again: %s", error)
            self._engine.trim(sequence.slot, 0)
            sequence.computed = 0
            return False
        sequence.cut_seconds += perf_counter() - begin
        return outcome is Outcome.DONE
