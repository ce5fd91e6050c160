"""How many tokens of which drafts are evaluated in a step, and whether a draft model is asked for more: as many as
give the most tokens per second.

A draft model's tokens cost time of their own, so what its steps take and how much of what it drafted was accepted
count as well. Text that was found, and went on before, comes first: it costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

from emberkeep.sched.drafts import Acceptance, Draft, SequenceDrafts
from emberkeep.sched.sequence import Sequence as Running
from emberkeep.types.speculation import DraftModelStats
from emberkeep.values import dataclass

Seconds = Callable[[int, int, int], float]
"""What a step takes: by its rows, by how many tokens there are before each of them in its sequence, and by how
many of them have logits after them."""

WORTH = 1.03
"""Drafting has to give so many times the tokens per second: measurements are not exact, and it takes time, too."""
_WORTH_BESIDE = 0.02
"""And so much more for each other sequence: steps were measured with one, and beside others rows cost more."""
CERTAIN = 0.995


@dataclass(frozen=True, slots=True)
class Chosen:
    """A draft as it is evaluated, with how likely each of its tokens was taken to be, given those before it."""

    draft: Draft
    count: int
    chances: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """The step that drafts are for."""

    seconds: Seconds
    decoding: int
    """Sequences with one row each, whatever is drafted."""
    beside: int
    room: int
    depth: int

    def cost(self, drafted: int) -> float:
        """Seconds that it takes for what it decodes and drafts, besides what it takes for its other rows."""
        alone = self.seconds(self.beside, self.depth, 1) if self.beside else 0.0
        sampled = self.decoding + drafted
        return max(self.seconds(sampled + self.beside, self.depth, sampled) - alone, 1e-9)


def share(drafts: Mapping[Running, Chosen], step: StepCost) -> tuple[dict[Running, int], float]:
    """How many tokens of each draft are evaluated: the likeliest ones, as long as more tokens per second come out
    of it. Returns the tokens per second, too."""
    likely = sorted(
        ((chance, s) for s, chosen in drafts.items() for chance in _together(chosen.chances)),
        key=lambda each: -each[0],
    )
    expected = float(step.decoding)
    plain = expected / step.cost(0)
    best, best_rate = 0, (WORTH + _WORTH_BESIDE * (step.decoding - 1)) * plain
    most = min(len(likely), step.room)
    for count, (chance, _) in enumerate(likely[:most], 1):
        expected += chance
        cost = step.cost(count)
        if expected > best_rate * cost:
            best, best_rate = count, expected / cost
        elif expected + chance * (most - count) <= best_rate * cost:
            break  # not even if the rest took no time
    counts: dict[Running, int] = defaultdict(int)
    for _, sequence in likely[:best]:
        counts[sequence] += 1
    return counts, best_rate if best else plain


def _together(chances: Sequence[float]) -> list[float]:
    """How likely it is that each token is accepted with all those before it."""
    all_before, product = [], 1.0
    for chance in chances:
        product *= chance
        all_before.append(product)
    return all_before


def expected_tokens(chosen: Chosen, count: int | None = None) -> float:
    """Tokens that are accepted, of the first `count`."""
    return sum(_together(chosen.chances[:count]))


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
_LEFT_OUT = 7
"""Steps after one in which it was not worth it: looking again would take time, too."""
_FOR_TRIALS = 0.01
"""The share of the time in which a model that was not worth it is tried again."""
_ASSUMED = 0.7
"""How likely a token is accepted, before anything is known."""
_PRIOR = 4.0
"""Tokens that what is assumed counts as."""

Chance = Callable[[Running, float], float]
"""How likely a token is accepted for a sequence, from how sure the draft model is of it."""


class Drafter(Protocol):
    """See `DraftModel`. Nothing raises."""

    @property
    def reason(self) -> str: ...

    def ready(self, targets: Sequence[Running], seconds: float) -> list[Running]: ...

    def lag_seconds(self, target: Running) -> float: ...

    def seconds(self, rows: int, depth: int) -> float: ...

    def propose(self, limits: Mapping[Running, int], chance: Chance, least: float) -> dict[Running, Draft]: ...

    def stats(self) -> DraftModelStats: ...


class ModelDrafts:
    """Belongs to the engine's thread; `stats` may be called from any."""

    def __init__(self, model: Drafter) -> None:
        self._model = model
        self._all = Acceptance(_PRIOR, _PRIOR * _ASSUMED)
        self._by_sureness = [Acceptance(_PRIOR, _PRIOR * (0.3 + 0.65 * (tenth + 0.5) / 10)) for tenth in range(10)]
        self._for_trials = 0.0
        """Seconds that may be spent on them."""
        self._left_out = 0
        """Steps that are still to be left out."""
        self.stats = model.stats

    def ask(
        self, limits: Mapping[Running, int], found: Mapping[Running, Chosen], step: StepCost
    ) -> dict[Running, Chosen]:
        """Drafts for those of whom the model is likely to know more than what was `found` without it."""
        if self._model.reason:
            return {}
        if self._left_out:
            self._left_out -= 1
            return {}
        chances = {s: self._usual(s.drafts) for s in limits if s.drafts is not None}
        one = step.cost(0)
        asking = {s: chance for s, chance in chances.items() if _knows_more(chance, found.get(s))}
        if not asking:
            return {}
        first, plan = next(iter(asking)), self._plan(asking, found, step)
        if not self._is_worth_catching_up(asking, plan, one):
            asking = {s: chance for s, chance in asking.items() if not self._model.lag_seconds(s)}
            plan = self._plan(asking, found, step)
        if not plan.count:
            self._left_out = _LEFT_OUT
            return self._try(first, one)
        # All others wait for what is drafted for a few.
        ready = {s: asking[s] for s in self._model.ready(list(asking), _SLICE * one)}
        plan = self._plan(ready, found, step)
        return self._draft({s: min(plan.count, limits[s]) for s in ready}, plan.least) if plan.count else {}

    def settle(self, sequence: Running, chosen: Chosen, accepted: int) -> None:
        """A draft was evaluated, and so many of its tokens were accepted."""
        tried = min(accepted + 1, chosen.count)
        for place, sure in enumerate(chosen.draft.sure[:tried]):
            self._all.add(1, place < accepted)
            self._by_sureness[_tenth(sure)].add(1, place < accepted)
        if sequence.drafts is not None:
            sequence.drafts.model_trust.settle(chosen.chances, accepted)

    def _usual(self, drafts: SequenceDrafts) -> float:
        drafts.model_trust.rest()
        return min(self._all.value * drafts.model_trust.value, CERTAIN)

    def _chance(self, sequence: Running, sure: float) -> float:
        trust = sequence.drafts.model_trust.value if sequence.drafts else 1.0
        return min(self._by_sureness[_tenth(sure)].value * trust, CERTAIN)

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
        known = step.decoding + sum(expected_tokens(found[s], count) for s, count in others.items())
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
        self._for_trials = min(self._for_trials + _FOR_TRIALS * one * (1 + _LEFT_OUT), max(one, cost))
        if self._for_trials < cost:
            return {}
        begin = perf_counter()
        drafts = self._draft(dict.fromkeys(self._model.ready([sequence], _SLICE * one), 1), 0.0)
        self._for_trials -= max(perf_counter() - begin, cost)
        return drafts

    def _draft(self, limits: Mapping[Running, int], least: float) -> dict[Running, Chosen]:
        drafts = self._model.propose(limits, self._chance, least) if limits else {}
        allowed = {s: _allowed(s, draft) for s, draft in drafts.items()}
        return {
            s: Chosen(draft, len(draft.tokens), [self._chance(s, sure) for sure in draft.sure])
            for s, draft in allowed.items()
            if len(draft.tokens)
        }


@dataclass(frozen=True, slots=True)
class _Plan:
    count: int
    """Tokens that are drafted for each sequence."""
    least: float
    """How likely a draft must be right to be made longer."""
    gain: float
    """Times the tokens per second without the model."""


_NOTHING = _Plan(0, 0.0, 1.0)


def _knows_more(chance: float, found: Chosen | None) -> bool:
    return found is None or expected_tokens(found) < _series(chance, _MOST)


def _allowed(sequence: Running, draft: Draft) -> Draft:
    """As far as a grammar lets it follow. The model knows of none: what is forbidden it did not guess."""
    count = sequence.sampler.count_allowed(draft.tokens)
    if count == len(draft.tokens):
        return draft
    if sequence.drafts is not None:
        sequence.drafts.model_trust.settle((_ASSUMED,), 0)
    return replace(draft, tokens=draft.tokens[:count], agreement=draft.agreement[:count], sure=draft.sure[:count])


def _tenth(sure: float) -> int:
    return min(int(10 * sure), 9)


def _series(chance: float, count: int) -> float:
    """Tokens that are accepted of so many that are equally likely."""
    return chance * (1 - chance**count) / (1 - chance)
