"""How many tokens of which drafts are evaluated in a step: as many as give the most tokens per second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from emberkeep.sched.drafts import Draft
from emberkeep.sched.sequence import Sequence as Running
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
    """Other rows."""
    room: int
    """For drafts."""
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
