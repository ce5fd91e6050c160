"""Speculation: tokens that are evaluated before they are sampled, because they are likely to be.

A draft is evaluated in the same step as the token before it, and each of its tokens is accepted only if the
sequence's own sampler draws it: text is that of plain decoding, whatever is drafted. A step with more rows takes
longer, so as many tokens are drafted as give the most tokens per second: by what steps take on this machine, and
by how often drafts of the same kind were accepted. A draft model's tokens cost time of their own, so it is asked
where it is likely to know more than what was found, which costs nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from time import perf_counter, thread_time

from emberkeep.engine.base import Engine
from emberkeep.kv.corpus import TokenCorpus
from emberkeep.sched.draft_model import DraftModel
from emberkeep.sched.drafts import WORTH, Acceptance, Chosen, Draft, SequenceDrafts, StepCost, share
from emberkeep.sched.sequence import Sequence as Running
from emberkeep.types.models import LENGTH_BUCKETS, DraftSource, SourceStats, SpeculationStats
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_LOOKING, _MOST_LOOKING_S = 0.03, 0.25
"""The share of the time in which drafts are looked for while what is found is of no use, and how much of it is
saved up at most."""
_LOOKING_AT_ONCE = 0.1
"""The share of one step that may go into it, however much is saved up."""
_CERTAIN = 0.995
_PRIOR = 8.0
"""As many expected tokens count as if they had been accepted."""

_FIXED_ROWS = 1.5
"""Rows that take as long as what a step takes for none, where that is not known."""

_Kind = tuple[DraftSource, bool, int, bool]
"""Tokens whose acceptance is counted together: after about as long a match, the first ones and the others."""


class Speculation:
    """Belongs to the engine's thread; `stats` may be called from any."""

    def __init__(self, engine: Engine, corpus: TokenCorpus, most: int, model: DraftModel | None) -> None:
        """`most`: drafted tokens per sequence and step; 0: nothing is drafted."""
        self._engine = engine
        self._corpus = corpus
        self._most = most
        self._rows = engine.capabilities.outputs - engine.capabilities.max_sequences
        self._model = ModelDrafts(model) if model else None
        self._reason = "" if most else "It is switched off: speculation = auto switches it on."
        """Why nothing is drafted; empty: it is."""
        if engine.capabilities.kv_unit.has_snapshots:
            self._reason = "This model's state cannot go back by single tokens, so nothing can be tried out."
        self._rates: defaultdict[_Kind, Acceptance] = defaultdict(lambda: Acceptance(_PRIOR, _PRIOR))
        self._tallies: dict[DraftSource, _Tally] = {}
        self._steps = 0
        self._for_looking = _MOST_LOOKING_S
        """Seconds that may be spent."""
        self._calls = 0
        self._per_row_s = 0.004
        """What a step takes for each row, where the engine does not know."""
        self.is_promising = False
        """Something will be drafted for the next step, too, as far as is known."""

    def prepare(self, sequence: Running) -> None:
        """A request has come, for which something may be drafted soon. Never raises."""
        if not self._reason and sequence.request.may_speculate and sequence.max_new:
            with _logged("nothing was prepared for drafts"):
                self._corpus.prepare(sequence.prompt.lineage)

    def step_took(self, rows: int, seconds: float) -> None:
        """The latest step."""
        self._per_row_s = seconds / (_FIXED_ROWS + rows)

    def turn_ended(self, sequence: Running) -> None:
        """What was new in it may come again. Never raises."""
        if not self._reason and sequence.is_kept:
            with _logged("an answer was not noted for drafts"):
                tokens = sequence.tokens[: sequence.computed]
                self._corpus.add(sequence.prompt.lineage, tokens, sequence.reuse.in_place)

    def draft(
        self, decoding: Sequence[Running], *, beside: int, room: int, host_s: float = 0.0, is_ahead: bool = False
    ) -> dict[Running, Chosen]:
        """What each of these sequences evaluates besides its latest token, in a step that has `beside` other rows
        and `room` for more. Never raises.

        `host_s`: what a step takes more that is not launched ahead; `is_ahead`: this one is, so nothing is
        drafted, but whether it would be is found out (`is_promising`).
        """
        self.is_promising = False
        room = min(room, self._rows)
        if self._reason or not decoding or room < 1:
            return {}
        depth = sum(s.computed for s in decoding) // len(decoding)
        step = StepCost(self._seconds, len(decoding), beside, room, depth, host_s)
        looked, drafts = self._look(decoding, step)
        limits = {s: limit for s in decoding if (limit := self._limit(s, room)) > 0} if self._model else {}
        may_ask = self._model is not None and self._model.may_be_asked(limits)
        if self._model is not None and may_ask and not is_ahead:
            with _logged("the draft model was not asked"):
                drafts |= self._model.ask(limits, drafts, step)
                may_ask = not self._model.is_left_out
        counts = share(drafts, step)[0] if drafts else {}
        for sequence in looked:
            if sequence.drafts is not None:
                sequence.drafts.are_used = sequence in counts
        self.is_promising = bool(counts) or may_ask
        if is_ahead:
            return {}
        kept = {s: Chosen(drafts[s].draft, count, drafts[s].chances[:count]) for s, count in counts.items()}
        self._steps += bool(kept)
        return kept

    def _look(self, decoding: Sequence[Running], step: StepCost) -> tuple[list[Running], dict[Running, Chosen]]:
        """Drafts that need no model: for sequences whose latest ones were of use, and for others in turn, as long
        as there is time for it."""
        self._calls += 1
        seconds = step.seconds(step.decoding + step.beside, step.depth, step.decoding)
        self._for_looking = min(self._for_looking + _LOOKING * seconds, _MOST_LOOKING_S)
        looked = [s for s in decoding if _is_used(s)]
        drafts = {s: chosen for s in looked if (chosen := self._propose(s, step.room)) is not None}
        if self._for_looking <= 0:
            return looked, drafts
        begin = thread_time()  # of its own: who else runs here takes nothing of it
        others = [s for s in decoding if not _is_used(s) and self._limit(s, step.room) > 0]
        spent, most = 0.0, min(self._for_looking, _LOOKING_AT_ONCE * seconds)
        for sequence in sorted(others, key=lambda s: s.drafts.looked if s.drafts else 0):
            if spent and spent >= most:
                break
            if (chosen := self._propose(sequence, step.room)) is not None:
                drafts[sequence] = chosen
            looked.append(sequence)
            spent = thread_time() - begin
        self._for_looking -= spent
        return looked, drafts

    def settle(self, sequence: Running, chosen: Chosen, accepted: int) -> None:
        """A draft was evaluated, and so many of its tokens were accepted."""
        source = chosen.draft.source
        self._tallies.setdefault(source, _Tally()).add(chosen.count, accepted)
        if self._model is not None and source is DraftSource.MODEL:
            self._model.settle(sequence, chosen, accepted)
            return
        for place, chance in enumerate(chosen.chances[: accepted + 1]):
            rate = self._rates[_kind(chosen.draft, place)]
            rate.add(chance / rate.value, place < accepted)
        if sequence.drafts is not None:
            sequence.drafts.are_used = accepted > 0
            sequence.drafts.trust.settle(chosen.chances, accepted)

    def stats(self) -> SpeculationStats:
        sources = {
            source.value: SourceStats(tally.drafts, tally.drafted, tally.accepted, tuple(tally.lengths))
            for source, tally in list(self._tallies.items())
        }
        return SpeculationStats(
            enabled=not self._reason,
            reason=self._reason,
            steps=self._steps,
            drafted_tokens=sum(each.drafted_tokens for each in sources.values()),
            accepted_tokens=sum(each.accepted_tokens for each in sources.values()),
            sources=sources,
            draft_model=self._model.stats() if self._model else None,
        )

    def _seconds(self, rows: int, depth: int, outputs: int) -> float:
        seconds = self._engine.step_seconds(rows, depth, outputs)
        return seconds if seconds is not None else self._per_row_s * (_FIXED_ROWS + rows)

    def _limit(self, sequence: Running, room: int) -> int:
        if not sequence.request.may_speculate or not sequence.sampled_count:
            return 0
        return min(self._most, room, sequence.max_new - sequence.sampled_count - 1)

    def _propose(self, sequence: Running, room: int) -> Chosen | None:
        """The best draft for a sequence that needs no model, as long as it can be."""
        limit = self._limit(sequence, room)
        if limit < 1:
            return None
        options: list[Chosen] = []
        with _logged("nothing could be drafted for a request"):
            if sequence.drafts is None:
                before = sequence.tokens[: sequence.prompt_length]
                sequence.drafts = SequenceDrafts(
                    sequence.prompt, before, sequence.sampler, self._corpus, self._engine.vocab
                )
            sequence.drafts.looked = self._calls
            trust = sequence.drafts.trust
            trust.rest()
            proposed = sequence.drafts.propose(sequence.tokens[:], sequence.sampled_count, limit)
            options = [self._weighed(draft, trust.value) for draft in proposed]
        return max(options, key=Chosen.expected_tokens, default=None)

    def _weighed(self, draft: Draft, trust: float) -> Chosen:
        chances, before = [], 1.0
        for place, agreement in enumerate(draft.agreement):
            usual = self._rates[_kind(draft, place)].value
            chances.append(min(usual * trust * agreement / before, _CERTAIN))
            before = agreement
        return Chosen(draft, len(chances), chances)


