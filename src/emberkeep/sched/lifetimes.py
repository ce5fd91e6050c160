"""How sequences begin (in turn, unless it is worth waiting) and end (answered, cancelled, too late, failed).

Whatever goes wrong for one sequence, of whatever kind, ends that sequence: `only` stands around everything that is
done for one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from types import TracebackType

from emberkeep.engine.base import Engine
from emberkeep.errors import DeadlineExceeded, EmberkeepError, EngineError, StepFailed
from emberkeep.kv.store import KvStore
from emberkeep.sched.admission import Calibration
from emberkeep.sched.commits import SAVED_AT_ONCE, WORTH_A_CHUNK
from emberkeep.sched.counters import SchedulerCounters
from emberkeep.sched.draft_model import DraftModel, LoadedDraft
from emberkeep.sched.engine_thread import insist
from emberkeep.sched.prefix_cache import PrefixCache
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Ending, EndReason, Phase, SequenceOutput
from emberkeep.sched.slots import HotMatch, Slots, Timeline, WaitingQueue
from emberkeep.sched.speculation import Speculation
from emberkeep.sched.stored_text import RecentAnswers
from emberkeep.types.events import Timings
from emberkeep.types.models import RequestState
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_WARM_AFTER = 2
"""Turns of its conversation after which a branch that was left alone leaves the engine."""
_BEGUN = -1
"""Its last slice is on its way into the store."""
_RECENT = 64
"""Answers that are remembered, at most: the store has the others."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    parallel: int
    """Sequences in the engine at once."""
    prefill_slice: int
    """Prompt tokens per step while nothing else runs."""
    tracked: int = 16
    """Conversations whose slot is remembered."""
    drain_s: float = 0.0
    """How long running sequences may take to finish when it is closed."""
    draft_max: int = 0
    """Most drafted tokens of a sequence in one step; 0: nothing is drafted."""
    memory: int | None = None
    """Bytes that sequences in the engine may come to need together; None: as many as they like."""


class SchedulerParts:
    """Everything belongs to the engine's thread, unless its own class says otherwise."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        settings: SchedulerSettings,
        draft: LoadedDraft | None,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from the store's threads when bytes have arrived."""
        self.engine = engine
        self.store = store
        self.settings = settings
        self.waiting = WaitingQueue()
        self.slots = Slots(engine, settings.tracked)
        self.cache = PrefixCache(engine, store, self.slots, wake)
        self.draft = DraftModel(draft, settings.tracked, settings.prefill_slice, wake) if draft else None
        self.speculation = Speculation(engine, store.corpus, settings.draft_max, self.draft)
        self.calibration = Calibration(engine, self._bytes_of_others)
        self.counters = SchedulerCounters()
        self.recent = RecentAnswers(min(4 * settings.parallel, _RECENT), engine.vocab)
        self.timeline = Timeline()

    def _bytes_of_others(self) -> int:
        """On a CPU the engine's memory is the process's, and the store's payloads are in it too."""
        footprint = self.engine.footprint
        return self.store.held_bytes()[0] if footprint and footprint.device == "cpu" else 0


