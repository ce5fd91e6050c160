"""The prefix cache is the only way between sequences in the engine and the store.

acquire     brings the longest prefix that exists (in the engine, in RAM, on disk) into a sequence
commits     stores what a sequence has computed (see `Commits`)
release     lets go of what the store holds for it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from time import monotonic, perf_counter

import numpy as np

from emberkeep.engine.base import Engine, Outcome
from emberkeep.errors import EngineError, StepFailed
from emberkeep.kv.content import Moved
from emberkeep.kv.disk.transfers import FetchState
from emberkeep.kv.lookups import Match
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, Segment
from emberkeep.sched.commits import Commits
from emberkeep.sched.engine_thread import insist
from emberkeep.sched.moved_state import CacheBlend, ContextShift
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Load, Phase, take_together
from emberkeep.sched.slots import HotMatch, Slots
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import Divergence, MissReason

log = logging.getLogger("emberkeep.sched")

_WORTH_WAITING = 16
"""A newcomer waits for a sequence that will compute so many more tokens of its prompt."""
_WORTH_A_SNAPSHOT = 128
"""The same where that sequence has to store a snapshot for the newcomer: that takes the time of some tokens, and
the room of many."""


class PrefixCache:
    """Belongs to the engine's thread. `wake` is called from the store's threads when bytes have arrived."""

    def __init__(self, engine: Engine, store: KvStore, slots: Slots, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._store = store
        self._slots = slots
        self._wake = wake
        self.shift = ContextShift(engine, store, slots)
        self.blend = CacheBlend(engine, store, slots, wake)
        self._misses = Misses(engine, store)
        self._has_ranges = engine.capabilities.kv_unit.has_ranges
        self._has_snapshots = engine.capabilities.kv_unit.has_snapshots
        self.commits = Commits(engine, store)

    # ── acquire ──

    def worth_waiting_for(self, newcomer: Sequence) -> HotMatch | None:
        """A sequence that will compute more of this prompt than exists anywhere now. If it has to store a snapshot
        for that, it gets a border there (`end_slice_at`)."""
        if not newcomer.request.use_cache:
            return None
        splice, lineage, prefix = newcomer.prompt.splice, newcomer.prompt.lineage, newcomer.lookup_tokens
        if splice and not self._has_snapshots:
            prefix = self.shift.source(splice)
        coming = self._slots.coming_match(lineage, prefix)
        if coming.sequence is None:
            return None
        if self._has_snapshots:
            stored, needed = self._store.resumable(lineage, prefix), _WORTH_A_SNAPSHOT
        else:
            stored = self._store.advance(self._store.origin(lineage), prefix).position
            # The end of a turn is evaluated within a step or two, and the request that continues it wants it.
            needed = 1 if coming.sequence.phase is Phase.CLOSING else _WORTH_WAITING
        least = max(stored, self._slots.computed_match(lineage, prefix).tokens) + needed
        if coming.tokens < least:
            return None
        if not self._has_snapshots:
            return coming
        if not self.commits.keeps(coming.sequence):
            return None
        return HotMatch(coming.sequence, coming.sequence.end_slice_at(coming.tokens, least))

    def acquire(self, sequence: Sequence) -> bool:
        """Give it a slot, with the state that is in the engine, and begin to load what is stored. False: no slot
        is free.

        Raises whatever goes wrong, and then nothing of it is left: neither a pin nor state in the engine.
        """
        splice = self.shift.useful(sequence) if sequence.prompt.splice else None
        prefix = self.shift.source(splice) if splice else sequence.lookup_tokens
        hot = self._slots.computed_match(sequence.prompt.lineage, prefix)
        match = self._store.match(sequence.prompt.lineage, prefix, snapshots=self._has_snapshots)
        is_better = match.snapshot and match.snapshot.start > hot.tokens  # and restored as a whole
        if is_better or sequence.request.execution.from_store:
            hot = HotMatch(None, 0)
        hot = self._in_whole_chunks(sequence, hot, match)
        try:
            has_slot = self._occupy(sequence, hot)
        except Exception:
            self._release(match)
            raise
        if not has_slot:
            self._release(match)
            return False
        sequence.splice, sequence.arrivals.match = splice, match
        try:
            self._begin(sequence, match, left_behind(hot))
        except Exception:
            self.release(sequence)
            self._slots.drop(sequence)
            raise
        return True

    def pump(self, sequence: Sequence) -> None:
        """Import what has arrived, in order; ends the loading phase when all is in, has failed or is late."""
        arrivals = sequence.arrivals
        is_late = monotonic() > arrivals.patience_ends
        while arrivals.loads:
            if arrivals.loads[0].fetch.state is FetchState.PENDING and not is_late:
                return
            loads = take_together(arrivals.loads)
            if self._import(sequence, loads):
                continue
            # One by one it is clear which of several cannot be imported.
            if len(loads) == 1 or not all(self._import(sequence, [load]) for load in loads):
                self._give_up_loading(sequence)
        if not sequence.pieces or self.blend.has_arrived(sequence, is_late=is_late):
            self._finish(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Stop waiting for anything."""
        self.shift.give_up(sequence)
        if sequence.arrivals.loads:
            self._give_up_loading(sequence)
        self.blend.release(sequence)
        self._finish(sequence)

    def release(self, sequence: Sequence) -> None:
        """Unpin all stored state of a sequence, and drop what it is saving. Never raises, and asks nothing of the
        engine."""
        sequence.saving = None
        sequence.pieces.clear()
        for pinned in sequence.arrivals.take_pins():
            self._release(pinned)

    def _release(self, match: Match | Moved) -> None:
        insist(lambda: self._store.release(match), "releasing stored state")

    def _occupy(self, sequence: Sequence, hot: HotMatch) -> bool:
        """Put it into a slot with the hot prefix; False: none is free."""
        self._slots.clear_the_way(avoid=hot.sequence)
        slot = self._slot_with(sequence, hot)
        if slot is None:
            return False
        with self._or_vacate(slot):
            origin = self._store.origin(sequence.lineage)
            sequence.occupy(slot, origin, hot.sequence, hot.tokens)
            self._slots.occupy(sequence)
        return True

    def _in_whole_chunks(self, sequence: Sequence, hot: HotMatch, match: Match) -> HotMatch:
        """What to keep of `hot`: it ends where the first chunk to load begins, if that is in RAM.

        Loading half a chunk would leave a gap behind, so that cells lie elsewhere than at the first time.
        """
        segments = () if self._has_snapshots else self._segments_to_load(sequence, match, hot.tokens)
        first = next(iter(segments), None)
        if first is None or first.chunk.payload is None or first.chunk.start >= hot.tokens:
            return hot
        return HotMatch(hot.sequence if first.chunk.start else None, first.chunk.start)

    def _segments_to_load(self, sequence: Sequence, match: Match, computed: int) -> tuple[Segment, ...]:
        """What is worth loading behind the first `computed` tokens."""
        useful = tuple(s for s in match.segments if s.end > computed)
        return useful if sequence.request.execution.from_store else self._store.costs.worth_loading(useful)

    def _slot_with(self, sequence: Sequence, hot: HotMatch) -> int | None:
        """A slot that holds exactly the hot prefix."""
        prefer = self._slots.preferred_slot(sequence)
        source = hot.sequence
        if source is None:
            return self._slots.claim(prefer=prefer)
        if source.is_active or (hot.tokens < source.computed and not self._engine.capabilities.sees_all):
            slot = self._slots.claim(avoid=source, prefer=prefer)
            if slot is not None:
                with self._or_vacate(slot):
                    self._engine.copy_kv(source.slot, slot, hot.tokens)
            if slot is not None or source.is_active:
                return slot
        # The rest of it is stored. Beside it, new cells would lie elsewhere than at the first time, and an engine
        # adds up in the order of cells: the same prompt would round differently.
        if hot.tokens < source.computed:
            with self._or_vacate(source.slot):
                self._engine.trim(source.slot, hot.tokens)
        return source.slot

    @contextmanager
    def _or_vacate(self, slot: int) -> Iterator[None]:
        """Empty the slot if something fails there: what it holds is unknown."""
        try:
            yield
        except Exception:
            self._slots.vacate(slot)
            raise

    def _begin(self, sequence: Sequence, match: Match, hot_rest: TokenArray) -> None:
        if sequence.splice is not None:
            self._load(sequence, match)
        elif sequence.request.use_cache:
            sequence.reuse.reason = self._misses.reason(sequence, match, hot_rest)
            self._load(sequence, match)
        else:
            sequence.reuse.reason = MissReason.DISABLED
            self._finish(sequence)

    def _load(self, sequence: Sequence, match: Match) -> None:
        chunks = self._chunks_to_load(sequence, match)
        from_disk = frozenset(chunk.key for chunk, _ in chunks if chunk.payload is None)
        loads = [Load(chunk, end, self._store.fetch(chunk, self._wake)) for chunk, end in chunks]
        sequence.wait_for(loads, from_disk)
        if sequence.splice is None and sequence.approximation is not None:
            self.blend.find(sequence, max([sequence.computed, *(end for _, end in chunks)]))
        self.pump(sequence)

    def _chunks_to_load(self, sequence: Sequence, match: Match) -> list[tuple[Chunk, int]]:
        """Chunks in order of import, each with the position up to which it is used."""
        if match.snapshot and match.snapshot.start > sequence.computed:
            return self._chunks_to_snapshot(sequence, match, match.snapshot)
        if self._has_snapshots:
            return []
        chosen = self._segments_to_load(sequence, match, sequence.computed)
        reached = chosen[-1].end if chosen else sequence.computed
        if any(segment.end > reached for segment in match.segments):
            sequence.reuse.reason = MissReason.CHEAPER
        return [(segment.chunk, segment.end) for segment in chosen]

    def _chunks_to_snapshot(self, sequence: Sequence, match: Match, snapshot: Chunk) -> list[tuple[Chunk, int]]:
        """Everything up to a snapshot, or nothing."""
        ranges = [(s.chunk, s.end) for s in match.segments] if self._has_ranges else []
        chunks = [*ranges, (snapshot, snapshot.start)]
        must_load = sequence.request.execution.from_store
        if must_load or self._store.costs.is_worth_loading([chunk for chunk, _ in chunks], snapshot.start):
            return chunks
        sequence.reuse.reason = MissReason.CHEAPER
        return []

    def _import(self, sequence: Sequence, loads: Items[Load]) -> bool:
        """Import a chunk, or several in a row; False: failed."""
        first, last = loads[0], loads[-1]
        payloads = [load.chunk.payload for load in loads if load.chunk.payload is not None]
        if first.fetch.state is not FetchState.READY or len(payloads) < len(loads):
            is_damaged = first.fetch.state is FetchState.DAMAGED
            sequence.reuse.reason = MissReason.CORRUPT if is_damaged else MissReason.GONE
            return False
        slot, start, computed = sequence.slot, first.chunk.start, sequence.computed

        def into_engine() -> Outcome:
            if first.chunk.is_snapshot:
                return self._engine.import_snapshot(slot, start, payloads[0])
            return self._engine.import_kv(slot, computed, last.end, payloads, start)

        begin = perf_counter()
        try:
            outcome = self._slots.with_room(into_engine)
        except StepFailed as error:
            log.warning("stored state was not loaded: %s", error)
            return False
        except EngineError:
            if len(loads) == 1:
                self._store.reject(first.chunk)
                sequence.reuse.reason = MissReason.CORRUPT
            return False
        if outcome is Outcome.NO_ROOM:
            return False
        size, seconds = sum(map(len, payloads)), perf_counter() - begin
        self._store.was_imported(size, seconds)
        log.debug("warm -> hot: up to token %d, %d bytes in %.1f ms", last.end, size, 1e3 * seconds)
        for load in loads:
            sequence.loaded(load)
        return True

    def _give_up_loading(self, sequence: Sequence) -> None:
        """What was loaded so far stays, unless it is of no use without the rest."""
        sequence.arrivals.loads.clear()
        if self._has_snapshots:
            sequence.computed = 0
            sequence.reuse.spans.clear()
        # An import that failed has promised to change nothing; where it did, that is gone now.
        self._engine.trim(sequence.slot, sequence.computed)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.arrivals.match is not None:
            self._store.release(sequence.arrivals.match)
            sequence.arrivals.match = None
        if sequence.phase is Phase.LOADING and sequence.splice is not None:
            self.shift.finish(sequence)
        sequence.stop_loading()


