"""The scheduler: each step schedules, executes, and processes outputs. One thread owns the engine; everything else
talks to it through an inbox.

Whatever goes wrong for one sequence, of whatever kind, ends that sequence: `_only` stands around everything that
is done for one. What goes wrong outside of it ends the scheduler, and every request is told at once.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from emberkeep.chat.prompt import Prompt
from emberkeep.engine.base import Attention, Engine, ExpertTracking, Footprint, KvUnit, Outcome
from emberkeep.errors import DeadlineExceeded, EmberkeepError, EngineError, Overloaded, StepFailed
from emberkeep.kv.entries import EntryId
from emberkeep.kv.store import KvStore
from emberkeep.sched.admission import Calibration, PeakWatch
from emberkeep.sched.draft_length import Chosen
from emberkeep.sched.draft_model import DraftModel, LoadedDraft
from emberkeep.sched.engine_thread import (
    SHUTTING_DOWN,
    Call,
    Cancel,
    Command,
    EngineThread,
    Inbox,
    Stop,
    Wake,
    WhenIdle,
    insist,
    promised,
)
from emberkeep.sched.model_drafts import ModelDrafts
from emberkeep.sched.output import EndReason, SequenceOutput
from emberkeep.sched.prefix_cache import PrefixCache
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence import Phase, Sequence
from emberkeep.sched.slots import Planned, Planner, Slots, WaitingQueue
from emberkeep.sched.speculation import Speculation
from emberkeep.sched.stored_text import RecentAnswers, StoredText
from emberkeep.sched.timeline import Timeline
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import Progress, TokenLogprob
from emberkeep.types.models import Vocab
from emberkeep.types.request import Json, Lineage
from emberkeep.types.speculation import SpeculationStats
from emberkeep.types.timeline import RequestState, TimelineRecord
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

T = TypeVar("T")

GapWork = Callable[[Callable[[], bool]], bool]
"""Is given a function that says whether something waits; says whether all is done."""

_FULL = "The context memory is full: try again with fewer requests."
_GAP_S, _REST_S = 1.0, 40.0
"""After so long without work, what makes later work quicker is done, and memory that is not used is given back."""


class _NoRoom(EngineError):
    """Nothing was evaluated."""

    def __init__(self) -> None:
        super().__init__(_FULL)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    parallel: int
    """Sequences in the engine at once."""
    prefill_slice: int
    """Prompt tokens per step while nothing else runs."""
    tracked: int = 16
    """Conversations whose slot is remembered."""
    warm_after: int = 2
    """Turns of its conversation after which a branch that was left alone leaves the engine."""
    drain_s: float = 0.0
    """How long running sequences may take to finish when it is closed."""
    draft_max: int = 0
    """Most drafted tokens of a sequence in one step; 0: nothing is drafted."""
    memory: int | None = None
    """Bytes that sequences in the engine may come to need together; None: as many as they like."""


@dataclass(slots=True)
class SchedulerCounters:
    jobs: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    evaluated_tokens: int = 0
    prompt_tokens: int = 0
    reused_hot_tokens: int = 0
    reused_warm_tokens: int = 0
    reused_cold_tokens: int = 0
    reused_remote_tokens: int = 0
    moved_tokens: int = 0
    repaired_tokens: int = 0
    approximate_jobs: int = 0
    blended_tokens: int = 0
    """In steps into which state was moved, of which the next one is what they cost."""
    blended_token_layers: int = 0
    cuts: int = 0
    """How often something was cut out of a sequence's state."""
    sampled_tokens: int = 0
    saved_s: float = 0.0
    """What evaluating all that was reused would have taken, less what loading it took."""


class _Only:
    """See `Scheduler._only`. A class: it is entered for every token, and a generator takes 2.4 times as long."""

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


