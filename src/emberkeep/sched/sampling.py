"""Drawing the next token from logits, the same for every engine.

The order is llama.cpp's: bias and penalties, mask, then top-k, typical, top-p, min-p, then temperature. What few
requests ask for besides is in `sampler_chain`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.sched.candidates import (
    Floats,
    Ints,
    count_likely,
    nucleus,
    relatively_likely,
    sureness,
    top_k,
    typical,
    weights,
)
from emberkeep.sched.sampler_chain import GREEDY_BELOW, Candidates, Chain, penalise
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import TokenLogprob
from emberkeep.types.sampling import Sampling

_FORBIDDEN = np.float32(-np.inf)


class TokenConstraint(Protocol):
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
        matcher: TokenConstraint | None = None,
        top_logprobs: int | None = None,
        forced: Iterable[int] = (),
        chain: Chain | None = None,
        *,
        as_drawn: bool = False,
    ) -> None:
        """`forced`: what is chosen first, whatever the logits say. `chain`: takes the place of the usual samplers.
        `as_drawn`: logprobs are those of the candidates that were drawn from, which needs a chain."""
        self._settings = settings
        self._forced = deque(forced)
        self._matcher = matcher
        self._chain = chain
        self._top_logprobs = top_logprobs
        self._as_drawn = as_drawn
        self._uniforms = _Uniforms(settings.seed)
        self._chances = _Uniforms(settings.seed, stream=1) if settings.uses_xtc else None
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.fromiter(settings.logit_bias, np.intp, len(settings.logit_bias))
        self._bias = np.fromiter(settings.logit_bias.values(), np.float32, len(settings.logit_bias))
        self._penalises = settings.penalises and chain is None
        self._temperature = np.float32(settings.temperature)
        self._is_greedy = settings.temperature < GREEDY_BELOW and chain is None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the one with the highest logits, and nothing else of them is wanted."""
        is_plain = self._matcher is None and not len(self._bias) and not self._penalises and not self._forced
        return self._is_greedy and is_plain and self._top_logprobs is None

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
        if self._chain:
            self._chain.accept(token, draw.probability if draw else None)
        if self._penalises:
            self._counts[token] += 1
        if self._top_logprobs is None:
            return token, None
        if self._as_drawn and draw is not None:
            return token, describe_draw(draw, self._top_logprobs, pieces)
        return token, describe(logits, token, self._top_logprobs, pieces)

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
        logits[ids] = penalise(logits[ids], counts, self._settings)

    def _draw(self, logits: Floats, drafted: Sequence[int] = (), ahead: int | None = None) -> _Draw:
        """With the random number for the token after `ahead` others, which stays to be taken; None: the next."""
        uniform = self._uniforms.take() if ahead is None else self._uniforms.peek(ahead)
        if self._chain is None:
            ids, kept = self._candidates(logits)
            kept = kept / self._temperature
        else:
            ids, kept = self._chain.candidates(logits, drafted, self._chance(ahead))
        cumulative = weights(kept).cumsum()
        place = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        return _Draw(min(place, len(kept) - 1), cumulative, ids)

    def _chance(self, ahead: int | None) -> float:
        if self._chances is None:
            return 0.0
        return self._chances.take() if ahead is None else self._chances.peek(ahead)

    def _candidates(self, logits: Floats) -> tuple[Ints | None, Floats]:
        """What may be drawn: ids and logits, without the temperature. No ids: it is the whole vocabulary."""
        settings = self._settings
        if settings.top_k > 0 and settings.typical_p >= 1:
            ids = top_k(logits, settings.top_k)
            kept = logits[ids]
            count = count_likely(kept, settings.top_p, settings.min_p)
            return ids[:count], kept[:count]
        left = Candidates(None, logits)
        if settings.top_k > 0:
            left = left.only(top_k(logits, settings.top_k))
        for cut, mass in ((typical, settings.typical_p), (nucleus, settings.top_p)):
            if mass < 1:
                left = left.only(cut(left.logits, mass))
        return left.only(relatively_likely(left.logits, settings.min_p)) if settings.min_p > 0 else left


class _Draw:
    __slots__ = ("cumulative", "ids", "place")

    def __init__(self, place: int, cumulative: Floats, ids: Ints | None) -> None:
        """`cumulative`: how likely each candidate is or one before it (not of 1)."""
        self.place = place
        self.cumulative = cumulative
        self.ids = ids

    @property
    def token(self) -> int:
        return self.token_at(self.place)

    @property
    def probability(self) -> float:
        before = self.cumulative[self.place - 1] if self.place else 0.0
        return float((self.cumulative[self.place] - before) / self.cumulative[-1])

    def token_at(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def shares(self) -> Floats:
        shares: Floats = np.diff(self.cumulative, prepend=np.float32(0)) / self.cumulative[-1]
        return shares


class _Uniforms:
    """Random numbers from 0 to 1, always the same for a seed, whoever looks at them before they are taken."""

    def __init__(self, seed: int | None, stream: int = 0) -> None:
        """`stream`: there are several of one seed, which have nothing to do with each other."""
        seeds = [seed, stream] if seed is not None and stream else seed
        self._random = np.random.Generator(np.random.PCG64(seeds))
        self._seen: deque[float] = deque()

    def take(self) -> float:
        return self._seen.popleft() if self._seen else self._random.random()

    def peek(self, ahead: int) -> float:
        while len(self._seen) <= ahead:
            self._seen.append(self._random.random())
        return self._seen[ahead]


def describe_draw(draw: _Draw, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """Log-probabilities among the candidates that were drawn from; those that cannot be drawn are not told."""
    shares = draw.shares().astype(np.float64)
    best = (-shares).argsort(kind="stable")[:top]
    told = [(draw.token_at(place), math.log(shares[place])) for place in best.tolist() if shares[place] > 0]
    alternatives = tuple(TokenLogprob(token, pieces[token], chance) for token, chance in told)
    chosen = math.log(max(draw.probability, 1e-30))
    return TokenLogprob(draw.token, pieces[draw.token], chosen, alternatives)


def describe(logits: Floats, token: int, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """Log-probabilities under the model's own distribution, before any sampling setting."""
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    top = min(top, len(logits) - 1)
    best = np.argpartition(-shifted, top)[:top] if top else np.empty(0, np.intp)
    best = best[np.argsort(-shifted[best], kind="stable")]
    alternatives = tuple(TokenLogprob(int(i), pieces[i], float(shifted[i] - total)) for i in best)
    return TokenLogprob(token, pieces[token], float(shifted[token] - total), alternatives)
