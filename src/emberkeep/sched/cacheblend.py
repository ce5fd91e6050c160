"""Reuse beyond prefixes (cacheblend): stored state is found at other places, fetched, and blended into a sequence.

From the first piece on the sequence is approximate. What it had before stays exact, and is stored as such.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from emberkeep.engine.base import Blended, Engine, Outcome, Piece, Rows
from emberkeep.errors import EngineError, StepFailed
from emberkeep.kv.content import Moved
from emberkeep.kv.disk.transfers import FetchState
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import Slots
from emberkeep.sched.transit import StoredPiece
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Approximation, Repair

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
        found = self._store.match_elsewhere(sequence.prompt.lineage, sequence.wanted, begin, approximation)
        sequence.arrivals.moved = list(found)  # all of it is pinned, whatever becomes of it
        for moved in found:
            if sequence.request.execution.from_store or self._store.costs.is_worth_loading(
                moved.chunks, moved.end - moved.start
            ):
                sequence.pieces += self._fetched(moved)
            else:
                self._store.release(moved)
                sequence.arrivals.moved.remove(moved)
                sequence.reuse.reason = MissReason.CHEAPER

    def _fetched(self, moved: Moved) -> list[StoredPiece]:
        shift = moved.shift
        return [
            StoredPiece(s.start + shift, s.end + shift, s.chunk, s.start, self._store.fetch(s.chunk, self._wake))
            for s in moved.segments
        ]

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
        end, taken = self._slice(sequence, sequence.approximation, room)
        pieces = [_engine_piece(piece, payload) for piece in taken if (payload := piece.chunk.payload) is not None]
        if len(pieces) < len(taken):  # they were removed meanwhile
            self._keep_only(sequence, lambda piece: piece.chunk.payload is not None)
            return None
        rows = Rows(sequence.slot, sequence.computed, sequence.tokens[sequence.computed : end], 0)
        try:
            blended = self._blend(rows, pieces, _ratio(sequence.approximation))
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
        """Nothing more is moved."""
        sequence.pieces.clear()
        while sequence.arrivals.moved:
            self._store.release(sequence.arrivals.moved[-1])
            sequence.arrivals.moved.pop()

    def _slice(self, sequence: Sequence, approximation: Approximation, room: int) -> tuple[int, list[StoredPiece]]:
        ratio = _ratio(approximation)
        cost = min(ratio + _FIRST_LAYERS, 1.0) if ratio else 0.0
        end = _blend_end(sequence, room, self._engine.capabilities.batch, cost)
        return end, [p.part(p.start, min(p.end, end)) for p in takewhile(lambda p: p.start < end, sequence.pieces)]

    def _blend(self, rows: Rows, pieces: list[Piece], ratio: float) -> Blended:
        while True:
            blended = self._engine.blend(rows, pieces, ratio)
            if blended.outcome is Outcome.DONE or not self._slots.free_cells():
                return blended

    def _refused(self, sequence: Sequence, taken: list[StoredPiece]) -> None:
        """With one piece alone it is clear whose bytes are bad."""
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


def _engine_piece(piece: StoredPiece, payload: memoryview) -> Piece:
    return Piece(piece.start, piece.end, payload, piece.chunk.start, piece.source)