class Scheduler:
    """`submit`, `cancel`, `call`, `when_idle`, `stats` and `close` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        settings: SchedulerSettings,
        *,
        thread: EngineThread | None = None,
        draft: LoadedDraft | None = None,
    ) -> None:
        """`thread`: the one that opened the engine, where that matters; the scheduler ends it when it closes.
        `draft`: a model that drafts, opened on the same thread; the scheduler closes its engine."""
        self.after_step: Callable[[], None] = lambda: None
        """Called on the engine's thread when outputs may have something new. Set before anything is submitted."""
        self._engine = engine
        self.store = store
        store.follow(engine.fingerprint)
        self._settings = settings
        self._inbox = Inbox()
        self._waiting = WaitingQueue()
        self._when_idle: deque[WhenIdle] = deque()
        """No sequence is started while something is in here."""
        self._gap_work: deque[GapWork] = deque([self._improve])
        self._is_resting = False
        """The engine has rested since something ran or was given up."""
        self._slots = Slots(engine, settings.tracked)
        self._draft = DraftModel(draft, settings.tracked, settings.prefill_slice, self._wake) if draft else None
        if self._draft is not None:
            self._gap_work.append(self._draft.improve)
        self._speculation = _speculation(engine, store, settings, self._draft)
        able = engine.capabilities
        spare = able.outputs - able.max_sequences
        self._planner = Planner(
            able.batch, settings.prefill_slice, store.costs.evaluate, self._speculation, max(spare, 0)
        )
        self._cache = PrefixCache(engine, store, self._slots, self._wake)
        self.calibration = Calibration()
        self._watch = PeakWatch(engine, self.calibration, self._bytes_of_others)
        self._slot_freed = False
        """Something ended since waiting sequences were last looked at."""
        self._failed_with = ""
        """What has ended the loop, if anything did."""
        self.counters = SchedulerCounters()
        self.recent = RecentAnswers(4 * settings.parallel)
        self._timeline = Timeline()
        self._thread = thread or EngineThread()
        self._running = self._thread.submit(self._run)

    # ── from any thread ──

    def submit(self, sequence: Sequence) -> None:
        """Raises Overloaded once the scheduler is being closed, EngineError when it has failed."""
        self._inbox.enter(sequence)

    def failure(self) -> EngineError | None:
        """Why nothing will ever be answered again; None while all is well, and when it was closed."""
        if not self._failed_with:
            return None
        return EngineError(
            f"The engine has failed ({self._failed_with}) and answers no more: start again; the log says why."
        )

    def cancel(self, sequence: Sequence) -> None:
        """Stop within one step. What was computed is kept; the output gets nothing more."""
        self._inbox.put(Cancel(sequence))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread between two steps. Raises as `submit` does."""
        future, run = promised(action)
        self._inbox.enter(Call(run, future))
        return future

    def make_room(self, sequence: Sequence, prompt: Prompt | None) -> None:
        """Let a sequence whose context is full go on with a shorter prompt, or (None) end where it is."""
        with suppress(Overloaded, EngineError):  # then it has been ended already
            self.call(lambda: self._go_on_with(sequence, prompt))

    def when_idle(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread while the engine holds nothing.

        Running sequences finish before it, new ones wait for it, and idle ones are dropped: the store has them as
        well. What is computed after it may have another fingerprint: while it has, nothing of it is stored, and
        nothing stored is used for it. An error of `action` ends the scheduler, since it is not known what it left
        of the engine. Raises as `submit` does; an action that still waits then fails with the same.
        """
        future, run = promised(action)
        self._inbox.enter(WhenIdle(run, future))
        return future

    def in_gaps(self, work: GapWork, *, empties: bool = True) -> None:
        """Call `work` on the engine's thread when nothing has run for a second, until it returns True; with
        `empties` the engine holds nothing then. It is given a function that says whether something waits now, and
        should return then. Raises as `submit` does."""

        def in_empty_engine(is_wanted: Callable[[], bool]) -> bool:
            self._slots.clear_the_way(None)
            return work(is_wanted)

        self.call(lambda: self._gap_work.append(in_empty_engine if empties else work))

    def in_a_gap(self, action: Callable[[], T]) -> T:
        """As `in_gaps`, once. Blocks until it is done. Raises what it raises, and Overloaded when the scheduler
        ended before there was a gap."""
        future, run = promised(action)
        self.in_gaps(lambda _: run() is None)
        both: tuple[Future[Any], ...] = future, self._running
        wait(both, return_when=FIRST_COMPLETED)
        if not future.done():
            raise Overloaded(SHUTTING_DOWN)
        return future.result()

    def stored_text(self, lineage: Lineage) -> StoredText:
        """What is stored of a lineage, by other processes too, for a prompt that is still text. Reads the
        index."""
        for store in self.stores:
            store.refresh()
        snapshots = self.kv_unit.has_snapshots
        return StoredText(self.store, self.recent, self._engine.vocab, lineage, snapshots=snapshots)

    def close(self) -> None:
        """No new sequences; let running ones finish until the deadline, keep what they computed, free the
        engine."""
        self._inbox.shut()
        deadline = monotonic() + self._settings.drain_s
        while not self._running.done() and monotonic() < deadline and self._is_busy():
            wait([self._running], timeout=0.02)
        self._inbox.put(Stop())
        self._thread.end()

    def forget(self, owners: Container[str]) -> Future[None]:
        """Drop what is idle in the engine for these, and what is remembered of their answers. Sequences that are
        here now go on, and leave nothing behind."""

        def drop() -> None:
            for sequence in self._waiting:
                if sequence.lineage.owner in owners:
                    sequence.forget()
            self._is_resting = False
            self._slots.forget(owners)
            self.recent.forget(owners)
            self._timeline.forget(owners)
            self.store.corpus.forget(owners)
            if self._draft is not None:
                self._draft.forget(owners)

        return self.call(drop)

    def drop_idle(self, entries: Iterable[EntryId], unnamed_s: float | None = None) -> Future[None]:
        """Drop what is idle in the engine for these: the store has it as well. With `unnamed_s`, also what has
        been idle for so many seconds without an entry."""
        listed = set(entries)

        def drop() -> None:
            self._is_resting = False
            self._slots.drop_idle(listed, unnamed_s)
            if self._draft is not None:
                self._draft.drop_idle(listed, unnamed_s)

        return self.call(drop)

    def hot_tokens(self, lineage: Lineage, tokens: TokenArray) -> Future[int]:
        """How many leading tokens are in the engine."""
        return self.call(lambda: self._slots.computed_match(lineage, tokens).tokens)

    @property
    def stores(self) -> list[KvStore]:
        """The engine's, and the draft model's if there is one."""
        return [self.store, self._draft.store] if self._draft else [self.store]

    @property
    def vocab(self) -> Vocab:
        return self._engine.vocab

    @property
    def context(self) -> int:
        return self._engine.capabilities.context

    @property
    def kv_unit(self) -> KvUnit:
        return self._engine.capabilities.kv_unit

    def idle_entries(self) -> dict[EntryId, int]:
        """Entries whose latest state is in the engine, with its length."""
        return {s.entry: s.computed for s in self._slots.idle if s.entry is not None}

    @property
    def footprint(self) -> Footprint | None:
        return self._engine.footprint

    @property
    def attention(self) -> Attention | None:
        """The engine's: switch it only by `when_idle`."""
        return self._engine.attention

    def engine_stats(self) -> dict[str, Json]:
        return self._engine.stats()

    @property
    def experts(self) -> ExpertTracking | None:
        """The engine's: switch them only by `when_idle`, reset them only by `call`."""
        return self._engine.experts

    def speculation_stats(self) -> SpeculationStats:
        return self._speculation.stats()

    def stats(self) -> dict[str, object]:
        active = self._slots.active
        return {
            "active": len(active),
            "waiting": len(self._waiting),
            "idle_sequences": len(self._slots.idle),
            "resident_tokens": sum(s.computed for s in [*active, *self._slots.idle]),
            "slots": self._slots.stats(),
            **asdict(self.counters),
        }

    def timeline(self) -> list[TimelineRecord]:
        """Those that are here and the latest that were, the newest first."""
        return self._timeline.read([*self._waiting, *self._slots.active])

    # ── the steps ──

    def _wake(self) -> None:
        self._inbox.put(Wake())

    def _run(self) -> None:
        try:
            while self._take_commands(wait=not self._has_work()):
                self._act_when_idle()
                self._admit()
                self._flush()
                self._step()
                self._flush()
                self._check_slots()
        except BaseException as error:
            self._failed_with = type(error).__name__
            log.critical("the engine's thread failed", exc_info=error)
        finally:
            insist(self._end_everything, "ending all requests")
            insist(self.after_step, "telling what has ended")
            insist(self._engine.close, "closing the engine")
            if self._draft is not None:
                self._draft.close()

    def _step(self) -> None:
        batch = self._schedule()
        if batch and self._execute(batch):
            self._process_outputs(batch)
            self._store_computed(batch)
        self._blend()
        if self._draft is not None and not batch:
            self._draft.advance()

    def _schedule(self) -> list[Planned]:
        try:
            return self._planner.plan(self._loaded())
        except Exception:
            log.exception("a step could not be planned")
        for sequence in self._slots.active:
            with self._only(sequence):
                self._planner.plan([sequence])
        return self._planner.plan(self._slots.active)

    def _loaded(self) -> list[Sequence]:
        """Those whose state is in the engine, if any of them can go on: one whose state is still on its way there
        would hold up the others."""
        active = self._slots.active
        loaded = [s for s in active if not self._engine.is_loading(s.slot)]
        return loaded if any(s.is_runnable for s in loaded) else active

    def _flush(self) -> None:
        """Wake the readers of new output. It is tried twice before a failure ends the scheduler."""
        try:
            self.after_step()
        except Exception:
            log.exception("what is new could not be told")
            self.after_step()

    def _check_slots(self) -> None:
        if self._slots.stuck:
            raise EngineError(f"The engine cannot forget what is in its slots {sorted(self._slots.stuck)}.")

    # ── what goes wrong ──

    def _only(self, sequence: Sequence) -> _Only:
        """Whatever goes wrong in here ends this sequence and nothing else."""
        return _Only(self._fail, sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """The state of something that failed is unknown: nothing of it is kept or shared. Never raises."""
        output, sequence.output = sequence.output, None
        self._cache.release(sequence)
        self._slots.drop(sequence)
        if self._draft is not None:
            self._draft.ended(sequence, is_kept=False)
        sequence.become_idle()  # others may be waiting for what it was about to compute
        self._slot_freed = True
        if output is None:
            log.warning("the state of a request that is over is not kept: %r", error)
        else:
            self.counters.failed += 1
            self._timeline.ended(sequence, RequestState.FAILED)
            self._tell(output, error)

    def _refuse(self, sequence: Sequence, error: Exception) -> None:
        """Nothing of it is in the engine."""
        self._waiting.remove(sequence)
        self.counters.failed += 1
        self._timeline.ended(sequence, RequestState.FAILED)
        output, sequence.output = sequence.output, None
        self._tell(output, error)

    def _tell(self, output: SequenceOutput | None, error: Exception) -> None:
        """Never raises."""
        told = _explained(error)
        if output is not None:
            insist(lambda: output.failed(told), "telling that a request failed")

    def _blend(self) -> None:
        """One slice of one sequence into which state is moved; the others have had their step before it."""
        blending = [s for s in self._slots.active if s.is_blending]
        if not blending:
            return
        sequence = min(blending, key=lambda s: s.started)
        with self._only(sequence):
            self._blend_slice(sequence)

    def _blend_slice(self, sequence: Sequence) -> None:
        before, moved = sequence.computed, sequence.reuse.moved
        if sequence.approximate_from is None:
            self._cache.commit_fork(sequence, before)
        blended = self._cache.blend.run(sequence, self._planner.blend_room(self._slots.active))
        if blended is not None:
            self.counters.steps += 1
            outside = sequence.computed - before - (sequence.reuse.moved - moved)
            self.counters.evaluated_tokens += outside + blended.repaired
            self.counters.blended_tokens += sequence.computed - before
            self.counters.blended_token_layers += blended.token_layers
            self._cache.commit(sequence)
            self._go_on(sequence)

    def _execute(self, batch: list[Planned]) -> bool:
        begin = monotonic()
        try:
            while batch and self._engine.evaluate([each.rows for each in batch]) is Outcome.NO_ROOM:
                if any(each.draft for each in batch):
                    batch[:] = [each.undrafted for each in batch]
                elif not self._slots.free_cells() and not self._set_aside(batch):
                    raise _NoRoom
            count = sum(len(each.rows.tokens) for each in batch)
            self._planner.measure(count, monotonic() - begin)
        except Exception as error:
            self._step_failed([each.sequence for each in batch], error)
            return False
        if not batch:
            return False
        self.counters.steps += 1
        self.counters.evaluated_tokens += count
        return True

    def _step_failed(self, together: list[Sequence], error: Exception) -> None:
        """Alone, it is clear whose fault it was; else each tries again by itself."""
        if len(together) == 1:
            self._fail(together[0], error)
            return
        log.warning("a step of %d requests failed, each of them goes on alone: %r", len(together), error)
        # An error of its own is the engine's word that what was there before the step still is, where that is
        # not what a step changes.
        can_go_back = not self._engine.capabilities.kv_unit.has_snapshots
        is_known = isinstance(error, _NoRoom) or (isinstance(error, EngineError) and can_go_back)
        for sequence in together:
            with self._only(sequence):
                if sequence.output is None:
                    raise error
                kept = sequence.computed if is_known else 0
                self._engine.trim(sequence.slot, kept)
                sequence.go_on_alone(kept)

    def _process_outputs(self, batch: list[Planned]) -> None:
        for index, planned in enumerate(batch):
            with self._only(planned.sequence):
                self._process_output(planned, index)

    def _store_computed(self, batch: list[Planned]) -> None:
        """Once everyone has what is new: storing a long prompt takes as long as some tokens."""
        if self._engine.capabilities.runs_ahead and not any(each.rows.outputs for each in batch):
            return  # the next step is prepared while this one runs
        storing = []
        for sequence in (each.sequence for each in batch if each.sequence.is_active):
            with self._only(sequence):
                if self._cache.has_to_commit(sequence):
                    storing.append(sequence)
        if storing:
            self._flush()
        for sequence in storing:
            with self._only(sequence):
                self._cache.commit(sequence)

    def _process_output(self, planned: Planned, index: int) -> None:
        sequence, drafted = planned.sequence, planned.draft.count if planned.draft else 0
        sequence.evaluated(len(planned.rows.tokens) - drafted, self._engine.capabilities.wide_rows)
        if planned.is_scored:
            self._score(planned, index)
        if planned.rows.outputs and not planned.is_scored:
            self._sample(planned, index)
        elif sequence.phase is Phase.CLOSING:
            self._finish_if_closed(sequence)
        else:
            self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        if sequence.pending:
            self._report_progress(sequence)
        else:
            self._end(sequence, EndReason.LENGTH)

    def _score(self, planned: Planned, index: int) -> None:
        """Tell how likely tokens of the prompt were. The logits after one of them are about the next."""
        sequence, rows = planned.sequence, planned.rows
        assert sequence.output is not None
        following = sequence.tokens[rows.start + 1 : rows.start + 1 + len(rows.tokens)].tolist()
        pieces, sampler = self._engine.vocab.pieces, sequence.sampler
        logits = (self._engine.logits(index, row) for row in range(len(following)))
        scored = [sampler.score(each, token, pieces) for each, token in zip(logits, following, strict=True)]
        sequence.output.scored(rows.start + 1, scored)

    def _sample(self, planned: Planned, index: int) -> None:
        """The next token, and as many more as were drafted rightly: each is what plain decoding would sample."""
        sequence, end = planned.sequence, None
        draft = planned.rows.tokens[1:].tolist() if planned.draft else []
        for row, drafted in enumerate([*draft, None]):
            token, logprob = self._choose(sequence.sampler, index, row)
            end = self._take(sequence, token, logprob)
            if end is not None or token != drafted:
                break
        if planned.draft:
            self._take_back(sequence, planned.draft, accepted=row)
        if end is EndReason.LENGTH:
            self._full(sequence)
        elif end is EndReason.STOPPED:
            self._stop(sequence)
        elif end is not None:
            self._end(sequence, end)

    def _choose(self, sampler: Sampler, index: int, row: int) -> tuple[int, TokenLogprob | None]:
        if sampler.takes_likeliest:
            return self._engine.likeliest(index, row), None
        return sampler.sample(self._engine.logits(index, row), self._engine.vocab.pieces)

    def _take(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> EndReason | None:
        """A token was sampled; says whether the answer is over."""
        assert sequence.output is not None
        if sequence.reach_first_token():
            self._report_progress(sequence)
        if token in self._engine.vocab.eog:
            return EndReason.END_OF_TURN
        sequence.add_sampled(token)
        self.counters.sampled_tokens += 1
        if sequence.output.token(token, logprob):
            return EndReason.STOPPED
        return EndReason.LENGTH if sequence.sampled_count >= sequence.max_new else None

    def _take_back(self, sequence: Sequence, draft: Chosen, accepted: int) -> None:
        """Only the first tokens of a draft are part of the answer."""
        sequence.accept(draft.count, accepted)
        if accepted < draft.count:
            self._engine.trim(sequence.slot, sequence.computed)
        self._speculation.settle(sequence, draft, accepted)

    # ── a full context ──

    def _full(self, sequence: Sequence) -> None:
        """The answer goes on when messages have left the context; it ends if none may."""
        assert sequence.output is not None
        if sequence.output.full():
            sequence.wait_for_room()
        else:
            self._end(sequence, EndReason.LENGTH)

    def _set_aside(self, batch: list[Planned]) -> bool:
        """Take the longest answer whose context can be shortened out of a step for which there is no room."""
        for planned in sorted(batch, key=lambda planned: -planned.sequence.computed):
            sequence, output = planned.sequence, planned.sequence.output
            if output is None or not planned.rows.outputs or not sequence.sampled_count:
                continue
            with self._only(sequence):
                if not output.full():
                    continue
                sequence.wait_for_room()
            # It waits for room now, or it failed.
            batch[:] = [each for each in batch if each is not planned]
            return True
        return False

    def _go_on_with(self, sequence: Sequence, prompt: Prompt | None) -> None:
        if sequence.phase is Phase.FULL:
            with self._only(sequence):
                self._shorten(sequence, prompt)

    def _shorten(self, sequence: Sequence, prompt: Prompt | None) -> None:
        sequence.go_on()
        if prompt is None:
            self._end(sequence, EndReason.LENGTH)
        else:
            self._cache.shift.shorten(sequence, prompt)

    def _stop(self, sequence: Sequence) -> None:
        """Drop sampled tokens that are not part of the answer (a stop string), here and in the engine."""
        assert sequence.output is not None
        length = sequence.drop_sampled(sequence.output.kept_tokens())
        if sequence.computed > length:
            if self._engine.capabilities.kv_unit.has_snapshots:
                length = 0  # such state cannot go back: it is given up
            self._engine.trim(sequence.slot, length)
            sequence.computed_only(length)
        self._end(sequence, EndReason.STOPPED)

    # ── beginnings ──

    def _has_work(self) -> bool:
        active = self._slots.active
        can_act = bool(self._when_idle) and not active
        can_admit = self._slot_freed and len(self._waiting) > 0
        can_warm = self._draft is not None and self._draft.has_work
        return can_act or can_admit or can_warm or any(s.is_runnable for s in active)

    def _take_commands(self, *, wait: bool) -> bool:
        """Obey everything in the inbox, waiting for a first command if asked to. False: stop."""
        command = self._inbox.take(wait=wait, seconds=self._patience())
        if command is None and wait and not self._is_busy():
            self._use_gap()
        while command is not None:
            if isinstance(command, Stop):
                return False
            self._obey(command)
            command = self._inbox.take()
        self._pump_loads()
        self._expire()
        return True

    def _patience(self) -> float | None:
        """Seconds until there is something to do though nothing comes."""
        return self._next_deadline() or (_GAP_S if self._gap_work else None if self._is_resting else _REST_S)

    def _use_gap(self) -> None:
        if self._gap_work:
            self._work_in_gap()
        elif not self._is_resting:
            self._rest()

    def _rest(self) -> None:
        """Gives memory back. Conversations that would keep the engine from it are given up: the store has them."""
        self._is_resting = True
        kept = self._engine.capabilities.resting_cells
        if kept is not None:
            self._slots.keep_latest(kept)
        try:
            self._engine.rest()
        except (EngineError, MemoryError) as error:
            log.warning("the engine could not give back memory, and forgets what is idle: %s", error)
            for sequence in self._slots.idle:
                self._slots.drop(sequence)
        if self._draft is not None:
            self._draft.rest()

    def _work_in_gap(self) -> None:
        """Never raises: it only makes later work quicker."""
        work = self._gap_work.popleft()
        try:
            is_done = work(lambda: not self._inbox.is_empty)
        except Exception:
            log.exception("work for a gap failed")
            return
        if not is_done:
            self._gap_work.append(work)

    def _improve(self, is_wanted: Callable[[], bool]) -> bool:
        if not self._engine.can_improve:
            return True  # and the next turn finds what it wants where it was
        self._slots.clear_the_way(None)
        return self._engine.improve(is_wanted)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Sequence):
            self._is_resting = False
            self.counters.jobs += 1
            self._timeline.came(command)
            self._waiting.add(command)
            self._note_forks([command])
            self._speculation.prepare(command)
        elif isinstance(command, Cancel):
            self._cancel(command.sequence)
        elif isinstance(command, Call):
            command.action()
        elif isinstance(command, WhenIdle):
            self._when_idle.append(command)

    def _act_when_idle(self) -> None:
        """Does nothing while a sequence is being computed."""
        while self._when_idle and not self._slots.active:
            for sequence in self._slots.idle:
                self._slots.drop(sequence)
            command = self._when_idle.popleft()
            command.action()
            self.store.follow(self._engine.fingerprint)
            self._slot_freed = True
            if not command.future.cancelled() and (error := command.future.exception()):
                raise error

    def _admit(self) -> None:
        """Start waiting sequences in turn, passing over those for which waiting saves work."""
        self._slot_freed = False
        if self._when_idle or not len(self._waiting):
            return
        for sequence in self._waiting.in_turn(self._running_by_user()):
            busy = self._slots.active
            taken = sum(s.cells for s in busy)
            if len(busy) >= self._settings.parallel or taken + sequence.cells > self._engine.capabilities.cells:
                return
            if self._lacks_memory(sequence, busy):
                return
            if self._waiting.still_waits(sequence):
                continue
            try:
                has_slot = self._start(sequence, alone=all(s.output is None for s in busy))
            except Exception as error:
                self._refuse(sequence, error)
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
        self._note_forks(self._waiting)
        with self._only(sequence):
            self._watch.started(sequence, alone=alone)
            self._report_progress(sequence)
            self._end_if_all_is_there(sequence)
        return True

    def _note_forks(self, waiting: Iterable[Sequence]) -> None:
        """Where state is stored only as a whole, it has to be known before it is computed where others part from
        it, also while there is no slot for them."""
        if not self.kv_unit.has_snapshots:
            return
        for sequence in waiting:
            try:
                if coming := self._cache.worth_waiting_for(sequence):
                    self._waiting.wait_for(sequence, coming)
            except Exception as error:
                self._refuse(sequence, error)

    def _lacks_memory(self, sequence: Sequence, busy: list[Sequence]) -> bool:
        if self._settings.memory is None or not busy:
            return False  # alone it fits: that is what admission looked at
        return sum(s.memory for s in busy) + sequence.memory > self._settings.memory

    def _bytes_of_others(self) -> int:
        """On a CPU the engine's memory is the process's, and the store's payloads are in it too."""
        footprint = self._engine.footprint
        return self.store.held_bytes()[0] if footprint and footprint.device == "cpu" else 0

    def _running_by_user(self) -> Counter[str]:
        return Counter(s.request.user for s in self._slots.active if s.output is not None)

    def _commit_before_fork(self, newcomer: Sequence) -> None:
        hot = self._slots.computed_match(newcomer.prompt.lineage, newcomer.wanted)
        if hot.sequence and hot.sequence.is_active:
            with self._only(hot.sequence):
                self._cache.commit_fork(hot.sequence, hot.tokens)

    def _pump_loads(self) -> None:
        for sequence in self._slots.active:
            if sequence.phase is Phase.LOADING:
                with self._only(sequence):
                    self._cache.pump(sequence)
                    self._end_if_all_is_there(sequence)

    def _end_if_all_is_there(self, sequence: Sequence) -> None:
        """A prefix that is only to be ready may need no step at all."""
        if sequence.phase is Phase.EVALUATING and not sequence.pending:
            self._end(sequence, EndReason.LENGTH)

    def _report_progress(self, sequence: Sequence) -> None:
        output = sequence.output
        if output is None or not sequence.request.want_progress or sequence.sampled_count:
            return
        output.progress(
            Progress(
                total=sequence.prompt_length,
                cached=sequence.lookup_record().cached_tokens,
                processed=sequence.computed,
                elapsed_ms=1e3 * (monotonic() - sequence.started),
                marked=sequence.marked,
            )
        )

    # ── endings ──

    def _end(self, sequence: Sequence, reason: EndReason) -> None:
        """Answer first; then the turn's closing tokens are evaluated off the critical path."""
        assert sequence.output is not None
        self._count(sequence)
        saved_s = self._saving(sequence)
        self.counters.saved_s += saved_s
        if sequence.is_kept:
            answer = (sequence.prompt_length, sequence.answer_end)
            self.recent.add(sequence.lineage, sequence.tokens[:], answer)
        sequence.output.ended(sequence.ending(reason, saved_s))
        self._timeline.ended(sequence, RequestState.FINISHED)
        is_whole = reason is not EndReason.STOPPED and sequence.max_new
        sequence.close(sequence.prompt.closing if is_whole else ())
        self._watch.ended(sequence)
        self._finish_if_closed(sequence)

    def _finish_if_closed(self, sequence: Sequence) -> None:
        if not sequence.pending:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        entry = self._cache.commit_turn(sequence)
        self._speculation.turn_ended(sequence)
        if entry is not None:
            self._slots.demote(entry.id, entry.turns - self._settings.warm_after)
        self._end_draft(sequence)
        sequence.become_idle(entry)
        if not sequence.computed or not sequence.is_kept:
            self._slots.drop(sequence)
        self._slot_freed = True

    def _end_draft(self, sequence: Sequence) -> None:
        if self._draft is None:
            return
        self._draft.ended(sequence)
        if sequence.request.execution.is_prefix:
            self._draft.warm(sequence)

    def _count(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.reused_hot_tokens += sequence.reuse.hot
        self.counters.reused_warm_tokens += sequence.reuse.warm
        self.counters.reused_cold_tokens += sequence.reuse.cold
        self.counters.reused_remote_tokens += sequence.reuse.remote
        self.counters.moved_tokens += sequence.reuse.moved
        self.counters.cuts += sequence.splices
        self.counters.evaluated_tokens += sequence.inserted_tokens
        self.counters.repaired_tokens += sequence.reuse.repaired
        self.counters.approximate_jobs += sequence.approximate_from is not None

    def _saving(self, sequence: Sequence) -> float:
        """Seconds that its reuse has saved whoever waited; nobody has waited for what was only to be ready."""
        if sequence.request.execution.is_prefix:
            return 0.0
        spared = self.store.costs.evaluate.seconds(sequence.reuse.in_place + sequence.reuse.moved)
        return max(spared - sequence.reuse.load_seconds, 0.0)

    def _cancel(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if sequence.output is None:
            return
        self._timeline.ended(sequence, RequestState.CANCELLED)
        if sequence.phase is Phase.WAITING:
            sequence.output = None
            return
        self.counters.cancelled += 1
        self._count(sequence)
        self._abandon(sequence)

    def _abandon(self, sequence: Sequence) -> None:
        """Keep what was computed; the output is not told. Never raises."""
        sequence.output = None
        with self._only(sequence):
            self._cache.abandon(sequence)
            self._finish(sequence)

    def _expire(self) -> None:
        now = monotonic()
        late = DeadlineExceeded("The request ran out of its time: allow more, or ask for fewer tokens.")
        for sequence in self._waiting.expired(now):
            self._waiting.remove(sequence)
            self._timeline.ended(sequence, RequestState.FAILED)
            output, sequence.output = sequence.output, None
            self._tell(output, late)
        for sequence in self._slots.active:
            output = sequence.output
            if output is not None and sequence.deadline is not None and now > sequence.deadline:
                self._timeline.ended(sequence, RequestState.FAILED)
                self._abandon(sequence)
                self._tell(output, late)

    def _next_deadline(self) -> float | None:
        """Seconds until the first sequence, waiting or loading, runs out of time, or of patience with the disk."""
        active = self._slots.active
        awaited = [*self._waiting, *(s for s in active if s.output is not None)]
        deadlines = [sequence.deadline for sequence in awaited if sequence.deadline is not None]
        deadlines += [s.patience_ends for s in active if s.phase is Phase.LOADING]
        return max(min(deadlines) - monotonic(), 0.001) if deadlines else None

    def _is_busy(self) -> bool:
        return bool(self._slots.active) or len(self._waiting) > 0 or not self._inbox.is_empty

    def _end_everything(self) -> None:
        """Every request that waits is told that it is over, and none comes in any more."""
        self._inbox.shut(self._over)
        while (late := self._inbox.take()) is not None:
            if isinstance(late, Sequence):
                self._waiting.add(late)
            elif isinstance(late, Call | WhenIdle):
                self._give_up(late.future)
        while self._when_idle:
            self._give_up(self._when_idle.popleft().future)
        for sequence in self._waiting:
            self._waiting.remove(sequence)
            self._tell(sequence.output, self._over())
        for sequence in self._slots.active:
            output = sequence.output
            if self._failed_with:
                self._fail(sequence, self._over())
                continue
            self._abandon(sequence)
            self._tell(output, self._over())

    def _over(self) -> EmberkeepError:
        return self.failure() or Overloaded(SHUTTING_DOWN)

    def _give_up(self, future: Future[object]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(self._over())


def _speculation(
    engine: Engine, store: KvStore, settings: SchedulerSettings, model: DraftModel | None
) -> Speculation:
    reason = "" if settings.draft_max else "It is switched off: speculation = auto switches it on."
    if engine.capabilities.kv_unit.has_snapshots:
        reason = "This model's state cannot go back by single tokens, so nothing can be tried out."
    return Speculation(
        store.corpus,
        engine.vocab,
        partial(_step_seconds, engine),
        most=settings.draft_max,
        able=engine.capabilities,
        model=ModelDrafts(model) if model else None,
        reason=reason,
    )


def _step_seconds(engine: Engine, rows: int, depth: int, outputs: int) -> float:
    seconds = engine.step_seconds(rows, depth, outputs)
    return seconds if seconds is not None else 0.01 * (0.6 + 0.4 * rows)


def _explained(error: Exception) -> EmberkeepError:
    """The error that a client gets. Errors that are not ours are for the log."""
    if isinstance(error, EmberkeepError):
        return error
    log.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError):
        return StepFailed("There was not enough memory for this request: try again with fewer or shorter ones.")
    return EngineError("The request failed for a reason that is in the log: try again.")
