"""The step loop: plan, run, absorb. One thread owns the engine; everything else talks to it through a queue.

Whatever goes wrong for one job, of whatever kind, ends that job: `_only` stands around everything that is done for
one. What goes wrong outside of it ends the loop, and everybody hears of it at once.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from types import TracebackType
from typing import TypeVar

from emberkeep.engine.base import Attention, Engine, ExpertTracking, KvUnit, Outcome, Rows
from emberkeep.errors import DeadlineExceeded, EmberkeepError, EngineError, Overloaded, StepFailed
from emberkeep.kv.entries import EntryId
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import TokenArray
from emberkeep.sched.affinity import Affinity
from emberkeep.sched.calibration import Calibration, PeakWatch
from emberkeep.sched.cleanup import insist
from emberkeep.sched.cutter import Cutter
from emberkeep.sched.inbox import SHUTTING_DOWN, BetweenJobs, Call, Cancel, Command, Inbox, Stop, Wake
from emberkeep.sched.job import EndReason, Job, Notes, Room
from emberkeep.sched.keeper import Keeper
from emberkeep.sched.loader import Loader
from emberkeep.sched.mover import Mover
from emberkeep.sched.plan import Planner
from emberkeep.sched.queue import WaitingLine
from emberkeep.sched.recent import RecentAnswers
from emberkeep.sched.sequence import Phase, Sequence
from emberkeep.sched.slots import Slots
from emberkeep.sched.thread import EngineThread, promised
from emberkeep.types import Json, Lineage, Progress

log = logging.getLogger("emberkeep.sched")

T = TypeVar("T")

_FULL = "The context memory is full: try again with fewer requests."


class _NoRoom(EngineError):
    """Nothing was evaluated."""

    def __init__(self) -> None:
        super().__init__(_FULL)


@dataclass(frozen=True, slots=True)
class LoopSettings:
    parallel: int
    """Jobs in the engine at once."""
    prefill_slice: int
    """Prompt tokens per step while nothing else runs."""
    tracked: int = 16
    """Conversations whose slot is remembered."""
    warm_after: int = 2
    """Turns of its conversation after which a branch that was left alone leaves the engine."""
    memory: int | None = None
    """Bytes that jobs in the engine may come to need together; None: as many as they like."""


@dataclass(slots=True)
class LoopCounters:
    jobs: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    evaluated_tokens: int = 0
    prompt_tokens: int = 0
    reused_hot_tokens: int = 0
    reused_warm_tokens: int = 0
    reused_cold_tokens: int = 0
    moved_tokens: int = 0
    repaired_tokens: int = 0
    approximate_jobs: int = 0
    blended_tokens: int = 0
    """In steps into which state was moved, of which the next one is what they cost."""
    blended_token_layers: int = 0
    cuts: int = 0
    """How often something was cut out of a sequence's state."""
    sampled_tokens: int = 0


class _Only:
    """See `EngineLoop._only`. A class: it is entered for every token, and a generator takes 2.4 times as long."""

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


