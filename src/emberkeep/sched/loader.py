"""Getting a job into the engine: find what exists, bring it in, say why there is not more."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter

from emberkeep.engine.base import Engine, Outcome
from emberkeep.errors import EngineError
from emberkeep.kv.fetch import FetchState
from emberkeep.kv.keys import TokenArray
from emberkeep.kv.store import KvStore, Match
from emberkeep.kv.tree import Cursor, Segment
from emberkeep.sched.job import Job
from emberkeep.sched.sequence import Phase, Sequence
from emberkeep.sched.slots import HotMatch, Slots
from emberkeep.types import Divergence, MissReason

_EXCERPT_TOKENS = 12
_WORTH_WAITING = 16
"""Tokens that a sequence under way must be about to compute for a newcomer to wait for it."""


class Loader:
    """Belongs to the engine's thread. `wake` is called from the store's threads when bytes have arrived."""

    def __init__(self, engine: Engine, store: KvStore, slots: Slots, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._store = store
        self._slots = slots
        self._wake = wake

    def worth_waiting_for(self, job: Job) -> HotMatch | None:
        """A sequence that is about to compute more of this prompt than exists anywhere now."""
        if not job.use_cache:
            return None
        wanted = job.tokens[: job.reusable]
        coming = self._slots.coming_match(job.namespace, wanted)
        if coming.sequence is None:
            return None
        stored = self._store.advance(self._store.origin(job.namespace), wanted)
        now = max(stored.position, self._slots.computed_match(job.namespace, wanted).tokens)
        # The end of a turn is evaluated within a step or two, and whoever continues the turn wants it.
        needed = 1 if coming.sequence.phase is Phase.CLOSING else _WORTH_WAITING
        return coming if coming.tokens >= now + needed else None

    def start(self, job: Job) -> Sequence | None:
        """Give the job a slot and begin loading. None when no slot is free."""
        wanted = job.tokens[: job.reusable if job.use_cache else 0]
        hot = self._slots.computed_match(job.namespace, wanted)
        self._slots.clear_the_way(avoid=hot.sequence)
        slot = self._place(hot)
        if slot is None:
            return None
        origin = self._store.origin(job.namespace)
        known = hot.sequence.cursor if hot.sequence and hot.sequence.cursor.position <= hot.tokens else origin
        sequence = Sequence(slot, job, known, hot.tokens)
        self._slots.occupy(sequence)
        if job.use_cache:
            self._plan_loads(sequence, self._store.match(job.namespace, wanted))
        else:
            sequence.reason = MissReason.DISABLED
        return sequence

    def pump(self, sequence: Sequence) -> None:
        """Import what has arrived, in order; ends the loading phase when all is in or something failed."""
        while sequence.loads:
            segment, fetch = sequence.loads[0]
            if fetch.state is FetchState.PENDING:
                return
            sequence.loads.popleft()
            if not self._import(sequence, segment, fetch.state):
                sequence.loads.clear()
        self._finish(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Stop waiting for anything."""
        sequence.loads.clear()
        self._finish(sequence)

    def _place(self, hot: HotMatch) -> int | None:
        """A slot that holds exactly the hot prefix."""
        source = hot.sequence
        if source is None:
            return self._slots.claim()
        if not source.is_active and hot.tokens == source.computed:
            return source.slot
        slot = self._slots.claim(avoid=source)
        if slot is not None:
            self._engine.copy_kv(source.slot, slot, hot.tokens)
        elif not source.is_active:
            self._engine.trim(source.slot, hot.tokens)
            slot = source.slot
        return slot

    def _plan_loads(self, sequence: Sequence, match: Match) -> None:
        sequence.match = match
        sequence.reason = self._miss_reason(sequence, match)
        useful = tuple(s for s in match.segments if s.end > sequence.computed)
        chosen = self._store.costs.worth_loading(useful)
        if len(chosen) < len(useful):
            sequence.reason = MissReason.CHEAPER
        sequence.from_disk = {segment for segment in chosen if segment.chunk.payload is None}
        for segment in chosen:
            sequence.loads.append((segment, self._store.fetch(segment.chunk, self._wake)))
        sequence.phase = Phase.LOADING
        self.pump(sequence)

    def _import(self, sequence: Sequence, segment: Segment, state: FetchState) -> bool:
        payload = segment.chunk.payload
        if state is not FetchState.READY or payload is None:
            sequence.reason = MissReason.CORRUPT if state is FetchState.DAMAGED else MissReason.GONE
            return False
        start, begin = sequence.computed, perf_counter()
        try:
            while (
                outcome := self._engine.import_kv(sequence.slot, start, segment.end, payload, segment.chunk.start)
            ) is Outcome.NO_ROOM and self._slots.free_cells():
                pass
        except EngineError:
            self._store.reject(segment.chunk)
            sequence.reason = MissReason.CORRUPT
            return False
        if outcome is Outcome.NO_ROOM:
            return False
        self._store.costs.import_.measure(len(payload), perf_counter() - begin)
        self._account(sequence, segment, segment.end - start)
        return True

    def _account(self, sequence: Sequence, segment: Segment, tokens: int) -> None:
        assert sequence.job is not None
        sequence.computed = segment.end
        if sequence.cursor.position < segment.end:
            sequence.cursor = Cursor(segment.chunk, segment.end - segment.chunk.start)
        if segment.chunk.key in sequence.job.read_ahead or segment in sequence.from_disk:
            sequence.cold_tokens += tokens
        else:
            sequence.warm_tokens += tokens

    def _finish(self, sequence: Sequence) -> None:
        if sequence.match is not None:
            self._store.release(sequence.match)
            sequence.match = None
        if sequence.phase is Phase.LOADING:
            sequence.phase = Phase.EVALUATING
            sequence.load_seconds = monotonic() - sequence.started

    def _miss_reason(self, sequence: Sequence, match: Match) -> MissReason:
        """Why not more than the longest of hot and stored state can be reused."""
        reached = max(match.tokens, sequence.computed)
        if match.tokens < reached:
            return MissReason.NEW
        stored = self._store.stored_after(match.cursor)
        if not len(stored):
            return MissReason.NEW
        assert sequence.job is not None
        sequence.divergence = Divergence(
            token_index=reached,
            stored_text=self._text(stored),
            prompt_text=self._text(sequence.job.tokens[reached:]),
        )
        return MissReason.DIVERGED

    def _text(self, tokens: TokenArray) -> str:
        pieces = self._engine.vocab.pieces
        known = [t for t in tokens[:_EXCERPT_TOKENS].tolist() if t < len(pieces)]
        return b"".join(pieces[t] for t in known).decode("utf-8", "replace")
