"""What a scheduler works with: those who begin, step and end sequences share these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from emberkeep.engine.base import Engine
from emberkeep.kv.store import KvStore
from emberkeep.sched.admission import Calibration, PeakWatch
from emberkeep.sched.draft_length import ModelDrafts
from emberkeep.sched.draft_model import DraftModel, LoadedDraft
from emberkeep.sched.prefix_cache import PrefixCache
from emberkeep.sched.records import Timeline
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import Planner, Slots, WaitingQueue
from emberkeep.sched.speculation import Speculation
from emberkeep.sched.stored_text import RecentAnswers
from emberkeep.values import dataclass


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

    def count(self, sequence: Sequence) -> None:
        """A sequence that was in the engine is over."""
        reuse = sequence.reuse
        self.prompt_tokens += sequence.prompt_length
        self.reused_hot_tokens += reuse.hot
        self.reused_warm_tokens += reuse.warm
        self.reused_cold_tokens += reuse.cold
        self.reused_remote_tokens += reuse.remote
        self.moved_tokens += reuse.moved
        self.cuts += sequence.splices
        self.evaluated_tokens += sequence.inserted_tokens
        self.repaired_tokens += reuse.repaired
        self.approximate_jobs += sequence.approximate_from is not None


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
        self.speculation = self._speculation()
        self.planner = Planner(
            engine.capabilities.batch,
            settings.prefill_slice,
            store.costs.evaluate,
            self.speculation,
            max(engine.capabilities.outputs - engine.capabilities.max_sequences, 0),
        )
        self.calibration = Calibration()
        self.watch = PeakWatch(engine, self.calibration, self._bytes_of_others)
        self.counters = SchedulerCounters()
        self.recent = RecentAnswers(4 * settings.parallel)
        self.timeline = Timeline()

    def _speculation(self) -> Speculation:
        reason = "" if self.settings.draft_max else "It is switched off: speculation = auto switches it on."
        if self.engine.capabilities.kv_unit.has_snapshots:
            reason = "This model's state cannot go back by single tokens, so nothing can be tried out."
        return Speculation(
            self.store.corpus,
            self.engine.vocab,
            partial(_step_seconds, self.engine),
            most=self.settings.draft_max,
            able=self.engine.capabilities,
            model=ModelDrafts(self.draft) if self.draft else None,
            reason=reason,
        )

    def _bytes_of_others(self) -> int:
        """On a CPU the engine's memory is the process's, and the store's payloads are in it too."""
        footprint = self.engine.footprint
        return self.store.held_bytes()[0] if footprint and footprint.device == "cpu" else 0


def _step_seconds(engine: Engine, rows: int, depth: int, outputs: int) -> float:
    seconds = engine.step_seconds(rows, depth, outputs)
    return seconds if seconds is not None else 0.01 * (0.6 + 0.4 * rows)