class Beginnings:
    """Belongs to the engine's thread."""

    def __init__(self, parts: SchedulerParts, endings: Endings) -> None:
        self._parts = parts
        self._slots, self._cache, self._waiting = parts.slots, parts.cache, parts.waiting
        self._commits = parts.cache.commits
        self._endings, self._only = endings, endings.only

    def admit(self) -> None:
        """Start waiting sequences in turn, passing over those for which waiting saves work."""
        if not len(self._waiting) or self._is_full(self._slots.active):
            return  # looking at every user who waits would take as long as a step
        running = Counter(s.request.user for s in self._slots.active if s.output is not None)
        for sequence in self._waiting.in_turn(running):
            busy = self._slots.active
            if not self._has_room(sequence, busy):
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
        hot = self._slots.computed_match(sequence.prompt.lineage, sequence.lookup_tokens)
        if hot.sequence and (sequence.request.execution.from_store or not self._endings.may_wait(hot)):
            self._endings.finish_now(hot.sequence)
            if hot.sequence.is_active:
                with self._only(hot.sequence):
                    self._commits.commit_fork(hot.sequence, hot.tokens)
        if not self._cache.acquire(sequence):
            return False
        self._waiting.remove(sequence)
        self.note_forks(self._waiting)
        with self._only(sequence):
            self._parts.calibration.started(sequence, alone=alone)
            sequence.report_progress()
            self._end_if_all_is_there(sequence)
        return True

    def note_forks(self, waiting: Iterable[Sequence]) -> None:
        """Where state is stored only as a whole, it has to be known before it is computed where others part from
        it, also while there is no slot for them."""
        if not self._parts.engine.capabilities.kv_unit.has_snapshots:
            return
        for sequence in waiting:
            try:
                if coming := self._cache.worth_waiting_for(sequence):
                    self._waiting.wait_for(sequence, coming)
            except Exception as error:
                self._endings.refuse(sequence, error)

    def _is_full(self, busy: list[Sequence]) -> bool:
        """As many are computed as may be: turns that are only to be stored are not."""
        return len(busy) - self._endings.closed >= self._parts.settings.parallel

    def _has_room(self, sequence: Sequence, busy: list[Sequence]) -> bool:
        settings, cells = self._parts.settings, self._parts.engine.capabilities.cells
        if self._is_full(busy) or sum(s.cells for s in busy) + sequence.cells > cells:
            return False
        if settings.memory is None or not busy:
            return True  # alone it fits: that is what admission looked at
        return sum(s.memory for s in busy) + sequence.memory <= settings.memory

    def pump_loads(self) -> None:
        for sequence in self._slots.active:
            if sequence.phase is Phase.LOADING:
                with self._only(sequence):
                    self._cache.pump(sequence)
                    self._end_if_all_is_there(sequence)

    def _end_if_all_is_there(self, sequence: Sequence) -> None:
        """A prefix that is only to be ready may need no step at all."""
        if sequence.phase is Phase.EVALUATING and not sequence.pending:
            self._endings.end(sequence, EndReason.LENGTH)


class Only:
    """Whatever goes wrong in here ends this sequence and nothing else. A class: it is entered for every token, and
    a generator takes 2.4 times as long."""

    __slots__ = ("_fail", "_sequence")

    def __init__(self, fail: Callable[[Sequence, Exception], None], sequence: Sequence) -> None:
        self._fail = fail
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fail(self._sequence, error)
        return True


