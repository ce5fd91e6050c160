"""Drawing the next token from logits, the same for every engine.

The order is llama.cpp's: bias and penalties, mask, then top-k, typical, top-p, min-p, then temperature. What few
requests ask for besides is in `sampler_chain`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import MOST_BIASED, MOST_TOLD, Choosing, Logprobs, Penalties
from emberkeep.errors import InvalidField
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import TokenLogprob
from emberkeep.types.request import Sampling

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

GREEDY_BELOW = 1e-6
"""Temperatures that differ from 0 in nothing but overflowing."""
_FORBIDDEN = np.float32(-np.inf)
_WINDOWS = (4.0, 8.0, 16.0, 32.0)
"""Distances below the highest logit in which candidates are looked for before the whole vocabulary is sorted."""
_LIKELIEST = Choosing()
_BLOCK = 64
"""The highest of all logits is looked for among the highest of every so many."""


class TokenConstraint(Protocol):
    """A constraint on the next token: a grammar's, which is imported when a request wants one."""

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
        matcher: TokenConstraint | None = None,
        top_logprobs: int | None = None,
        forced: Iterable[int] = (),
    ) -> None:
        """`forced`: what is chosen first, whatever the logits say."""
        self._settings = settings
        self._forced = deque(forced)
        self._matcher = matcher
        self._top_logprobs = top_logprobs
        self._uniforms = Uniforms(settings.seed)
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.fromiter(settings.logit_bias, np.intp, len(settings.logit_bias))
        self._bias = np.fromiter(settings.logit_bias.values(), np.float32, len(settings.logit_bias))
        self._penalises = settings.penalises
        self._temperature = np.float32(settings.temperature)
        self._is_greedy = settings.temperature < GREEDY_BELOW
        self._is_plain = matcher is None and not len(self._bias) and top_logprobs is None
        is_short = len(self._bias) <= MOST_BIASED and (top_logprobs or 0) <= MOST_TOLD
        self._can_be_chosen = is_short and settings.typical_p >= 1
        bias = tuple(settings.logit_bias.items())
        how = settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty
        self._penalties = Penalties(object(), *how, said=[], counts=self._counts) if self._penalises else None
        self._choosing = Choosing(
            0.0 if self._is_greedy else settings.temperature,
            max(settings.top_k, 0),
            settings.top_p,
            settings.min_p,
            self._uniforms.peek,
            bias,
            self._penalties,
            top_logprobs,
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the one with the highest logits, and nothing else of them is wanted."""
        return self._is_greedy and self._is_plain and not self._penalises and not self._forced

    def choosing(self, *, draws: bool) -> Choosing | None:
        """How an engine, which `draws` or knows only the likeliest, chooses the next token; `chose` is called
        then. None: it cannot."""
        if self.takes_likeliest:
            return _LIKELIEST
        if not (draws and self._can_be_chosen) or self._forced:
            return None
        if self._matcher is None:
            return self._choosing
        try:
            return replace(self._choosing, mask=self._matcher.mask())
        except InvalidField:  # as `sample` will say, where it ends this sequence alone
            return None

    def chose(self, token: int) -> None:
        """The engine has chosen."""
        if not self._is_greedy:
            self._uniforms.take()
        if self._matcher:
            self._matcher.advance(token)
        self._accept(token, None)

    def sample(self, logits: Floats, pieces: Sequence[bytes]) -> tuple[int, TokenLogprob | None]:
        """The chosen token. `logits` is not modified."""
        adjusted = self._adjust(logits)
        draw = None
        if self._forced:
            token = self._forced.popleft()
        elif self._is_greedy:
            token = int(adjusted.argmax())
        else:
            draw = self._draw(adjusted)
            token = draw.token
        if self._matcher:
            self._matcher.advance(token)
        self._accept(token, draw)
        if self._top_logprobs is None:
            return token, None
        return token, self._describe(logits, token, draw, pieces)

    def score(self, logits: Floats, token: int, pieces: Sequence[bytes]) -> TokenLogprob:
        """How likely a token of the prompt was. Nothing is chosen."""
        return describe(logits, token, self._top_logprobs or 0, pieces)

    def look_ahead(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, float]:
        """What would be chosen from these logits, which may be another model's, after `drafted`: with the random
        number that will be used there. Returns how likely it was, too. Nothing is advanced, and no grammar is
        looked at."""
        ahead = len(drafted)
        if ahead < len(self._forced):
            return self._forced[ahead], 1.0
        logits = self._adjust(logits, drafted)
        if self._is_greedy:
            token = int(logits.argmax())
            return token, sureness(logits, logits[token])
        draw = self._draw(logits, drafted, ahead - len(self._forced))
        return draw.token, draw.probability

    def forced_tokens(self, limit: int) -> list[int]:
        """What a grammar leaves no choice about; it may be written in other tokens all the same."""
        return self._matcher.forced()[:limit] if self._matcher else []

    def count_allowed(self, tokens: TokenArray) -> int:
        """How many of these tokens a grammar lets follow."""
        return self._matcher.count_allowed(tokens.tolist()) if self._matcher else len(tokens)

    def _accept(self, token: int, draw: Draw | None) -> None:
        """A token was sampled; no draw: it was forced, or the likeliest."""
        if self._penalties is not None:
            self._counts[token] += 1
            self._penalties.said.append(token)

    def _describe(self, logits: Floats, token: int, draw: Draw | None, pieces: Sequence[bytes]) -> TokenLogprob:
        return describe(logits, token, self._top_logprobs or 0, pieces)

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
                ids = np.fromiter(counts, np.intp, len(counts))
                times = np.fromiter(counts.values(), np.float32, len(counts))
                logits[ids] = penalise(logits[ids], times, self._settings)
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little").view(bool)
            logits = np.where(allowed, logits, _FORBIDDEN)
        return logits

    def _draw(self, logits: Floats, drafted: Sequence[int] = (), ahead: int | None = None) -> Draw:
        """With the random number for the token after `ahead` others, which stays to be taken; None: the next."""
        uniform = self._uniforms.take() if ahead is None else self._uniforms.peek(ahead)
        left = self._candidates(logits, drafted, ahead).in_order()
        cumulative = weights(left.logits).cumsum()
        place = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        return Draw(min(place, len(left.logits) - 1), cumulative, left)

    def _candidates(self, logits: Floats, drafted: Sequence[int], ahead: int | None) -> Candidates:
        """What may be drawn, with the temperature in the logits."""
        left = self._likely(logits)
        return Candidates(left.ids, left.logits / self._temperature)

    def _likely(self, logits: Floats) -> Candidates:
        settings = self._settings
        if settings.top_k > 0 and settings.typical_p >= 1:
            ids = top_k(logits, settings.top_k)
            kept = logits[ids]
            count = count_likely(kept, settings.top_p, settings.min_p)
            return Candidates(ids[:count], kept[:count])
        left = Candidates(None, logits)
        if settings.top_k > 0:
            left = left.only(top_k(logits, settings.top_k))
        for cut, mass in ((typical, settings.typical_p), (nucleus, settings.top_p)):
            if mass < 1:
                left = left.only(cut(left.logits, mass))
        return left.only(relatively_likely(left.logits, settings.min_p)) if settings.min_p > 0 else left


class Draw(NamedTuple):
    place: int
    cumulative: Floats
    """How likely each candidate is or one before it (not of 1)."""
    candidates: Candidates

    @property
    def token(self) -> int:
        return self.candidates.token(self.place)

    @property
    def probability(self) -> float:
        before = self.cumulative[self.place - 1] if self.place else 0.0
        return float((self.cumulative[self.place] - before) / self.cumulative[-1])


class Uniforms:
    """Random numbers from 0 to 1, always the same for a seed, whoever looks at them before they are taken."""

    def __init__(self, seed: int | None, stream: int = 0) -> None:
        """`stream`: there are several of one seed, which have nothing to do with each other."""
        self._seeds = [seed, stream] if seed is not None and stream else seed
        self._seen: deque[float] = deque()

    @cached_property
    def _random(self) -> np.random.Generator:
        """Many answers need none."""
        return np.random.Generator(np.random.PCG64(self._seeds))

    def take(self) -> float:
        return self._seen.popleft() if self._seen else self._random.random()

    def peek(self, ahead: int) -> float:
        while len(self._seen) <= ahead:
            self._seen.append(self._random.random())
        return self._seen[ahead]


def describe(logits: Floats, token: int, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """Log-probabilities under the model's own distribution, before any sampling setting; of equal ones the lowest
    ids come first."""
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    best = top_k(logits, top) if top else np.empty(0, np.intp)
    alternatives = tuple(TokenLogprob(int(i), pieces[i], float(shifted[i] - total)) for i in best)
    return TokenLogprob(token, pieces[token], float(shifted[token] - total), alternatives)


def tell(token: int, logprobs: Logprobs, pieces: Sequence[bytes]) -> TokenLogprob:
    """As `describe`, of what an engine has found out."""
    own, likeliest = logprobs
    return TokenLogprob(token, pieces[token], own, tuple(TokenLogprob(i, pieces[i], by) for i, by in likeliest))


# ── what may be drawn ──


class Candidates(NamedTuple):
    ids: Ints | None
    """None: the whole vocabulary."""
    logits: Floats

    def only(self, places: Ints) -> Candidates:
        return Candidates(places if self.ids is None else self.ids[places], self.logits[places])

    def ranked(self) -> Candidates:
        """The highest first."""
        return self.only(by_rank(self.logits, np.arange(len(self.logits))))

    def in_order(self) -> Candidates:
        """By their ids, so that the same number draws the same token wherever it is drawn."""
        return self if self.ids is None else self.only(self.ids.argsort())

    def token(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])


def penalise(found: Floats, counts: Floats, settings: Sampling) -> Floats:
    """The logits of tokens that came so often."""
    factor = np.float32(settings.repetition_penalty)
    lower: Floats = np.where(found > 0, found / factor, found * factor)
    lower -= counts * np.float32(settings.frequency_penalty) + np.float32(settings.presence_penalty)
    return lower


def top_k(logits: Floats, count: int) -> Ints:
    """Indices of the `count` highest logits, highest first."""
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
            return by_rank(logits, ids)[:count]
    (ids,) = (logits > -np.inf).nonzero()
    return by_rank(logits, ids)[:count]


def count_likely(highest: Floats, top_p: float, min_p: float) -> int:
    """How many of the highest logits, the highest first, top-p and then min-p leave."""
    count = len(highest)
    if top_p < 1:
        mass = weights(highest).cumsum()
        count = min(count, int(mass.searchsorted(top_p * float(mass[-1]))) + 1)
    if min_p > 0:
        count = min(count, int(np.count_nonzero(highest >= highest[0] + math.log(min_p))))
    return count


def sureness(logits: Floats, highest: np.float32) -> float:
    """About the probability of the likeliest token, in a tenth of the time: of each block the highest counts."""
    width = len(logits) // _BLOCK
    if width > 1:
        logits = logits[: width * _BLOCK].reshape(_BLOCK, width).max(axis=0)
    return float(1 / max(np.exp(logits - highest).sum(), 1.0))


def nucleus(logits: Floats, mass: float, least: int = 0) -> Ints:
    """Indices of the fewest tokens, `least` at least, whose probabilities add up to `mass`, highest first."""
    likely = weights(logits)
    mass = mass * float(likely.sum())
    for ids in _growing_windows(logits):
        if len(ids) >= least and likely[ids].sum() >= mass:
            break
    else:
        ids = np.arange(len(logits))
    ids = by_rank(logits, ids)
    return ids[: max(int(np.searchsorted(np.cumsum(likely[ids]), mass)) + 1, least)]


def _growing_windows(logits: Floats) -> Iterator[Ints]:
    highest = logits.max()
    for window in _WINDOWS:
        yield np.flatnonzero(logits >= highest - window)


def relatively_likely(logits: Floats, share: float, least: int = 0) -> Ints:
    """Indices of the tokens with at least that share of the likeliest one's probability; of the `least` likeliest
    where they are fewer."""
    ids = np.flatnonzero(logits >= logits.max() + math.log(share))
    return ids if len(ids) >= least else by_rank(logits, np.arange(len(logits)))[:least]


def near_highest(logits: Floats, deviations: float) -> Ints:
    """Indices of the logits that are at most so many standard deviations below the highest; those that are out of
    the question do not count."""
    finite = logits[logits > -np.inf].astype(np.float64)
    return np.flatnonzero(logits >= finite.max() - deviations * finite.std())


def typical(logits: Floats, mass: float, least: int = 0) -> Ints:
    """Indices, in their old order, of the locally typical set that holds `mass` and `least` tokens at least."""
    p = probabilities(logits)
    surprise = -np.log(np.maximum(p, 1e-30))
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    return np.sort(order[: max(count, least)])


def by_rank(logits: Floats, ids: Ints) -> Ints:
    return ids[(-logits[ids]).argsort(kind="stable")]


def weights(logits: Floats) -> Floats:
    relative: Floats = logits - logits.max()
    return np.exp(relative, out=relative)


def probabilities(logits: Floats) -> Floats:
    likely = weights(logits)
    likely /= likely.sum()
    return likely
