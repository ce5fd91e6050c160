"""Drawing the next token from logits, the same for every engine.

The order is llama.cpp's: bias and penalties, mask, then top-k, typical, top-p, min-p, then temperature. Most
requests look at a few dozen candidates, so the vocabulary is cut down before anything is sorted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.token_arrays import TokenArray
from emberkeep.types import Sampling, TokenLogprob

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

_GREEDY_BELOW = 1e-6
"""Temperatures that differ from 0 in nothing but overflowing."""
_WINDOWS = (4.0, 8.0, 16.0, 32.0)
"""Distances below the highest logit in which candidates are looked for before the whole vocabulary is sorted."""


_FORBIDDEN = np.float32(-np.inf)
_BLOCK = 64
"""Of so many logits the highest is taken first, to find the highest of all."""


class Matcher(Protocol):
    """A constraint on the next token (a grammar)."""

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Packed bits over the vocabulary, set where a token is allowed; None when everything is."""

    def advance(self, token: int) -> None: ...

    def forced(self) -> list[int]:
        """The tokens of what must come next, if there is only one way to go on; mostly none."""

    def count_allowed(self, tokens: list[int]) -> int:
        """How many of these may follow, one after the other."""


class Sampler:
    """One sequence's way of choosing tokens. Deterministic for a given seed."""

    def __init__(
        self,
        settings: Sampling,
        matcher: Matcher | None = None,
        top_logprobs: int | None = None,
        forced: Iterable[int] = (),
    ) -> None:
        """`forced`: what is chosen first, whatever the logits say."""
        self._settings = settings
        self._forced = deque(forced)
        self._matcher = matcher
        self._top_logprobs = top_logprobs
        self._uniforms = _Uniforms(settings.seed)
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.fromiter(settings.logit_bias, np.intp, len(settings.logit_bias))
        self._bias = np.fromiter(settings.logit_bias.values(), np.float32, len(settings.logit_bias))
        self._penalises = (
            settings.repetition_penalty != 1 or settings.frequency_penalty != 0 or settings.presence_penalty != 0
        )

    def sample(self, logits: Floats, pieces: Sequence[bytes]) -> tuple[int, TokenLogprob | None]:
        """The chosen token. `logits` is not modified."""
        adjusted = self._adjust(logits)
        token = self._forced.popleft() if self._forced else self._choose(adjusted)
        if self._matcher:
            self._matcher.advance(token)
        if self._penalises:
            self._counts[token] += 1
        logprob = None if self._top_logprobs is None else describe(logits, token, self._top_logprobs, pieces)
        return token, logprob

    def look_ahead(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, float]:
        """What would be chosen from these logits, which may be another model's, after `drafted`: with the random
        number that will be used there. Returns how likely it was, too. Nothing is advanced, and no grammar is
        looked at."""
        ahead = len(drafted)
        if ahead < len(self._forced):
            return self._forced[ahead], 1.0
        logits = self._adjust(logits, drafted)
        if self._settings.temperature < _GREEDY_BELOW:
            token = int(logits.argmax())
            return token, _sureness(logits, logits[token])
        place, cumulative, ids = self._draw(logits, self._uniforms.peek(ahead - len(self._forced)))
        before = cumulative[place - 1] if place else 0.0
        return place if ids is None else int(ids[place]), float((cumulative[place] - before) / cumulative[-1])

    def forced_tokens(self, limit: int) -> list[int]:
        """What a grammar leaves no choice about; it may be written in other tokens all the same."""
        return self._matcher.forced()[:limit] if self._matcher else []

    def count_allowed(self, tokens: TokenArray) -> int:
        """How many of these tokens a grammar lets follow."""
        return self._matcher.count_allowed(tokens.tolist()) if self._matcher else len(tokens)

    def _adjust(self, logits: Floats, drafted: Sequence[int] | None = None) -> Floats:
        """`drafted`: tokens that were not sampled yet, after which no grammar is asked; None: there are none."""
        mask = self._matcher.mask() if self._matcher and drafted is None else None
        counts = self._counts + Counter(drafted) if drafted and self._penalises else self._counts
        if mask is None and not len(self._bias) and not counts:
            return logits
        if len(self._bias) or counts:
            logits = logits.copy()
            logits[self._bias_ids] += self._bias
            if counts:
                self._penalise(logits, counts)
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little").view(bool)
            logits = np.where(allowed, logits, _FORBIDDEN)
        return logits

    def _penalise(self, logits: Floats, of: Counter[int]) -> None:
        ids = np.fromiter(of, np.intp, len(of))
        counts = np.fromiter(of.values(), np.float32, len(of))
        seen = logits[ids]
        factor = np.float32(self._settings.repetition_penalty)
        seen = np.where(seen > 0, seen / factor, seen * factor)
        logits[ids] = seen - counts * self._settings.frequency_penalty - self._settings.presence_penalty

    def _choose(self, logits: Floats) -> int:
        if self._settings.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        place, _, ids = self._draw(logits, self._uniforms.take())
        return place if ids is None else int(ids[place])

    def _draw(self, logits: Floats, uniform: float) -> tuple[int, Floats, Ints | None]:
        """Which of the candidates that random number stands for, how likely each of them is or one before it (not
        of 1), and their ids, unless it is the whole vocabulary."""
        ids, kept = self._candidates(logits)
        cumulative = _weights(kept / np.float32(self._settings.temperature)).cumsum()
        place = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        return min(place, len(kept) - 1), cumulative, ids

    def _candidates(self, logits: Floats) -> tuple[Ints | None, Floats]:
        """What may be drawn: ids and logits. No ids: it is the whole vocabulary."""
        settings = self._settings
        ids, kept = None, logits
        if settings.top_k > 0:
            ids = _top_k(logits, settings.top_k)
            kept = logits[ids]
            if settings.typical_p >= 1:
                count = _count_likely(kept, settings.top_p, settings.min_p)
                return ids[:count], kept[:count]
        for cut, mass in ((_typical, settings.typical_p), (_nucleus, settings.top_p)):
            if mass < 1:
                chosen = cut(kept, mass)
                ids, kept = chosen if ids is None else ids[chosen], kept[chosen]
        if settings.min_p > 0:
            likely = np.flatnonzero(kept >= kept.max() + math.log(settings.min_p))
            ids, kept = likely if ids is None else ids[likely], kept[likely]
        return ids, kept


