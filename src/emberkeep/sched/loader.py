"""Getting a job into the engine: find what exists, bring it in, say why there is not more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, perf_counter

import numpy as np

from emberkeep.engine.base import Engine, Outcome
from emberkeep.errors import EngineError, StepFailed
from emberkeep.kv.content import Moved
from emberkeep.kv.fetch import FetchState
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, Cursor, Made, Match, TokenArray, place_at
from emberkeep.sched.affinity import Affinity
from emberkeep.sched.cleanup import insist
from emberkeep.sched.cutter import Cutter
from emberkeep.sched.job import Cut, Job
from emberkeep.sched.mover import Mover
from emberkeep.sched.sequence import PATIENCE_S, Load, Phase, Sequence
from emberkeep.sched.slots import HotMatch, Slots
from emberkeep.types import EXACT_BITS, Divergence, MissReason

log = logging.getLogger("emberkeep.sched")

_EXCERPT_TOKENS = 12
_WORTH_WAITING = 16
"""Tokens that a sequence under way must be about to compute for a newcomer to wait for it."""


class Loader:
    """Belongs to the engine's thread. `wake` is called from the store's threads when bytes have arrived."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        slots: Slots,
        affinity: Affinity,
        mover: Mover,
        cutter: Cutter,
        wake: Callable[[], None],
    ) -> None:
        self._mover = mover
        self._cutter = cutter
        self._engine = engine
        self._store = store
        self._slots = slots
        self._affinity = affinity
        self._wake = wake
        self._unit = engine.capabilities.kv_unit

    def worth_waiting_for(self, job: Job) -> HotMatch | None:
        """A sequence that is about to compute more of this prompt than exists anywhere now."""
        if not job.use_cache:
            return None
        wanted = self._cutter.source(job.cut) if job.cut else job.tokens[: job.reusable]
        coming = self._slots.coming_match(job.lineage, wanted)
        if coming.sequence is None:
            return None
        stored = self._store.advance(self._store.origin(job.lineage), wanted)
        now = max(stored.position, self._slots.computed_match(job.lineage, wanted).tokens)
        # The end of a turn is evaluated within a step or two, and whoever continues the turn wants it.
        needed = 1 if coming.sequence.phase is Phase.CLOSING else _WORTH_WAITING
        return coming if coming.tokens >= now + needed else None

    def start(self, job: Job) -> Sequence | None:
        """Give the job a slot and begin loading. None when no slot is free.

        Raises whatever goes wrong, and then nothing of the job is left: neither a pin nor state in the engine.
        """
        cut = self._cutter.useful(job)
        wanted = self._cutter.source(cut) if cut else job.tokens[: job.reusable if job.use_cache else 0]
        hot = self._slots.computed_match(job.lineage, wanted)
        match = self._store.match(job.lineage, wanted, snapshots=self._unit.has_snapshots)
        is_better = match.snapshot and match.snapshot.start > hot.tokens  # and restored as a whole
        if is_better or job.from_store:
            hot = HotMatch(None, 0)
        try:
            sequence = self._occupied(job, hot, cut)
        except Exception:
            self._release(match)
            raise
        if sequence is None:
            self._release(match)
            return None
        sequence.match = match
        try:
            self._begin(sequence, match, _after(hot))
        except Exception:
            self.let_go(sequence)
            self._slots.drop(sequence)
            raise
        return sequence

    def _occupied(self, job: Job, hot: HotMatch, cut: Cut | None) -> Sequence | None:
        """A sequence in a slot that holds the hot prefix; None when no slot is free."""
        self._slots.clear_the_way(avoid=hot.sequence)
        slot = self._place(job, hot)
        if slot is None:
            return None
        with self._or_vacate(slot):
            sequence = Sequence(slot, job, self._store.origin(job.lineage.stored), hot.tokens)
            if hot.sequence is not None:
                _go_on_from(sequence, hot.sequence)
            sequence.borders = job.borders if self._unit.has_snapshots else frozenset()
            sequence.cut = cut
            self._slots.occupy(sequence)
            return sequence

    def _begin(self, sequence: Sequence, match: Match, left_behind: TokenArray) -> None:
        assert sequence.job is not None
        if sequence.cut is not None:
            self._plan_loads(sequence, match)
        elif sequence.job.use_cache:
            sequence.reason = self._miss_reason(sequence, match, left_behind)
            self._plan_loads(sequence, match)
        else:
            sequence.reason = MissReason.DISABLED
            self._finish(sequence)

    def pump(self, sequence: Sequence) -> None:
        """Import what has arrived, in order; ends the loading phase when all is in, has failed or is late."""
        is_late = monotonic() > sequence.patience_ends
        while sequence.loads:
            load = sequence.loads[0]
            if load.fetch.state is FetchState.PENDING and not is_late:
                return
            sequence.loads.popleft()
            if not self._import(sequence, load):
                self._give_up_loading(sequence)
        if self._mover.has_arrived(sequence, is_late=is_late):
            self._finish(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Stop waiting for anything."""
        self._cutter.give_up(sequence)
        if sequence.loads:
            self._give_up_loading(sequence)
        self._mover.let_go(sequence)
        self._finish(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Nothing of the store is held for a sequence any more. Never raises, and asks nothing of the engine."""
        sequence.loads.clear()
        sequence.pieces.clear()
        held: list[Match | Moved] = [*sequence.moved]
        held += [sequence.match] if sequence.match else []
        sequence.match, sequence.moved = None, []
        for one in held:
            self._release(one)

    def _release(self, match: Match | Moved) -> None:
        insist(lambda: self._store.release(match), "releasing stored state")

    def _give_up_loading(self, sequence: Sequence) -> None:
        """What was loaded so far stays, unless it is of no use without the rest."""
        sequence.loads.clear()
        if self._unit.has_snapshots:
            sequence.computed = sequence.hot_tokens = sequence.warm_tokens = sequence.cold_tokens = 0
        # An import that failed has promised to change nothing; where it did, that is gone now.
        self._engine.trim(sequence.slot, sequence.computed)

    def _place(self, job: Job, hot: HotMatch) -> int | None:
        """A slot that holds exactly the hot prefix."""
        prefer = self._affinity.slot_for(job.lineage.stored, job.affinity, job.wanted_slot)
        source = hot.sequence
        if source is None:
            return self._slots.claim(prefer=prefer)
        if not source.is_active and hot.tokens == source.computed:
            return source.slot
        slot = self._slots.claim(avoid=source, prefer=prefer)
        if slot is not None:
            with self._or_vacate(slot):
                self._engine.copy_kv(source.slot, slot, hot.tokens)
        elif not source.is_active:
            slot = source.slot
            with self._or_vacate(slot):
                self._engine.trim(slot, hot.tokens)
        return slot

    @contextmanager
    def _or_vacate(self, slot: int) -> Iterator[None]:
        """What is in a slot when something fails there is not known any more."""
        try:
            yield
        except Exception:
            self._slots.vacate(slot)
            raise

    def _plan_loads(self, sequence: Sequence, match: Match) -> None:
        chunks = self._worth_loading(sequence, match)
        sequence.from_disk = {chunk.key for chunk, _ in chunks if chunk.payload is None}
        for chunk, end in chunks:
            sequence.loads.append(Load(chunk, end, self._store.fetch(chunk, self._wake)))
        if sequence.cut is None:
            self._mover.find(sequence, max([sequence.computed, *(end for _, end in chunks)]))
        sequence.phase = Phase.LOADING
        self.pump(sequence)

    def _worth_loading(self, sequence: Sequence, match: Match) -> list[tuple[Chunk, int]]:
        """Chunks in the order in which they have to be imported, each with the position up to which."""
        useful = tuple(s for s in match.segments if s.end > sequence.computed)
        if match.snapshot and match.snapshot.start > sequence.computed:
            return self._whole(sequence, match, match.snapshot)
        if self._unit.has_snapshots:
            return []
        chosen = useful if _must_load(sequence) else self._store.costs.worth_loading(useful)
        if len(chosen) < len(useful):
            sequence.reason = MissReason.CHEAPER
        return [(segment.chunk, segment.end) for segment in chosen]

    def _whole(self, sequence: Sequence, match: Match, snapshot: Chunk) -> list[tuple[Chunk, int]]:
        """Everything up to a snapshot, or nothing."""
        ranges = [(s.chunk, s.end) for s in match.segments] if self._unit.has_ranges else []
        chunks = [*ranges, (snapshot, snapshot.start)]
        costs = self._store.costs
        if _must_load(sequence) or costs.is_worth_loading([chunk for chunk, _ in chunks], snapshot.start):
            return chunks
        sequence.reason = MissReason.CHEAPER
        return []

    def _import(self, sequence: Sequence, load: Load) -> bool:
        payload = load.chunk.payload
        if load.fetch.state is not FetchState.READY or payload is None:
            is_damaged = load.fetch.state is FetchState.DAMAGED
            sequence.reason = MissReason.CORRUPT if is_damaged else MissReason.GONE
            return False
        begin = perf_counter()
        try:
            while (
                outcome := self._into_engine(sequence, load, payload)
            ) is Outcome.NO_ROOM and self._slots.free_cells():
                pass
        except StepFailed as error:
            log.warning("stored state was not loaded: %s", error)
            return False
        except EngineError:
            self._store.reject(load.chunk)
            sequence.reason = MissReason.CORRUPT
            return False
        if outcome is Outcome.NO_ROOM:
            return False
        self._store.was_imported(len(payload), perf_counter() - begin)
        self._account(sequence, load)
        return True

    def _into_engine(self, sequence: Sequence, load: Load, payload: memoryview) -> Outcome:
        chunk = load.chunk
        if chunk.is_snapshot:
            return self._engine.import_snapshot(sequence.slot, chunk.start, payload)
        return self._engine.import_kv(sequence.slot, sequence.computed, load.end, payload, chunk.start)

    def _account(self, sequence: Sequence, load: Load) -> None:
        assert sequence.job is not None
        chunk = load.chunk
        tokens = load.end - sequence.computed
        is_packed = chunk.lineage.bits != EXACT_BITS
        sequence.holds(load.end, chunk.made.steps & ~Made.REPRODUCIBLE if is_packed else chunk.made.steps)
        sequence.patience_ends = monotonic() + PATIENCE_S
        sequence.holds_packed |= is_packed
        if sequence.cursor.position < load.end:
            if not sequence.lineage.sees(chunk.lineage):
                sequence.rests_on_moved(chunk.start)
            here = Cursor(chunk, load.end - chunk.start, sequence.lineage)
            sequence.cursor = place_at(here, load.end) if chunk.is_snapshot else here
        if chunk.key in sequence.job.read_ahead or chunk.key in sequence.from_disk:
            sequence.cold_tokens += tokens
        else:
            sequence.warm_tokens += tokens

    def _finish(self, sequence: Sequence) -> None:
        if sequence.match is not None:
            self._store.release(sequence.match)
            sequence.match = None
        if sequence.phase is Phase.LOADING:
            if sequence.cut is not None:
                self._cutter.finish(sequence)
            sequence.phase = Phase.EVALUATING
            sequence.load_seconds = monotonic() - sequence.started

    def _miss_reason(self, sequence: Sequence, match: Match, left_behind: TokenArray) -> MissReason:
        """Why not more than the longest of hot and stored state can be reused.

        `left_behind` is what the hot sequence has where the prompt goes on differently.
        """
        job = sequence.job
        assert job is not None
        if match.tokens < sequence.computed:
            return self._diverged(sequence, sequence.computed, left_behind)
        if not self._store.fits_engine:
            return MissReason.OTHER_MODEL
        if gone := self._store.why_gone(match.cursor, job.tokens):
            return gone
        stored = self._store.stored_after(match.cursor)
        if match.tokens == job.reusable or not len(stored):
            return MissReason.NO_SNAPSHOT if self._falls_short(sequence, match) else MissReason.NEW
        return self._diverged(sequence, match.tokens, stored)

    def _diverged(self, sequence: Sequence, reached: int, known: TokenArray) -> MissReason:
        """Note what is known after `reached` tokens, and what the prompt has there."""
        job = sequence.job
        assert job is not None
        if not len(known) or reached >= job.reusable:
            return MissReason.NEW
        sequence.divergence = Divergence(
            token_index=reached,
            stored_text=self._text(known),
            prompt_text=self._text(job.tokens[reached:]),
        )
        return MissReason.DIVERGED

    def _falls_short(self, sequence: Sequence, match: Match) -> bool:
        """The tokens are known, but their state can be resumed only at an earlier place."""
        restored = max(match.snapshot.start if match.snapshot else 0, sequence.computed)
        return self._unit.has_snapshots and restored < match.tokens

    def _text(self, tokens: TokenArray) -> str:
        pieces = self._engine.vocab.pieces
        known = [t for t in tokens[:_EXCERPT_TOKENS].tolist() if t < len(pieces)]
        return b"".join(pieces[t] for t in known).decode("utf-8", "replace")


def _go_on_from(sequence: Sequence, hot: Sequence) -> None:
    """Take over what is known about the state that a sequence begins with."""
    sequence.holds_packed = hot.holds_packed
    sequence.shapes = hot.shapes.until(sequence.computed)
    sequence.is_beside = hot.is_beside
    begins = hot.approximate_from
    if begins is not None and begins < sequence.computed:
        sequence.rests_on_moved(begins)
    known = hot.cursor
    if known.position <= sequence.computed and sequence.lineage.sees(known.chunk.lineage):
        sequence.cursor = replace(known, lineage=sequence.lineage)


def _must_load(sequence: Sequence) -> bool:
    return sequence.job is not None and sequence.job.from_store


def _after(hot: HotMatch) -> TokenArray:
    """What a sequence has after the part that a prompt shares with it."""
    if hot.sequence is None:
        return np.empty(0, np.int32)
    return hot.sequence.tokens[hot.tokens : hot.sequence.computed][:_EXCERPT_TOKENS].copy()