class EngineLoop:
    """`submit`, `cancel`, `call`, `between_jobs`, `stats` and `close` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        settings: LoopSettings,
        *,
        thread: EngineThread | None = None,
        after_step: Callable[[], None] = lambda: None,
        calibration: Calibration | None = None,
    ) -> None:
        """`thread`: the one that opened the engine, where that matters; the loop ends it when it closes.

        `after_step` is called on the engine's thread whenever consumers may have heard something new.
        """
        self._after_step = after_step
        self._engine = engine
        self._store = store
        store.follow(engine.fingerprint)
        self._settings = settings
        self._inbox = Inbox()
        self._line = WaitingLine()
        self._between: deque[BetweenJobs] = deque()
        """No job is started while something is in here."""
        self._slots = Slots(engine)
        self._affinity = Affinity(engine.capabilities.max_sequences, settings.tracked)
        self._planner = Planner(engine.capabilities.batch, settings.prefill_slice, store.costs.evaluate)
        self._keeper = Keeper(engine, store)
        self._mover = Mover(engine, store, self._slots, self._keeper, self._wake)
        self._cutter = Cutter(engine, store, self._slots)
        self._loader = Loader(engine, store, self._slots, self._affinity, self._mover, self._cutter, self._wake)
        self._watch = PeakWatch(engine, calibration or Calibration(), self._bytes_of_others)
        self._place_freed = False
        """Something ended since waiting jobs were last looked at."""
        self._failed_with = ""
        """What has ended the loop, if anything did."""
        self.counters = LoopCounters()
        self.recent = RecentAnswers(4 * settings.parallel)
        self._thread = thread or EngineThread()
        self._running = self._thread.submit(self._run)

    # ── from any thread ──

    def submit(self, job: Job) -> None:
        """Raises Overloaded once the loop is being closed, EngineError when it has failed."""
        self._inbox.enter(job)

    def failure(self) -> EngineError | None:
        """Why nothing will ever be answered again; None while all is well, and when the loop was closed."""
        if not self._failed_with:
            return None
        return EngineError(
            f"The engine has failed ({self._failed_with}) and answers no more: start again; the log says why."
        )

    def cancel(self, job: Job) -> None:
        """Stop within one step. What was computed is kept; the consumer hears nothing more."""
        self._inbox.put(Cancel(job))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread between two steps. Raises as `submit` does."""
        future, run = promised(action)
        self._inbox.enter(Call(run, future))
        return future

    def make_room(self, job: Job, room: Room | None) -> None:
        """Let a job go on that said it was full, or (None) end where it is."""
        with suppress(Overloaded, EngineError):  # then it has been ended already
            self.call(lambda: self._go_on_with(job, room))

    def between_jobs(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread while the engine holds nothing.

        Running jobs finish before it, new ones wait for it, and sequences at rest are dropped: the store has them
        as well. What is computed after it may have another fingerprint: while it has, nothing of it is stored, and
        nothing stored is used for it. An error of `action` ends the loop, since nobody knows what it left of the
        engine. Raises as `submit` does; an action that still waits then fails with the same.
        """
        future, run = promised(action)
        self._inbox.enter(BetweenJobs(run, future))
        return future

    def close(self, drain_seconds: float = 0.0) -> None:
        """No new jobs; let running ones finish until the deadline, keep what they computed, free the engine."""
        self._inbox.shut()
        deadline = monotonic() + drain_seconds
        while not self._running.done() and monotonic() < deadline and self._is_busy():
            wait([self._running], timeout=0.02)
        self._inbox.put(Stop())
        self._thread.end()

    def forget(self, owners: Container[str]) -> Future[None]:
        """Drop what rests in the engine for these, and what is remembered of their answers. Jobs that are here now
        go on, and leave nothing behind."""

        def drop() -> None:
            for job in [*self._line, *(s.job for s in self._slots.active if s.job is not None)]:
                if job.lineage.owner in owners:
                    job.is_kept, job.notes = False, Notes()
            self._slots.forget(owners)
            self._affinity.forget(owners)
            self.recent.forget(owners)

        return self.call(drop)

    def drop_resting(self, entries: Iterable[EntryId]) -> Future[None]:
        """Drop what rests in the engine for these: the store has it as well."""
        listed = set(entries)

        def drop() -> None:
            for sequence in self._slots.idle:
                if sequence.entry in listed:
                    self._slots.drop(sequence)

        return self.call(drop)

    def hot_tokens(self, lineage: Lineage, tokens: TokenArray) -> Future[int]:
        """How many leading tokens are in the engine."""
        return self.call(lambda: self._slots.computed_match(lineage, tokens).tokens)

    @property
    def kv_unit(self) -> KvUnit:
        return self._engine.capabilities.kv_unit

    def resting(self) -> dict[EntryId, int]:
        """Entries whose latest state is in the engine, with its length."""
        return {s.entry: s.computed for s in self._slots.idle if s.entry is not None}

    @property
    def attention(self) -> Attention | None:
        """The engine's: switch it only by `between_jobs`."""
        return self._engine.attention

    def engine_stats(self) -> dict[str, Json]:
        return self._engine.stats()

    @property
    def experts(self) -> ExpertTracking | None:
        """The engine's: switch them only by `between_jobs`, reset them only by `call`."""
        return self._engine.experts

    def stats(self) -> dict[str, object]:
        active = self._slots.active
        return {
            "active": len(active),
            "waiting": len(self._line),
            "idle_sequences": len(self._slots.idle),
            "resident_tokens": sum(s.computed for s in [*active, *self._slots.idle]),
            **asdict(self.counters),
        }

    # ── the loop ──

    def _wake(self) -> None:
        self._inbox.put(Wake())

    def _run(self) -> None:
        try:
            while self._take_commands(wait=not self._has_work()):
                self._act_between_jobs()
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
            insist(self._after_step, "telling what has ended")
            insist(self._engine.close, "closing the engine")

    def _step(self) -> None:
        batch = self._plan()
        if batch and self._evaluate(batch):
            self._absorb(batch)
        self._blend()

    def _plan(self) -> list[tuple[Sequence, Rows]]:
        try:
            return self._planner.plan(self._slots.active)
        except Exception:
            log.exception("a step could not be planned")
        for sequence in self._slots.active:
            with self._only(sequence):
                self._planner.plan([sequence])
        return self._planner.plan(self._slots.active)

    def _flush(self) -> None:
        """Let consumers hear what is new. It concerns all of them: it is tried twice before it ends the loop."""
        try:
            self._after_step()
        except Exception:
            log.exception("what is new could not be told")
            self._after_step()

    def _check_slots(self) -> None:
        if self._slots.stuck:
            raise EngineError(f"The engine cannot forget what is in its slots {sorted(self._slots.stuck)}.")

    # ── what goes wrong ──

    def _only(self, sequence: Sequence) -> _Only:
        """Whatever goes wrong in here ends this sequence and nothing else."""
        return _Only(self._fail, sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """The state of something that failed is unknown: nothing of it is kept or shared. Never raises."""
        job, sequence.job = sequence.job, None
        self._loader.let_go(sequence)
        self._slots.drop(sequence)
        sequence.rest()  # jobs may be waiting for what it was about to compute
        self._place_freed = True
        if job is None:
            log.warning("the state of a request that is over is not kept: %r", error)
        else:
            self.counters.failed += 1
            self._tell(job, error)

    def _refuse(self, job: Job, error: Exception) -> None:
        """Nothing of the job is in the engine."""
        self._line.remove(job)
        self.counters.failed += 1
        self._tell(job, error)

    def _tell(self, job: Job, error: Exception) -> None:
        """Never raises."""
        told = _explained(error)
        insist(lambda: job.consumer.failed(told), "telling that a request failed")

    def _blend(self) -> None:
        """One slice of one sequence into which state is moved; the others have had their step before it."""
        blending = [s for s in self._slots.active if s.is_blending]
        if not blending:
            return
        sequence = min(blending, key=lambda s: s.started)
        with self._only(sequence):
            self._blend_slice(sequence)

    def _blend_slice(self, sequence: Sequence) -> None:
        before, moved = sequence.computed, sequence.moved_tokens
        blended = self._mover.run(sequence, self._planner.blend_room(self._slots.active))
        if blended is not None:
            self.counters.steps += 1
            outside = sequence.computed - before - (sequence.moved_tokens - moved)
            self.counters.evaluated_tokens += outside + blended.repaired
            self.counters.blended_tokens += sequence.computed - before
            self.counters.blended_token_layers += blended.token_layers
            self._keeper.keep_full_chunks(sequence)
            self._go_on(sequence)

    def _evaluate(self, batch: list[tuple[Sequence, Rows]]) -> bool:
        begin = monotonic()
        try:
            while batch and self._engine.evaluate([rows for _, rows in batch]) is Outcome.NO_ROOM:
                if not self._slots.free_cells() and not self._set_aside(batch):
                    raise _NoRoom
            count = sum(len(rows.tokens) for _, rows in batch)
            self._planner.measure(count, monotonic() - begin)
        except Exception as error:
            self._step_failed([sequence for sequence, _ in batch], error)
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
                if sequence.job is None:
                    raise error
                kept = sequence.computed if is_known else 0
                self._engine.trim(sequence.slot, kept)
                sequence.goes_on_alone(kept)

    def _absorb(self, batch: list[tuple[Sequence, Rows]]) -> None:
        for index, (sequence, rows) in enumerate(batch):
            with self._only(sequence):
                sequence.evaluated(len(rows.tokens), self._engine.capabilities.wide_rows)
                self._absorb_row(sequence, rows, index)

    def _absorb_row(self, sequence: Sequence, rows: Rows, index: int) -> None:
        self._keeper.keep_full_chunks(sequence)
        if rows.want_logits:
            self._sample(sequence, index)
        elif sequence.phase is Phase.CLOSING:
            self._rest_if_closed(sequence)
        else:
            self._go_on(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        if sequence.pending:
            self._report_progress(sequence)
        else:
            self._end(sequence, EndReason.LENGTH)

    def _sample(self, sequence: Sequence, index: int) -> None:
        job = sequence.job
        assert job is not None
        token, logprob = job.sampler.sample(self._engine.logits(index), self._engine.vocab.pieces)
        if sequence.first_token_at is None:
            sequence.first_token_at = monotonic()
            self._report_progress(sequence)
        if token in self._engine.vocab.eog:
            self._end(sequence, EndReason.END_OF_TURN)
            return
        sequence.add_sampled(token)
        self.counters.sampled_tokens += 1
        if job.consumer.token(token, logprob):
            self._forget_past(sequence, sequence.prompt_length + job.consumer.kept_tokens())
            self._end(sequence, EndReason.STOPPED)
        elif sequence.sampled_count >= job.max_new:
            self._full(sequence)

    # ── a full context ──

    def _full(self, sequence: Sequence) -> None:
        """The answer goes on when messages have left the context; it ends if none may."""
        assert sequence.job is not None
        if sequence.job.on_full():
            sequence.phase = Phase.FULL
        else:
            self._end(sequence, EndReason.LENGTH)

    def _set_aside(self, batch: list[tuple[Sequence, Rows]]) -> bool:
        """Take the longest answer whose context can be shortened out of a step for which there is no room."""
        for sequence, rows in sorted(batch, key=lambda row: -row[0].computed):
            job = sequence.job
            if job is None or not rows.want_logits or not sequence.sampled_count:
                continue
            with self._only(sequence):
                if not job.on_full():
                    continue
                sequence.phase = Phase.FULL
            # It waits for room now, or it failed.
            batch[:] = [row for row in batch if row[0] is not sequence]
            return True
        return False

    def _go_on_with(self, job: Job, room: Room | None) -> None:
        for sequence in self._slots.active:
            if sequence.job is job and sequence.phase is Phase.FULL:
                with self._only(sequence):
                    self._shorten(sequence, room)

    def _shorten(self, sequence: Sequence, room: Room | None) -> None:
        assert sequence.job is not None
        sequence.phase = Phase.EVALUATING
        if room is None:
            self._end(sequence, EndReason.LENGTH)
            return
        sequence.job.tokens, sequence.job.max_new = room.tokens, room.max_new
        self._cutter.shorten(sequence, room.cut)

    def _forget_past(self, sequence: Sequence, length: int) -> None:
        """Drop sampled tokens that are not part of the answer (a stop string), here and in the engine."""
        sequence.tokens.cut(length)
        sequence.answer_end = len(sequence.tokens)
        if sequence.computed > length:
            if self._engine.capabilities.kv_unit.has_snapshots:
                length = 0  # such state cannot go back: it is given up
            sequence.tokens.cut(length)
            self._engine.trim(sequence.slot, length)
            sequence.computed = length

    # ── beginnings ──

    def _has_work(self) -> bool:
        active = self._slots.active
        can_act = bool(self._between) and not active
        can_admit = self._place_freed and len(self._line) > 0
        return can_act or can_admit or any(s.is_runnable for s in active)

    def _take_commands(self, *, wait: bool) -> bool:
        """Obey everything in the inbox, waiting for a first command if asked to. False: stop."""
        command = self._inbox.take(wait=wait, seconds=self._next_deadline())
        while command is not None:
            if isinstance(command, Stop):
                return False
            self._obey(command)
            command = self._inbox.take()
        self._pump_loads()
        self._expire()
        return True

    def _obey(self, command: Command) -> None:
        if isinstance(command, Job):
            self.counters.jobs += 1
            self._line.add(command)
        elif isinstance(command, Cancel):
            self._cancel(command.job)
        elif isinstance(command, Call):
            command.action()
        elif isinstance(command, BetweenJobs):
            self._between.append(command)

    def _act_between_jobs(self) -> None:
        """Does nothing while a job is in the engine."""
        while self._between and not self._slots.active:
            for sequence in self._slots.idle:
                self._slots.drop(sequence)
            command = self._between.popleft()
            command.action()
            self._store.follow(self._engine.fingerprint)
            self._place_freed = True
            if not command.future.cancelled() and (error := command.future.exception()):
                raise error

    def _admit(self) -> None:
        """Start waiting jobs in turn, passing over those for whom waiting saves work."""
        self._place_freed = False
        if self._between:
            return
        for job in self._line.in_turn(self._running_by_user()):
            busy = self._slots.active
            taken = sum(s.reserved for s in busy)
            if len(busy) >= self._settings.parallel or taken + job.cells > self._engine.capabilities.cells:
                return
            if self._lacks_memory(job, busy):
                return
            if self._line.still_waits(job):
                continue
            try:
                has_place = self._start(job, alone=all(s.job is None for s in busy))
            except Exception as error:
                self._refuse(job, error)
                continue
            if not has_place:
                return

    def _start(self, job: Job, *, alone: bool) -> bool:
        """Bring a job into the engine, unless waiting saves work; False when there is no place for it.

        Raises whatever goes wrong, and then nothing of the job is in the engine.
        """
        if coming := self._loader.worth_waiting_for(job):
            self._line.wait_for(job, coming)
            return True
        self._keep_before_fork(job)
        sequence = self._loader.start(job)
        if sequence is None:
            return False
        self._line.remove(job)
        with self._only(sequence):
            self._watch.started(job, alone=alone)
            self._end_if_all_is_there(sequence)
        return True

    def _lacks_memory(self, job: Job, busy: list[Sequence]) -> bool:
        if self._settings.memory is None or not busy:
            return False  # alone it fits: that is what admission looked at
        return sum(s.memory for s in busy) + job.memory > self._settings.memory

    def _bytes_of_others(self) -> int:
        """On a CPU the engine's memory is the process's, and the store's payloads are in it too."""
        footprint = self._engine.footprint
        return self._store.held_bytes()[0] if footprint and footprint.device == "cpu" else 0

    def _running_by_user(self) -> Counter[str]:
        return Counter(s.job.user for s in self._slots.active if s.job is not None)

    def _keep_before_fork(self, job: Job) -> None:
        hot = self._slots.computed_match(job.lineage, job.tokens[: job.reusable])
        if job.use_cache and hot.sequence and hot.sequence.is_active:
            with self._only(hot.sequence):
                self._keeper.keep_fork(hot.sequence, hot.tokens)

    def _pump_loads(self) -> None:
        for sequence in self._slots.active:
            if sequence.phase is Phase.LOADING:
                with self._only(sequence):
                    self._loader.pump(sequence)
                    self._end_if_all_is_there(sequence)

    def _end_if_all_is_there(self, sequence: Sequence) -> None:
        """A prefix that is only to be ready may need no step at all."""
        if sequence.phase is Phase.EVALUATING and not sequence.pending:
            self._end(sequence, EndReason.LENGTH)

    def _report_progress(self, sequence: Sequence) -> None:
        job = sequence.job
        if job is None or not job.want_progress or sequence.sampled_count:
            return
        job.consumer.progress(
            Progress(
                total=sequence.prompt_length,
                cached=sequence.lookup_record().cached_tokens,
                processed=sequence.computed,
                elapsed_ms=1e3 * (monotonic() - sequence.started),
            )
        )

    # ── endings ──

    def _end(self, sequence: Sequence, reason: EndReason) -> None:
        """Answer first; then the turn's closing tokens are evaluated off the critical path."""
        job = sequence.job
        assert job is not None
        self._count(sequence)
        answer = (sequence.prompt_length, sequence.answer_end)
        if job.is_kept:
            self.recent.add(sequence.lineage, sequence.tokens[:], answer)
        job.consumer.ended(sequence.ending(reason))
        sequence.job = None  # from here on nobody waits for it
        self._watch.ended(job)
        sequence.phase = Phase.CLOSING
        if reason is not EndReason.STOPPED and job.max_new:
            sequence.tokens.extend(job.closing)
        self._rest_if_closed(sequence)

    def _rest_if_closed(self, sequence: Sequence) -> None:
        if not sequence.pending:
            self._rest(sequence)

    def _rest(self, sequence: Sequence) -> None:
        self._keeper.keep_all(sequence)
        if entry := self._keeper.write_down(sequence):
            self._slots.demote(entry.id, entry.turns - self._settings.warm_after)
        sequence.rest()
        if not sequence.computed or not sequence.is_kept:
            self._slots.drop(sequence)
        self._place_freed = True

    def _count(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.reused_hot_tokens += sequence.hot_tokens
        self.counters.reused_warm_tokens += sequence.warm_tokens
        self.counters.reused_cold_tokens += sequence.cold_tokens
        self.counters.moved_tokens += sequence.moved_tokens
        self.counters.cuts += sequence.cuts
        self.counters.evaluated_tokens += sequence.inserted_tokens
        self.counters.repaired_tokens += sequence.repaired_tokens
        self.counters.approximate_jobs += sequence.approximate_from is not None

    def _cancel(self, job: Job) -> None:
        self._line.remove(job)
        for sequence in self._slots.active:
            if sequence.job is job:
                self.counters.cancelled += 1
                self._count(sequence)
                self._put_to_rest(sequence)

    def _put_to_rest(self, sequence: Sequence) -> None:
        """What was computed is kept, and its job hears nothing of it. Never raises."""
        sequence.job = None
        with self._only(sequence):
            self._loader.abandon(sequence)
            self._rest(sequence)

    def _expire(self) -> None:
        now = monotonic()
        late = DeadlineExceeded("The request ran out of its time: allow more, or ask for fewer tokens.")
        for job in self._line.expired(now):
            self._line.remove(job)
            self._tell(job, late)
        for sequence in self._slots.active:
            running = sequence.job
            if running is not None and running.deadline is not None and now > running.deadline:
                self._put_to_rest(sequence)
                self._tell(running, late)

    def _next_deadline(self) -> float | None:
        """Seconds until the first job, waiting or loading, runs out of time, or of patience with the disk."""
        active = self._slots.active
        jobs = [*self._line, *(s.job for s in active if s.job is not None)]
        deadlines = [job.deadline for job in jobs if job.deadline is not None]
        deadlines += [s.patience_ends for s in active if s.phase is Phase.LOADING]
        return max(min(deadlines) - monotonic(), 0.001) if deadlines else None

    def _is_busy(self) -> bool:
        return bool(self._slots.active) or len(self._line) > 0 or not self._inbox.is_empty

    def _end_everything(self) -> None:
        """Everybody who waits hears that it is over, and nobody comes in any more."""
        self._inbox.shut(self._over)
        while (late := self._inbox.take()) is not None:
            if isinstance(late, Job):
                self._line.add(late)
            elif isinstance(late, Call | BetweenJobs):
                self._give_up(late.future)
        while self._between:
            self._give_up(self._between.popleft().future)
        for job in self._line:
            self._line.remove(job)
            self._tell(job, self._over())
        for sequence in self._slots.active:
            running = sequence.job
            if self._failed_with:
                self._fail(sequence, self._over())
                continue
            self._put_to_rest(sequence)
            if running is not None:
                self._tell(running, self._over())

    def _over(self) -> EmberkeepError:
        return self.failure() or Overloaded(SHUTTING_DOWN)

    def _give_up(self, future: Future[object]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(self._over())


def _explained(error: Exception) -> EmberkeepError:
    """What a client hears. Errors that are not ours are for the log."""
    if isinstance(error, EmberkeepError):
        return error
    log.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError):
        return StepFailed("There was not enough memory for this request: try again with fewer or shorter ones.")
    return EngineError("The request failed for a reason that is in the log: try again.")
