"""Context shift: the state of a long prompt becomes that of a shorter one. What left it is spliced out, and what
follows moves up (see `Splice`).

What follows was computed while the rest was still there, so the result is approximate from there on.
"""

from __future__ import annotations

import logging
from time import perf_counter

from emberkeep.chat.prompt import Prompt, Splice
from emberkeep.engine.base import Engine, Outcome
from emberkeep.errors import EngineError
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import Slots
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage

log = logging.getLogger("emberkeep.sched")

_WORTH_SPLICING = 16
"""Tokens behind the splice that must have been computed for it to be better than evaluating them."""


class ContextShift:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore, slots: Slots) -> None:
        self._engine = engine
        self._store = store
        self._slots = slots

    def useful(self, sequence: Sequence) -> Splice | None:
        """The splice of its prompt, if more of the prompt can be had that way than as it is."""
        splice, lineage = sequence.prompt.splice, sequence.prompt.lineage
        if splice is None or not sequence.request.use_cache or not self._can(splice):
            return None
        reached = self._known(lineage, self.source(splice))
        if reached < splice.end + _WORTH_SPLICING:
            return None
        direct = self._known(lineage, sequence.wanted)
        return splice if splice.length(reached) > direct else None

    def source(self, splice: Splice) -> TokenArray:
        """What of the longer prompt's state is of use: the engine cannot hold more."""
        return splice.source[: min(len(splice.source) - 1, self._engine.capabilities.context)]

    def _can(self, splice: Splice) -> bool:
        return self._engine.capabilities.can_shift and splice.saved > 0

    def _known(self, lineage: Lineage, tokens: TokenArray) -> int:
        stored = self._store.advance(self._store.origin(lineage), tokens)
        return max(stored.position, self._slots.computed_match(lineage, tokens).tokens)

    def finish(self, sequence: Sequence) -> None:
        """The longer prompt's state has been loaded, as far as there is any: make it that of the sequence's
        prompt.

        Blocks for one step.
        """
        splice, reached = sequence.splice, sequence.computed
        assert splice is not None
        if reached >= splice.end + _WORTH_SPLICING and self._splice(sequence, splice):
            sequence.splice = None
            sequence.spliced(splice, reached)
            sequence.reuse.only(splice.start, moved=reached - splice.end, behind=len(splice.insert))
        else:
            self.give_up(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Keep only what both prompts begin with."""
        splice = sequence.splice
        if splice is None:
            return
        sequence.splice = None
        if sequence.computed > splice.start:
            self._engine.trim(sequence.slot, splice.start)
        sequence.holds_only(splice.start)
        sequence.reuse.only(sequence.computed)

    def shorten(self, sequence: Sequence, prompt: Prompt) -> None:
        """Let a sequence that is being answered go on with a shorter prompt. What cannot be moved is evaluated
        again. Blocks for one step."""
        splice, reached = prompt.splice, sequence.computed
        assert splice is not None
        if splice.may_shift and self._can(splice) and self._splice(sequence, splice):
            sequence.shorten(prompt)
            sequence.spliced(splice, reached)
            return
        keep = 0 if self._engine.capabilities.kv_unit.has_snapshots else min(splice.start, sequence.computed)
        self._engine.trim(sequence.slot, keep)
        sequence.holds_only(keep)
        sequence.shorten(prompt)

    def _splice(self, sequence: Sequence, splice: Splice) -> bool:
        """False: it was not possible, and the sequence holds what it held before, or nothing."""
        begin = perf_counter()
        try:
            while (
                outcome := self._engine.splice(sequence.slot, splice.start, splice.end, splice.insert)
            ) is Outcome.NO_ROOM and self._slots.free_cells(avoid=sequence):
                pass
        except EngineError as error:
            log.warning("state was not spliced, and is evaluated again: %s", error)
            self._engine.trim(sequence.slot, 0)
            sequence.holds_only(0)
            return False
        sequence.reuse.splice_seconds += perf_counter() - begin
        return outcome is Outcome.DONE