_EXCERPT_TOKENS = 12


class Misses:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._store = store
        self._pieces = engine.vocab.pieces
        self._whole_only = engine.capabilities.kv_unit.has_snapshots

    def reason(self, sequence: Sequence, match: Match, left_behind: TokenArray) -> MissReason:
        """Why not more than the longest of hot and stored state can be reused.

        `left_behind` is what the hot sequence has where the prompt goes on differently.
        """
        prompt = sequence.prompt
        if match.tokens < sequence.computed:
            return self._diverged(sequence, sequence.computed, left_behind)
        if not self._store.fits_engine:
            return MissReason.OTHER_MODEL
        if gone := self._store.why_gone(match.cursor, prompt.tokens):
            return gone
        stored = self._store.stored_after(match.cursor)
        if match.tokens == prompt.reusable or not len(stored):
            # The tokens may be stored, and their last snapshot lie further back.
            restored = max(match.snapshot.start if match.snapshot else 0, sequence.computed)
            falls_short = self._whole_only and restored < match.tokens
            return MissReason.NO_SNAPSHOT if falls_short else MissReason.NEW
        return self._diverged(sequence, match.tokens, stored)

    def _diverged(self, sequence: Sequence, reached: int, known: TokenArray) -> MissReason:
        """Note what is known after `reached` tokens, and what the prompt has there."""
        prompt = sequence.prompt
        if not len(known) or reached >= prompt.reusable:
            return MissReason.NEW
        stored_text, prompt_text = self._excerpt(known), self._excerpt(prompt.tokens[reached:])
        sequence.reuse.divergence = Divergence(reached, stored_text, prompt_text)
        return MissReason.DIVERGED

    def _excerpt(self, tokens: TokenArray) -> str:
        known = [t for t in tokens[:_EXCERPT_TOKENS].tolist() if t < len(self._pieces)]
        return b"".join(self._pieces[t] for t in known).decode("utf-8", "replace")


def left_behind(hot: HotMatch) -> TokenArray:
    if hot.sequence is None:
        return np.empty(0, np.int32)
    return hot.sequence.tokens[hot.tokens : hot.sequence.computed][:_EXCERPT_TOKENS].copy()