class _Uniforms:
    """Random numbers from 0 to 1, always the same for a seed, whoever looks at them before they are taken."""

    def __init__(self, seed: int | None) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._seen: deque[float] = deque()

    def take(self) -> float:
        return self._seen.popleft() if self._seen else self._random.random()

    def peek(self, ahead: int) -> float:
        while len(self._seen) <= ahead:
            self._seen.append(self._random.random())
        return self._seen[ahead]


def describe(logits: Floats, token: int, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """Log-probabilities under the model's own distribution, before any sampling setting."""
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    top = min(top, len(logits) - 1)
    best = np.argpartition(-shifted, top)[:top] if top else np.empty(0, np.intp)
    best = best[np.argsort(-shifted[best], kind="stable")]
    alternatives = tuple(TokenLogprob(int(i), pieces[i], float(shifted[i] - total)) for i in best)
    return TokenLogprob(token, pieces[token], float(shifted[token] - total), alternatives)


def _top_k(logits: Floats, count: int) -> Ints:
    """Ids of the `count` highest logits, highest first."""
    width = len(logits) // _BLOCK
    if width > count:
        # As many columns as are asked for have one that is at least as high as this, and all that are lie in them.
        table = logits[: width * _BLOCK].reshape(_BLOCK, width)
        highest = table.max(axis=0)
        lowest = np.partition(highest, width - count)[width - count]
        if lowest > -np.inf:
            (columns,) = (highest >= lowest).nonzero()
            rows, places = np.divmod((table.take(columns, axis=1) >= lowest).ravel().nonzero()[0], len(columns))
            (rest,) = (logits[width * _BLOCK :] >= lowest).nonzero()
            ids = np.concatenate([rows * width + columns[places], width * _BLOCK + rest])
            return _sorted(logits, ids)[:count]
    (ids,) = (logits > -np.inf).nonzero()
    return _sorted(logits, ids)[:count]


def _count_likely(highest: Floats, top_p: float, min_p: float) -> int:
    """How many of the highest logits, the highest first, top-p and then min-p leave."""
    count = len(highest)
    if top_p < 1:
        mass = _weights(highest).cumsum()
        count = min(count, int(mass.searchsorted(top_p * float(mass[-1]))) + 1)
    if min_p > 0:
        count = min(count, int(np.count_nonzero(highest >= highest[0] + math.log(min_p))))
    return count


def _sureness(logits: Floats, highest: np.float32) -> float:
    """About the probability of the likeliest token, in a tenth of the time: of each block the highest counts."""
    width = len(logits) // _BLOCK
    if width > 1:
        logits = logits[: width * _BLOCK].reshape(_BLOCK, width).max(axis=0)
    return float(1 / max(np.exp(logits - highest).sum(), 1.0))


def _nucleus(logits: Floats, mass: float) -> Ints:
    """Indices of the fewest tokens whose probabilities add up to `mass`, highest first."""
    weights = _weights(logits)
    mass = mass * float(weights.sum())
    for ids in _growing_windows(logits):
        if weights[ids].sum() >= mass:
            break
    else:
        ids = np.arange(len(logits))
    ids = _sorted(logits, ids)
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), mass)) + 1]


def _growing_windows(logits: Floats) -> Iterator[Ints]:
    highest = logits.max()
    for window in _WINDOWS:
        yield np.flatnonzero(logits >= highest - window)


def _sorted(logits: Floats, ids: Ints) -> Ints:
    return ids[(-logits[ids]).argsort(kind="stable")]


def _typical(logits: Floats, mass: float) -> Ints:
    """Indices, in their old order, of the locally typical set that holds `mass`."""
    p = _weights(logits)
    p /= p.sum()
    surprise = -np.log(np.maximum(p, 1e-30))
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    return np.sort(order[:count])


def _weights(logits: Floats) -> Floats:
    """As probabilities are to each other."""
    weights: Floats = logits - logits.max()
    return np.exp(weights, out=weights)