@dataclass(slots=True)
class _Tally:
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTH_BUCKETS)

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.lengths[min(accepted, LENGTH_BUCKETS - 1)] += 1


def _is_used(sequence: Running) -> bool:
    """Its latest drafts were of use."""
    return sequence.drafts is not None and sequence.drafts.are_used


@contextmanager
def _logged(failure: str) -> Iterator[None]:
    """What goes wrong in it makes answers slower, and nothing else."""
    try:
        yield
    except Exception:
        log.exception(failure)


def _kind(draft: Draft, place: int) -> _Kind:
    return draft.source, draft.is_rewriting, draft.matched.bit_length(), place > 0


# ── a draft model ──

_MOST = 16
"""Tokens that are drafted for one answer in one step, at most."""
_SLICE = 1.0
"""Times what a step takes: about so long it may take besides to catch up with a sequence."""
_HARDLY_MORE = 1.2
"""Times what a step takes with the drafts that are best: one with twice as many may take so long."""
_FURTHER = 4
"""Tokens more than what was best so far that are still looked at."""
_WORTH_CATCHING_UP = 0.5
"""The share that catching up may take of the time gained in the rest of the answers (`_USUAL_REST` tokens)."""
_USUAL_REST = 256
_LEFT_OUT, _MOST_LEFT_OUT = 7, 15
"""Steps after one in which it was not worth it, and after the next: a step in which it is asked is not launched
ahead. After more its shadows would lag too far behind to try it."""
_FOR_TRIALS = 0.01
"""The share of the time in which a model that was not worth it is tried again."""
_ASSUMED = 0.7
"""How likely a token is accepted, before anything is known."""
_ASSUMED_TOKENS = 4.0
"""Tokens that what is assumed counts as."""


