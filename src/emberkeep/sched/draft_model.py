"""A draft model: a second, smaller engine with the same vocabulary, which drafts for the sequences of the first.

Each sequence that it drafts for has a shadow in it, with the same tokens and the same owner: its state is found,
stored, kept and forgotten as the sequence's own is, in a store of its own. A shadow that lags behind (a long
prompt) is brought along in slices, beside the steps of the first engine, and nothing is drafted for it until then.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import field, replace
from time import perf_counter

import numpy as np

from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.errors import EngineError
from emberkeep.kv.entries import EntryId
from emberkeep.kv.store import KvStore
from emberkeep.sched.drafts import Draft
from emberkeep.sched.engine_thread import insist
from emberkeep.sched.prefix_cache import PrefixCache
from emberkeep.sched.sequence import FAIR_SLICE, Sequence, slice_within
from emberkeep.sched.sequence_state import Phase
from emberkeep.sched.slots import Slots
from emberkeep.types.lineage import EXACT_BITS
from emberkeep.types.models import DraftModelStats, DraftSource
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_FEW = 4
"""Tokens sampled since the latest draft: a step of so many is as quick as one of a draft, if it gives logits after
each as that does."""
_NEAR = 32
"""Tokens that a shadow may lag behind and still be drafted for in the same step."""
_MEASURED = 8
"""Latest measurements that count."""

Chance = Callable[[Sequence, float], float]
"""How likely a token is accepted for a sequence, from how sure the draft model is of it."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """What a draft model is made of: an engine, and a store of the engine's fingerprint."""

    name: str
    engine: Engine
    store: KvStore