class Endings:
    """Belongs to the engine's thread."""

    def __init__(self, parts: SchedulerParts) -> None:
        self.slot_freed = False
        """Something ended since waiting sequences were last looked at."""
        self.only = partial(Only, self.fail)
        self._parts, self._engine = parts, parts.engine
        self._cache, self._slots, self._draft = parts.cache, parts.slots, parts.draft
        self._commits = parts.cache.commits
        self._waiting, self._timeline, self._counters = parts.waiting, parts.timeline, parts.counters
        self._closed: dict[Sequence, int] = {}
        """Answered and evaluated, and still to be stored; in how many slices at most."""

    # ── answered ──

    def end(self, sequence: Sequence, reason: EndReason) -> None:
        """Answer first; then the turn's closing tokens are evaluated off the critical path."""
        assert sequence.output is not None
        self._counters.count(sequence)
        saved_s = 0.0  # nobody has waited for what was only to be ready
        if not sequence.request.execution.is_prefix:
            spared = self._parts.store.costs.evaluate.seconds(sequence.reuse.in_place + sequence.reuse.moved)
            saved_s = max(spared - sequence.reuse.load_seconds, 0.0)
        self._counters.saved_s += saved_s
        if sequence.is_kept:
            answer = (sequence.prompt_length, sequence.answer_end)
            self._parts.recent.add(sequence.lineage, sequence.tokens[:], answer)
        sequence.output.ended(_ending(sequence, reason, saved_s))
        self._timeline.ended(sequence, RequestState.FINISHED)
        is_whole = reason is not EndReason.STOPPED and sequence.max_new
        sequence.close(sequence.prompt.closing if is_whole else ())
        self._parts.calibration.ended(sequence)
        self.finish_if_closed(sequence)

    def finish_if_closed(self, sequence: Sequence) -> None:
        """Where a device computes, turns are stored when their readers are woken, beside the next steps: copying a
        long one from there takes a while, and many may end at once."""
        if sequence.pending:
            return
        if self._engine.draws or self._engine.capabilities.runs_ahead:
            self._closed[sequence] = sequence.unsaved // SAVED_AT_ONCE
        else:
            self._finish(sequence)

    @property
    def closed(self) -> int:
        """How many turns are over and still to be stored."""
        return len(self._closed)

    def is_over(self, sequence: Sequence) -> bool:
        """It only has to be stored."""
        return sequence in self._closed

    def may_wait(self, hot: HotMatch) -> bool:
        """It only has to be stored, and that may come after what goes on from its end, or from near it."""
        return hot.sequence in self._closed and hot.sequence.computed - hot.tokens < WORTH_A_CHUNK

    def finish_closed(self, until: float, *, waits: bool) -> None:
        """Store turns that are over, until then on the monotonic clock. Those whose state is being copied are
        left for later, unless it `waits`."""
        if not self._engine.draws:
            self._finish_in_slices(until)
            return
        closed, self._closed = list(self._closed), {}
        for sequence in closed:
            # One goes on, however little time there is.
            if sequence.is_active and (sequence is closed[0] or monotonic() < until):
                with self.only(sequence):
                    self._commits.begin_turn(sequence)
        for sequence in closed:
            has_time = sequence is closed[0] or monotonic() < until
            if has_time and (waits or self._commits.is_copied(sequence)):
                self._finish_active(sequence)
            else:
                self._closed[sequence] = 0

    def _finish_in_slices(self, until: float) -> None:
        """Copies block, and those of a long turn as long as some steps take: whoever comes waits for one slice."""
        while self._closed:
            sequence, slices = next(iter(self._closed.items()))
            if slices == _BEGUN or not sequence.is_active:
                self.finish_now(sequence)
                continue
            if not slices:
                del self._closed[sequence]  # others begin meanwhile, as threads go on with what was copied
            self._closed[sequence] = slices - 1 if slices else _BEGUN
            with self.only(sequence):
                (self._commits.commit if slices else self._commits.begin_turn)(sequence)
            if monotonic() >= until:
                return

    def finish_now(self, sequence: Sequence) -> None:
        """If it only has to be stored, that is done."""
        if self._closed.pop(sequence, None) is not None:
            self._finish_active(sequence)

    def _finish_active(self, sequence: Sequence) -> None:
        """Unless it has failed since it was over: its slot may be another's."""
        if sequence.is_active:
            with self.only(sequence):
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        entry = self._commits.commit_turn(sequence)
        self._parts.speculation.turn_ended(sequence)
        if entry is not None:
            self._slots.demote(entry.id, entry.turns - _WARM_AFTER)
        if self._draft is not None:
            self._draft.ended(sequence)
        sequence.become_idle(entry)
        if not sequence.computed or not sequence.is_kept:
            self._slots.drop(sequence)
        self.slot_freed = True

    # ── given up ──

    def cancel(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if sequence.output is None:
            return
        self._timeline.ended(sequence, RequestState.CANCELLED)
        if sequence.phase is Phase.WAITING:
            sequence.output = None
            return
        self._counters.cancelled += 1
        self._counters.count(sequence)
        self._abandon(sequence)

    def expire(self) -> None:
        now = monotonic()
        late = DeadlineExceeded("The request ran out of its time: allow more, or ask for fewer tokens.")
        for sequence in self._waiting.expired(now):
            self._timeline.ended(sequence, RequestState.FAILED)
            self.turn_away(sequence, late)
        for sequence in self._slots.active:
            if sequence.output is not None and sequence.deadline is not None and now > sequence.deadline:
                self._timeline.ended(sequence, RequestState.FAILED)
                self.stop(sequence, late)

    def stop(self, sequence: Sequence, error: EmberkeepError) -> None:
        """Keep what was computed, and tell why it ends. Never raises."""
        output = sequence.output
        self._abandon(sequence)
        self._tell(output, error)

    def _abandon(self, sequence: Sequence) -> None:
        """Keep what was computed; the output is not told. Never raises."""
        sequence.output = None
        with self.only(sequence):
            self._cache.abandon(sequence)
            self._finish(sequence)

    # ── failed ──

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """The state of something that failed is unknown: nothing of it is kept or shared. Never raises."""
        output = sequence.give_up_output()
        self._cache.release(sequence)
        self._slots.drop(sequence)
        if self._draft is not None:
            self._draft.ended(sequence, is_kept=False)
        sequence.become_idle()  # others may be waiting for what it was about to compute
        self.slot_freed = True
        if output is None:
            log.warning("the state of a request that is over is not kept: %r", error)
        else:
            self._count_failure(sequence, output, error)

    def refuse(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence of which nothing is in the engine."""
        self._waiting.remove(sequence)
        self._count_failure(sequence, sequence.give_up_output(), error)

    def _count_failure(self, sequence: Sequence, output: SequenceOutput | None, error: Exception) -> None:
        self._counters.failed += 1
        self._timeline.ended(sequence, RequestState.FAILED)
        self._tell(output, error)

    def turn_away(self, sequence: Sequence, error: EmberkeepError) -> None:
        """End a waiting sequence for no fault of its own. Never raises."""
        self._waiting.remove(sequence)
        self._tell(sequence.give_up_output(), error)

    def step_failed(self, together: list[Sequence], error: Exception, *, is_intact: bool) -> None:
        """A step of these failed. Alone, it is clear whose fault it was; else each tries again by itself.
        `is_intact`: what was in the engine before the step is still there."""
        if len(together) == 1:
            self.fail(together[0], error)
            return
        log.warning("a step of %d requests failed, each of them goes on alone: %r", len(together), error)
        for sequence in together:
            with self.only(sequence):
                if sequence.output is None:
                    raise error
                kept = sequence.computed if is_intact else 0
                self._parts.engine.trim(sequence.slot, kept)
                sequence.go_on_alone(kept)

    def _tell(self, output: SequenceOutput | None, error: Exception) -> None:
        """Never raises."""
        shown = explained(error)
        if output is not None:
            insist(lambda: output.failed(shown), "telling that a request failed")


def _ending(sequence: Sequence, reason: EndReason, saved_s: float) -> Ending:
    """How it went, now that it is over. `saved_s`: by what it reused."""
    now = monotonic()
    first = sequence.first_token_at or now
    lookup = sequence.lookup_record()
    timings = Timings(
        cache_n=lookup.cached_tokens,
        prompt_n=lookup.prompt_tokens - lookup.cached_tokens,
        prompt_ms=1e3 * (first - sequence.started),
        predicted_n=sequence.sampled_count,
        predicted_ms=1e3 * (now - first),
        ttft_ms=1e3 * (first - sequence.submitted),
        queue_ms=1e3 * (sequence.started - sequence.submitted),
        draft_n=sequence.drafted_tokens,
        draft_n_accepted=sequence.accepted_tokens,
        saved_ms=1e3 * saved_s,
    )
    return Ending(reason, timings, lookup, sequence.slot)


def explained(error: Exception) -> EmberkeepError:
    """The error that a client gets. Errors that are not ours are for the log."""
    if isinstance(error, EmberkeepError):
        return error
    log.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError):
        return StepFailed("There was not enough memory for this request: try again with fewer or shorter ones.")
    return EngineError("The request failed for a reason that is in the log: try again.")