class ModelDrafts:
    """Belongs to the engine's thread; `stats` may be called from any."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._all = Acceptance(_ASSUMED_TOKENS, _ASSUMED_TOKENS * _ASSUMED)
        self._by_sureness = [
            Acceptance(_ASSUMED_TOKENS, _ASSUMED_TOKENS * (0.3 + 0.65 * (tenth + 0.5) / 10)) for tenth in range(10)
        ]
        self._for_trials = 0.0
        """Seconds that may be spent on them."""
        self._left_out, self._pause = 0, _LEFT_OUT
        """Steps that are still to be left out, and how many are the next time."""
        self.stats = model.stats

    @property
    def is_left_out(self) -> bool:
        """The next step does without it."""
        return self._left_out > 0

    def may_be_asked(self, limits: Mapping[Running, int]) -> bool:
        """In this step, which counts among those that are left out if not."""
        if self._model.reason or not limits:
            return False
        is_left_out = self._left_out > 0
        self._left_out -= is_left_out
        return not is_left_out

    def ask(
        self, limits: Mapping[Running, int], found: Mapping[Running, Chosen], step: StepCost
    ) -> dict[Running, Chosen]:
        """Drafts for those of whom the model is likely to know more than what was `found` without it."""
        one = step.cost(0)
        asking: dict[Running, float] = {}
        for sequence in limits:
            if sequence.drafts is not None:
                trust = sequence.drafts.model_trust
                trust.rest()
                chance = min(self._all.value * trust.value, _CERTAIN)
                if sequence not in found or found[sequence].expected_tokens() < _series(chance, _MOST):
                    asking[sequence] = chance
        if not asking:
            return {}
        first, plan = next(iter(asking)), self._plan(asking, found, step)
        if not self._is_worth_catching_up(asking, plan, one):
            asking = {s: chance for s, chance in asking.items() if not self._model.lag_seconds(s)}
            plan = self._plan(asking, found, step)
        if not plan.count:
            self._left_out, self._pause = self._pause, min(2 * self._pause + 1, _MOST_LEFT_OUT)
            return self._try(first, one)
        self._pause = _LEFT_OUT
        # All others wait for what is drafted for a few.
        ready = {s: asking[s] for s in self._model.ready(list(asking), _SLICE * one)}
        plan = self._plan(ready, found, step)
        return self._draft({s: min(plan.count, limits[s]) for s in ready}, plan.least) if plan.count else {}

    def settle(self, sequence: Running, chosen: Chosen, accepted: int) -> None:
        """A draft was evaluated, and so many of its tokens were accepted."""
        for place, sure in enumerate(chosen.draft.sure[: min(accepted + 1, chosen.count)]):
            self._all.add(1, place < accepted)
            self._by_sureness[_tenth(sure)].add(1, place < accepted)
        if sequence.drafts is not None:
            sequence.drafts.model_trust.settle(chosen.chances, accepted)

    def _chance(self, sequence: Running, sure: float) -> float:
        """How likely a token is accepted of which the model is so sure."""
        trust = sequence.drafts.model_trust.value if sequence.drafts else 1.0
        return min(self._by_sureness[_tenth(sure)].value * trust, _CERTAIN)

    def _is_worth_catching_up(self, asking: Mapping[Running, float], plan: _Plan, one: float) -> bool:
        """Whether the rest of the answers gains more than everything waits for; `one`: seconds of a step without
        drafts."""
        lag = sum(self._model.lag_seconds(s) for s in asking)
        rest = max((min(s.max_new - s.sampled_count, _USUAL_REST) for s in asking), default=0)
        return lag <= _WORTH_CATCHING_UP * (1 - 1 / plan.gain) * one * rest

    def _plan(self, asking: Mapping[Running, float], found: Mapping[Running, Chosen], step: StepCost) -> _Plan:
        """What gives the most tokens per second: nothing where plain decoding or what was found is quicker."""
        if not asking:
            return _NOTHING
        counts, plain = share(found, step)
        others = {s: count for s, count in counts.items() if s not in asking}
        known = step.decoding + sum(found[s].expected_tokens(count) for s, count in others.items())
        rows, each = sum(others.values()), self._model.seconds(len(asking), step.depth)
        chance = sum(asking.values()) / len(asking)
        best, best_rate = 0, WORTH * plain
        for count in range(1, min(_MOST, (step.room - rows) // len(asking)) + 1):
            expected = known + len(asking) * _series(chance, count)
            rate = expected / (step.cost(rows + count * len(asking)) + count * each)
            if rate > best_rate:
                best, best_rate = count, rate
            elif count >= best + _FURTHER:
                break
        if not best:
            return _NOTHING
        drafted = best * len(asking)
        row = max(step.cost(rows + drafted) - step.cost(rows), 0.0) / drafted
        # Drafts of which it is sure may be longer than what is best on the whole, where there is room for them.
        has_room = step.cost(rows + 2 * drafted) < _HARDLY_MORE * step.cost(rows + drafted)
        count = min(2 * best, _MOST) if has_room else best
        return _Plan(count, best_rate * (row + each / len(asking)), best_rate / plain)

    def _try(self, sequence: Running, one: float) -> dict[Running, Chosen]:
        """It was not worth it, but it may be by now: one token is drafted once in a while."""
        cost = self._model.seconds(1, 0)
        self._for_trials = min(self._for_trials + _FOR_TRIALS * one * (1 + self._left_out), max(one, cost))
        if self._for_trials < cost:
            return {}
        begin = perf_counter()
        drafts = self._draft(dict.fromkeys(self._model.ready([sequence], _SLICE * one), 1), 0.0)
        self._for_trials -= max(perf_counter() - begin, cost)
        return drafts

    def _draft(self, limits: Mapping[Running, int], least: float) -> dict[Running, Chosen]:
        """As far as a grammar lets drafts follow. The model knows of none: what is forbidden it did not guess."""
        drafts: dict[Running, Chosen] = {}
        for sequence, draft in (self._model.propose(limits, self._chance, least) if limits else {}).items():
            count = sequence.sampler.count_allowed(draft.tokens)
            if count < len(draft.tokens) and sequence.drafts is not None:
                sequence.drafts.model_trust.settle((_ASSUMED,), 0)
            if count:
                draft = replace(draft, tokens=draft.tokens[:count], sure=draft.sure[:count])
                drafts[sequence] = Chosen(draft, count, [self._chance(sequence, sure) for sure in draft.sure])
        return drafts


@dataclass(frozen=True, slots=True)
class _Plan:
    count: int
    """Tokens that are drafted for each sequence."""
    least: float
    """How likely a draft must be right to be made longer."""
    gain: float
    """Times the tokens per second without the model."""


_NOTHING = _Plan(0, 0.0, 1.0)


def _tenth(sure: float) -> int:
    return min(int(10 * sure), 9)


def _series(chance: float, count: int) -> float:
    """Tokens that are accepted of so many that are equally likely."""
    return chance * (1 - chance**count) / (1 - chance)