class DraftModel:
    """Belongs to the engine's thread, and so does its engine; `stats` and `reason` may be read from any.

    Nothing that it is asked raises: an error ends it, and is told by `reason`.
    """

    def __init__(self, loaded: LoadedDraft, tracked: int, prefill_slice: int, wake: Callable[[], None]) -> None:
        """`wake` is called from the store's threads when bytes have arrived."""
        self.reason = ""
        """Why nothing is drafted any more; empty: it is."""
        self.store = loaded.store
        self._name = loaded.name
        self._engine = loaded.engine
        self._context = loaded.engine.capabilities.context
        self._slots = Slots(loaded.engine, tracked)
        self._cache = PrefixCache(loaded.engine, loaded.store, self._slots, wake)
        self._commits = self._cache.commits
        self._largest_slice = min(prefill_slice, loaded.engine.capabilities.batch)
        self._times = _StepTimes(loaded.engine)
        self._shadows: dict[Sequence, Sequence] = {}
        self._steps = self._evaluated = 0
        loaded.store.follow(loaded.engine.fingerprint)

    # ── drafting ──

    def ready(self, targets: Items[Sequence], seconds: float) -> list[Sequence]:
        """Those of `targets` that it can draft for now. Another one is brought along by a slice of about
        `seconds`."""
        with self._or_end():
            return self._ready(targets, seconds)
        return []

    def lag_seconds(self, target: Sequence) -> float:
        """What it takes until `target` can be drafted for; 0 while that is not known."""
        shadow = self._shadows.get(target)
        if shadow is None or shadow.phase is not Phase.EVALUATING:
            return 0.0
        lag = len(target.tokens) - shadow.computed - _NEAR
        return self.store.costs.evaluate.seconds(max(lag, 0))

    def seconds(self, rows: int, depth: int) -> float:
        """What one more token for each of `rows` sequences takes."""
        return self._times.seconds(rows, depth)

    def propose(self, limits: Mapping[Sequence, int], chance: Chance, least: float) -> dict[Sequence, Draft]:
        """Drafts for sequences that are `ready`, as long as their limits at most, and as all of a draft is
        accepted with a chance of at least `least`."""
        with self._or_end():
            return self._propose([_Writing(t, self._shadows[t], n) for t, n in limits.items()], chance, least)
        return {}

    def _ready(self, targets: Items[Sequence], seconds: float) -> list[Sequence]:
        if self._slots.stuck:
            raise EngineError("It cannot forget what it has computed.")
        near: list[Sequence] = []
        behind: Sequence | None = None
        room = self._engine.capabilities.batch
        for target in targets:
            if len(target.tokens) > self._context:
                continue
            shadow = self._shadow(target)
            if shadow.phase is Phase.EVALUATING:
                self._follow(shadow, target)
                if shadow.pending <= min(_NEAR, room):
                    near.append(target)
                    room -= shadow.pending
                    continue
            behind = behind or self._awaited(shadow)
        if behind is not None:
            speed = self.store.costs.evaluate
            self._evaluate_slice(behind, slice_within(seconds, speed, FAIR_SLICE, self._largest_slice))
        return near

    def _shadow(self, target: Sequence) -> Sequence:
        """Its shadow, in the engine if there is room and nothing better to wait for."""
        shadow = self._shadows.get(target)
        if shadow is None:
            shadow = self._shadows[target] = self._shadow_of(target)
        if shadow.phase is Phase.WAITING and not self._cache.worth_waiting_for(shadow):
            self._cache.acquire(shadow)
        if shadow.phase is Phase.LOADING:
            self._cache.pump(shadow)
        return shadow

    def _shadow_of(self, target: Sequence) -> Sequence:
        lineage = target.prompt.lineage.in_place
        if lineage.bits not in self._engine.capabilities.packs:
            lineage = replace(lineage, bits=EXACT_BITS)
        prompt = replace(
            target.prompt,
            tokens=target.tokens[:].copy(),
            lineage=lineage,
            read_ahead=frozenset(),
            borders=frozenset(),
            closing=(),
            max_new=min(target.max_new, 1),
            admitted=None,
            splice=None,
        )
        shadow = Sequence(prompt, target.request, target.sampler, None)
        shadow.is_kept, shadow.label, shadow.stable = target.is_kept, target.label, target.stable
        return shadow

    def _awaited(self, shadow: Sequence) -> Sequence | None:
        """Whose next slice would help it: another one's that is about to compute what it wants."""
        if shadow.phase is not Phase.WAITING:
            return shadow
        coming = self._cache.worth_waiting_for(shadow)
        return coming.sequence if coming else None

    def _follow(self, shadow: Sequence, target: Sequence) -> None:
        """What the target has accepted is to be evaluated; what it has not is gone."""
        before = shadow.computed
        kept = shadow.follow(target.tokens[:])
        if kept < before:
            self._engine.trim(shadow.slot, kept)

    def _evaluate_slice(self, shadow: Sequence, count: int) -> None:
        """Does nothing where there is no room for it, or its state is still on its way."""
        if shadow.phase is not Phase.EVALUATING:
            return
        begin, tokens = perf_counter(), shadow.tokens[shadow.computed : shadow.computed + count]
        if not self._evaluate([Rows(shadow.slot, shadow.computed, tokens, outputs=0)]):
            return
        if len(tokens) >= _NEAR:
            self.store.costs.evaluate.measure(len(tokens), perf_counter() - begin)
        shadow.evaluated(len(tokens), self._engine.capabilities.wide_rows)
        self._commits.commit(shadow)

    def _evaluate(self, batch: list[Rows]) -> bool:
        """False: there is no room for it, whatever is given up."""
        if self._slots.with_room(lambda: self._engine.evaluate(batch)) is Outcome.NO_ROOM:
            return False
        self._steps += 1
        self._evaluated += sum(len(rows.tokens) for rows in batch)
        return True

    def _propose(self, drafts: list[_Writing], chance: Chance, least: float) -> dict[Sequence, Draft]:
        drafts = [each for each in drafts if each.fit(self._context)]
        begin, steps, count = perf_counter(), self._steps, len(drafts)
        running = drafts if drafts and self._take_in(drafts) else []
        while running:
            going = [each for i, each in enumerate(running) if self._write(each, i, chance, least)]
            if not going or not self._evaluate([each.next_rows() for each in going]):
                break
            for each in going:
                each.evaluated(self._engine.capabilities.wide_rows)
            running = going
        if self._steps > steps:
            self._times.add(count, (perf_counter() - begin) / (self._steps - steps))
        return {each.target: each.draft() for each in drafts if each.tokens}

    def _take_in(self, drafts: list[_Writing]) -> bool:
        """Evaluate what was sampled since the latest drafts; False where there is no room."""
        if not self._evaluate([each.new_rows() for each in drafts]):
            return False
        for shadow in (each.shadow for each in drafts):
            shadow.evaluated(shadow.pending, self._engine.capabilities.wide_rows)
            # Now, while nothing is in it that may be taken back.
            self._commits.commit(shadow)
        return True

    def _write(self, draft: _Writing, index: int, chance: Chance, least: float) -> bool:
        """The next token of a draft; False: it goes no further."""
        logits = self._engine.logits(index, 0 if draft.tokens else draft.outputs - 1)
        token, sure = draft.target.sampler.look_ahead(logits, draft.tokens)
        if token in self._engine.vocab.eog:
            return False
        draft.tokens.append(token)
        draft.sure.append(sure)
        draft.chance *= chance(draft.target, sure)
        return len(draft.tokens) < draft.limit and draft.chance >= least

    # ── beside it ──

    def ended(self, target: Sequence, *, is_kept: bool = True) -> None:
        """A sequence is over: what was computed for it is stored as its own state is, or given up."""
        shadow = self._shadows.pop(target, None)
        if shadow is None or shadow.phase is Phase.WAITING:
            return
        with self._or_end():
            if not is_kept or not target.is_kept:
                shadow.forget()
            self._cache.abandon(shadow)
            self._follow(shadow, target)
            shadow.stable = target.stable if shadow.is_kept else None
            shadow.become_idle(self._commits.commit_turn(shadow))
            if not shadow.computed or not shadow.is_kept:
                self._slots.drop(shadow)

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        """See `Engine`: what is idle is given up for it, which the store has as well."""
        if self.reason or not self._engine.can_improve:
            return True
        self._slots.clear_the_way()
        return not self._slots.active and self._engine.improve(is_wanted)

    def rest(self) -> None:
        with self._or_end():
            self._engine.rest()

    def forget(self, owners: Container[str]) -> None:
        """Drop what is idle for these; of what is drafted for them now nothing is kept."""
        self._slots.forget(owners)
        for shadow in self._shadows.values():
            if shadow.lineage.owner in owners:
                shadow.forget()

    def drop_idle(self, entries: Container[EntryId], unnamed_s: float | None) -> None:
        self._slots.drop_idle(entries, unnamed_s)

    def stats(self) -> DraftModelStats:
        return DraftModelStats(
            name=self._name,
            reason=self.reason,
            steps=self._steps,
            evaluated_tokens=self._evaluated,
            step_ms=1e3 * self._times.seconds(1, 0),
            resident_tokens=sum(s.computed for s in [*self._slots.active, *self._slots.idle]),
        )

    def close(self) -> None:
        insist(self._engine.close, "closing the draft model")

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """Whatever goes wrong in here ends drafting with this model, and nothing else."""
        try:
            yield
        except Exception as error:
            log.exception("the draft model has failed, and drafts no more")
            self.reason = f"The draft model has failed ({type(error).__name__}): the log says why."
            self._shadows.clear()
            for shadow in [*self._slots.active, *self._slots.idle]:
                self._cache.release(shadow)
                self._slots.drop(shadow)


