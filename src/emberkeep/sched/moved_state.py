"""State of other places: stored pieces are blended into a sequence (cacheblend), and the state of a long prompt
becomes that of a shorter one (context shift: what left it is spliced out, and what follows moves up).

What follows moved state was computed while something else stood before it, so a sequence is approximate from there
on. What it had before stays exact, and is stored as such.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from emberkeep.chat.prompt import Prompt, Splice
from emberkeep.engine.base import Blended, Engine, Outcome, Piece, Rows
from emberkeep.errors import EngineError, StepFailed
from emberkeep.kv.disk.transfers import FetchState
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import StoredPiece
from emberkeep.sched.slots import Slots
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Approximation, Lineage, Repair

log = logging.getLogger("emberkeep.sched")

_FIRST_LAYERS = 0.15
"""About the share of a moved token's evaluation that goes into finding out how much it differs."""


class CacheBlend:
    """Belongs to the engine's thread. `wake` is called from the store's threads when bytes have arrived."""

    def __init__(self, engine: Engine, store: KvStore, slots: Slots, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._store = store
        self._slots = slots
        self._wake = wake

    def find(self, sequence: Sequence, begin: int) -> None:
        """Look for the prompt's tokens from `begin` on at other places, and begin to fetch what is there."""
        approximation = sequence.approximation
        if approximation is None or not self._engine.capabilities.can_blend:
            return
        found = self._store.match_elsewhere(sequence.prompt.lineage, sequence.lookup_tokens, begin, approximation)
        sequence.arrivals.moved = list(found)  # all of it is pinned, whatever becomes of it
        for moved in found:
            if sequence.request.execution.from_store or self._store.costs.is_worth_loading(
                moved.chunks, moved.end - moved.start
            ):
                for each in moved.segments:
                    start, end = each.start + moved.shift, each.end + moved.shift
                    fetch = self._store.fetch(each.chunk, self._wake)
                    sequence.pieces.append(StoredPiece(start, end, each.chunk, each.start, fetch))
            else:
                self._store.release(moved)
                sequence.arrivals.moved.remove(moved)
                sequence.reuse.reason = MissReason.CHEAPER

    def has_arrived(self, sequence: Sequence, *, is_late: bool) -> bool:
        """False while something is on its way. What cannot be loaded, or is late, is evaluated."""
        states = {piece.fetch.state for piece in sequence.pieces}
        if FetchState.PENDING in states and not is_late:
            return False
        if states - {FetchState.READY}:
            # What is gone may have gone because what comes before it was found damaged.
            is_damaged = FetchState.DAMAGED in states or sequence.reuse.reason is MissReason.CORRUPT
            sequence.reuse.reason = MissReason.CORRUPT if is_damaged else MissReason.GONE
            self._keep_only(sequence, lambda piece: piece.fetch.state is FetchState.READY)
        return True

    def run(self, sequence: Sequence, room: int) -> Blended | None:
        """Extend a sequence by one slice with pieces in it. Blocks for one step.

        None where the engine refused it: it is tried again with fewer pieces, in the end with none. Raises
        EngineError when there is no room, or the step failed for other reasons.
        """
        assert sequence.approximation is not None
        ratio = _ratio(sequence.approximation)
        cost = min(ratio + _FIRST_LAYERS, 1.0) if ratio else 0.0
        end = _blend_end(sequence, room, self._engine.capabilities.batch, cost)
        taken = [piece.part(piece.start, min(piece.end, end)) for piece in sequence.pieces if piece.start < end]
        pieces = [
            Piece(piece.start, piece.end, payload, piece.chunk.start, piece.source)
            for piece in taken
            if (payload := piece.chunk.payload) is not None
        ]
        if len(pieces) < len(taken):  # they were removed meanwhile
            self._keep_only(sequence, lambda piece: piece.chunk.payload is not None)
            return None
        rows = Rows(sequence.slot, sequence.computed, sequence.tokens[sequence.computed : end], 0)
        try:
            while (
                blended := self._engine.blend(rows, pieces, ratio)
            ).outcome is Outcome.NO_ROOM and self._slots.drop_one():
                pass
        except StepFailed:
            raise
        except EngineError:
            # It has promised to change nothing; where it did, that is gone now.
            self._engine.trim(sequence.slot, sequence.computed)
            self._refused(sequence, taken)
            return None
        if blended.outcome is Outcome.NO_ROOM:
            raise EngineError("The context memory is full: try again with fewer requests.")
        sequence.blended(end, blended.repaired)
        if not sequence.pieces:
            self.release(sequence)
        return blended

    def release(self, sequence: Sequence) -> None:
        sequence.pieces.clear()
        while sequence.arrivals.moved:
            self._store.release(sequence.arrivals.moved[-1])
            sequence.arrivals.moved.pop()

    def _refused(self, sequence: Sequence, taken: list[StoredPiece]) -> None:
        if len(taken) > 1:
            sequence.arrivals.one_by_one = True
            return
        bad = taken[0].chunk
        self._store.reject(bad)
        sequence.reuse.reason = MissReason.CORRUPT
        self._keep_only(sequence, lambda piece: piece.chunk is not bad)

    def _keep_only(self, sequence: Sequence, wanted: Callable[[StoredPiece], bool]) -> None:
        kept = [piece for piece in sequence.pieces if wanted(piece)]
        sequence.pieces.clear()
        sequence.pieces += kept
        if not kept:
            self.release(sequence)


def _blend_end(sequence: Sequence, room: int, rows: int, cost: float) -> int:
    """Where a slice of at most `rows` tokens ends that costs no more than evaluating `room` of them.

    A moved token costs `cost` of an evaluated one.
    """
    end, rows = sequence.computed, min(rows, sequence.largest_slice or rows)
    limit = min(end + rows, sequence.pieces[0].end if sequence.arrivals.one_by_one else sequence.reusable)
    left = float(room)
    for piece in sequence.pieces:
        left -= piece.start - end
        affordable = max(int(left / cost), 0) if cost else rows
        if left < 0 or affordable < piece.end - piece.start:
            return min(piece.start + (int(left) if left < 0 else affordable), limit)
        left -= cost * (piece.end - piece.start)
        end = piece.end
    return min(end + int(left), limit)


def _ratio(approximation: Approximation) -> float:
    return approximation.ratio if approximation.repair is Repair.CACHEBLEND else 0.0


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
        direct = self._known(lineage, sequence.lookup_tokens)
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
            outcome = self._slots.with_room(
                lambda: self._engine.splice(sequence.slot, splice.start, splice.end, splice.insert), avoid=sequence
            )
        except EngineError as error:
            log.warning("state was not spliced, and is evaluated again: %s", error)
            self._engine.trim(sequence.slot, 0)
            sequence.holds_only(0)
            return False
        sequence.reuse.splice_seconds += perf_counter() - begin
        return outcome is Outcome.DONE
