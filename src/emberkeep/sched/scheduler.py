"""The scheduler: each step schedules, executes, and processes outputs. One thread owns the engine; everything else
talks to it through an inbox.

What goes wrong for one sequence ends that sequence (`Endings.only`); what goes wrong outside of it ends the
scheduler, and every request is told at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Any, TypeVar

from emberkeep.chat.prompt import Prompt
from emberkeep.engine.base import Engine
from emberkeep.errors import EmberkeepError, EngineError, Overloaded
from emberkeep.kv.entries import EntryId
from emberkeep.kv.store import KvStore
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.engine_thread import SHUTTING_DOWN, EngineCall, EngineThread, Inbox, insist, promised
from emberkeep.sched.lifetimes import Beginnings, Endings, SchedulerParts, SchedulerSettings
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Phase
from emberkeep.sched.steps import Steps
from emberkeep.sched.stored_text import StoredText
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import SpeculationStats, TimelineRecord

log = logging.getLogger("emberkeep.sched")

T = TypeVar("T")


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
        self.flush: Callable[[bool], None] = lambda hurry: None
        """Called on the engine's thread when outputs may have something new; in a hurry before what may take long.
        Set before anything is submitted."""
        self.engine = engine
        """Belongs to its own thread: others read what it can do. Its attention and its experts are switched only
        by `when_idle`, and experts are reset only by `call`."""
        self.store = store
        store.follow(engine.fingerprint)
        self._inbox = Inbox()
        self._is_stopped = False
        self._when_idle: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        """No sequence is started while something is in here."""
        self._failed_with = ""
        """What has ended the loop, if anything did."""
        self._parts = parts = SchedulerParts(engine, store, settings, draft, self._wake)
        self.calibration, self.counters = parts.calibration, parts.counters
        self._waiting, self._slots, self._draft = parts.waiting, parts.slots, parts.draft
        self._endings = Endings(parts)
        self._steps = Steps(parts, self._endings, self._flush, self._is_wanted)
        self._beginnings = Beginnings(parts, self._endings)
        self._gaps = Gaps(parts, self._is_wanted)
        self._thread = thread or EngineThread()
        self._running = self._thread.submit(self._run)

    # ── from any thread ──

    def submit(self, sequence: Sequence) -> None:
        """Raises Overloaded once the scheduler is being closed, EngineError when it has failed."""
        self._inbox.enter(
            EngineCall(lambda: self._came(sequence), lambda: self._endings.turn_away(sequence, self._over()))
        )

    def failure(self) -> EngineError | None:
        """Why nothing will ever be answered again; None while all is well, and when it was closed."""
        if not self._failed_with:
            return None
        return EngineError(
            f"The engine has failed ({self._failed_with}) and answers no more: start again; the log says why."
        )

    def cancel(self, sequence: Sequence) -> None:
        """Stop within one step. What was computed is kept; the output gets nothing more."""
        self._inbox.put(EngineCall(lambda: self._endings.cancel(sequence)))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread between two steps. Raises as `submit` does."""
        future, run = promised(action)
        self._inbox.enter(EngineCall(run, lambda: self._give_up(future)))
        return future

    def make_room(self, sequence: Sequence, prompt: Prompt | None) -> None:
        """Let a sequence whose context is full go on with a shorter prompt, or (None) end where it is."""
        with suppress(Overloaded, EngineError):  # then it has been ended already
            self.call(lambda: self._steps.go_on_with(sequence, prompt))

    def when_idle(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine's thread while the engine holds nothing.

        Running sequences finish before it, new ones wait for it, and idle ones are dropped: the store has them as
        well. What is computed after it may have another fingerprint: while it has, nothing of it is stored, and
        nothing stored is used for it. An error of `action` ends the scheduler, since it is not known what it left
        of the engine. Raises as `submit` does; an action that still waits then fails with the same.
        """
        promise = promised(action)
        self._inbox.enter(EngineCall(lambda: self._when_idle.append(promise), lambda: self._give_up(promise[0])))
        return promise[0]

    def stored_text(self, lineage: Lineage) -> StoredText:
        """What is stored of a lineage, by other processes too, for a prompt that is still text. Reads the
        index."""
        for store in self.stores:
            store.refresh()
        snapshots = self.engine.capabilities.kv_unit.has_snapshots
        return StoredText(self.store, self._parts.recent, self.engine.vocab, lineage, snapshots=snapshots)

    def close(self) -> None:
        """No new sequences; let running ones finish until the deadline, keep what they computed, free the
        engine."""
        self._inbox.shut()
        deadline = monotonic() + self._parts.settings.drain_s
        while not self._running.done() and monotonic() < deadline and self._is_busy():
            wait([self._running], timeout=0.02)
        self._inbox.put(EngineCall(self._stop))
        self._thread.end()

    def forget(self, owners: Container[str]) -> Future[None]:
        """Drop what is idle in the engine for these, and what is remembered of their answers. Sequences that are
        here now go on, and leave nothing behind."""

        def drop() -> None:
            for sequence in self._waiting:
                if sequence.lineage.owner in owners:
                    sequence.forget()
            self._waiting.forget()
            self._gaps.end_rest()
            self._slots.forget(owners)
            self._parts.recent.forget(owners)
            self._parts.timeline.forget(owners)
            self.store.corpus.forget(owners)
            if self._draft is not None:
                self._draft.forget(owners)

        return self.call(drop)

    def drop_idle(self, entries: Iterable[EntryId], unnamed_s: float | None = None) -> Future[None]:
        """Give up the idle sequences of `entries`, and with `unnamed_s` those without an entry that have rested
        for so many seconds: the store has them as well."""
        listed = set(entries)

        def drop() -> None:
            self._gaps.end_rest()
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

    def idle_entries(self) -> dict[EntryId, int]:
        """Entries whose latest state is in the engine, with its length."""
        return {s.entry: s.computed for s in self._slots.idle if s.entry is not None}

    def speculation_stats(self) -> SpeculationStats:
        return self._parts.speculation.stats()

    def stats(self) -> dict[str, object]:
        active = self._slots.active
        return {
            "active": len(active) - self._endings.closed,
            "waiting": len(self._waiting),
            "idle_sequences": len(self._slots.idle),
            "resident_tokens": sum(s.computed for s in [*active, *self._slots.idle]),
            "slots": self._slots.stats(),
            **asdict(self.counters),
        }

    def timeline(self) -> list[TimelineRecord]:
        """Those that are here and the latest that were, the newest first."""
        return self._parts.timeline.read([*self._waiting, *self._slots.active])

    # ── the steps ──

    def _is_wanted(self) -> bool:
        return not self._inbox.is_empty

    def _wake(self) -> None:
        self._inbox.put(EngineCall(lambda: None))

    def _run(self) -> None:
        try:
            has_work = False
            while self._take_commands(wait=not has_work):
                self._act_when_idle()
                self._admit()
                self._steps.run()
                has_work = self._has_work()
                self._flush(hurry=not has_work)
                self._check_slots()
        except BaseException as error:
            self._failed_with = type(error).__name__
            log.critical("the engine's thread failed", exc_info=error)
        finally:
            insist(self._end_everything, "ending all requests")
            insist(lambda: self.flush(True), "telling what has ended")
            insist(self.engine.close, "closing the engine")
            if self._draft is not None:
                self._draft.close()

    def _flush(self, hurry: bool) -> None:
        """Wake the readers of new output. It is tried twice before a failure ends the scheduler."""
        try:
            self.flush(hurry)
        except Exception:
            log.exception("what is new could not be told")
            self.flush(hurry)

    def _check_slots(self) -> None:
        if self._slots.stuck:
            raise EngineError(f"The engine cannot forget what is in its slots {sorted(self._slots.stuck)}.")

    # ── commands ──

    def _has_work(self) -> bool:
        active = self._slots.active
        can_act = bool(self._when_idle) and not active
        can_admit = self._endings.slot_freed and len(self._waiting) > 0
        return can_act or can_admit or self._endings.closed > 0 or any(s.is_runnable for s in active)

    def _take_commands(self, *, wait: bool) -> bool:
        """Obey everything in the inbox, waiting for a first command if asked to. False: stop."""
        seconds = (self._next_deadline() or self._gaps.patience) if wait else None
        command = self._inbox.take(wait=wait, seconds=seconds)
        if command is None and wait and not self._is_busy():
            self._gaps.use()
        while command is not None:
            command.run()
            if self._is_stopped:
                return False
            command = self._inbox.take()
        self._beginnings.pump_loads()
        self._endings.expire()
        return True

    def _came(self, sequence: Sequence) -> None:
        self._gaps.end_rest()
        self.counters.jobs += 1
        self._parts.timeline.came(sequence)
        self._waiting.add(sequence)
        self._beginnings.note_forks([sequence])
        self._parts.speculation.prepare(sequence)

    def _stop(self) -> None:
        self._is_stopped = True

    def _act_when_idle(self) -> None:
        """Does nothing while a sequence is being computed."""
        while self._when_idle and not self._slots.active:
            self._slots.clear_the_way()
            future, run = self._when_idle.popleft()
            run()
            self.store.follow(self.engine.fingerprint)
            self._endings.slot_freed = True
            if not future.cancelled() and (error := future.exception()):
                raise error

    def _admit(self) -> None:
        self._endings.slot_freed = False
        if not self._when_idle:
            self._beginnings.admit()

    def _next_deadline(self) -> float | None:
        """Seconds until the first sequence, waiting or loading, runs out of time, or of patience with the disk."""
        active = self._slots.active
        awaited = [*self._waiting, *(s for s in active if s.output is not None)]
        deadlines = [sequence.deadline for sequence in awaited if sequence.deadline is not None]
        deadlines += [s.arrivals.patience_ends for s in active if s.phase is Phase.LOADING]
        return max(min(deadlines) - monotonic(), 0.001) if deadlines else None

    def _is_busy(self) -> bool:
        return bool(self._slots.active) or len(self._waiting) > 0 or not self._inbox.is_empty

    def _end_everything(self) -> None:
        """Every request that waits is told that it is over, and none comes in any more."""
        self._inbox.shut(self._over)
        while (late := self._inbox.take()) is not None:
            late.give_up()
        while self._when_idle:
            self._give_up(self._when_idle.popleft()[0])
        for sequence in self._waiting:
            self._endings.turn_away(sequence, self._over())
        for sequence in self._slots.active:
            end = self._endings.fail if self._failed_with else self._endings.stop
            end(sequence, self._over())

    def _over(self) -> EmberkeepError:
        return self.failure() or Overloaded(SHUTTING_DOWN)

    def _give_up(self, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(self._over())


# ── while no request is here ──

GAP_S, REST_S = 1.0, 40.0
"""After so long without work, what makes later work quicker is done, and memory that is not used is given back."""


class Gaps:
    """Belongs to the engine's thread."""

    def __init__(self, parts: SchedulerParts, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted`: whether something waits now."""
        self._engine, self._slots, self._draft = parts.engine, parts.slots, parts.draft
        self._is_wanted = is_wanted
        self._improvements = deque([self._improve])
        """Each is given a function that says whether something waits, and says whether all is done."""
        if self._draft is not None:
            self._improvements.append(self._draft.improve)
        self._is_resting = False

    @property
    def patience(self) -> float | None:
        """Seconds without work after which there is something to do; None: nothing."""
        return GAP_S if self._improvements else None if self._is_resting else REST_S

    def end_rest(self) -> None:
        """Something runs, or was given up: there may be memory to give back later."""
        self._is_resting = False

    def use(self) -> None:
        """Do some of what waits for a gap. What fails is in the log: it only makes later work quicker."""
        if self._improvements:
            improve = self._improvements.popleft()
            try:
                is_done = improve(self._is_wanted)
            except Exception:
                log.exception("work for a gap failed")
                return
            if not is_done:
                self._improvements.append(improve)
        elif not self._is_resting:
            self._rest()

    def _improve(self, is_wanted: Callable[[], bool]) -> bool:
        if not self._engine.can_improve:
            return True  # and the next turn finds what it wants where it was
        self._slots.clear_the_way()
        return self._engine.improve(is_wanted)

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
            self._slots.clear_the_way()
        if self._draft is not None:
            self._draft.rest()