@dataclass(slots=True)
class _Writing:
    target: Sequence
    shadow: Sequence
    limit: int
    outputs: int = 1
    chance: float = 1.0
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)

    def fit(self, context: int) -> bool:
        """No more than there is room for in the draft model's context; False: there is none."""
        self.limit = min(self.limit, context - len(self.shadow.tokens) + 1)
        return self.limit > 0

    def new_rows(self) -> Rows:
        shadow = self.shadow
        tokens = shadow.tokens[shadow.computed :]
        self.outputs = len(tokens) if len(tokens) <= _FEW else 1
        return Rows(shadow.slot, shadow.computed, tokens, self.outputs)

    def next_rows(self) -> Rows:
        return Rows(self.shadow.slot, self.shadow.computed, np.array(self.tokens[-1:], np.int32), outputs=1)

    def evaluated(self, wide_rows: int | None) -> None:
        self.shadow.tokens.extend(self.tokens[-1:])
        self.shadow.evaluated(1, wide_rows)

    def draft(self) -> Draft:
        count = len(self.tokens)
        return Draft(np.array(self.tokens, np.int32), DraftSource.MODEL, 0, (1.0,) * count, sure=tuple(self.sure))


class _StepTimes:
    """What a step of drafts takes, with choosing tokens: the lower median of what was measured latest, and until
    then as the engine says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._met: set[int] = set()
        self._latest: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MEASURED))

    def add(self, rows: int, seconds: float) -> None:
        if rows in self._met:
            self._latest[rows].append(seconds)
        self._met.add(rows)  # the first one of its size is prepared while it runs

    def seconds(self, rows: int, depth: int) -> float:
        if rows in self._latest:
            return _lower_median(self._latest[rows])
        known = self._engine.step_seconds(rows, depth, outputs=rows)
        if known is not None:
            return known
        return max(map(_lower_median, self._latest.values()), default=0.0)  # nothing is known: it is tried


def _lower_median(seconds: Collection[float]) -> float:
    return sorted(seconds)[(len(seconds) - 1) // 2]
