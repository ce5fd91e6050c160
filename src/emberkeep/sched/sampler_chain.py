"""Samplers that few requests ask for, each as llama.cpp computes it, in the order that a request gives.

Requests without them never come here: `Sampler` has a shorter way for top-k, top-p and the like.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from emberkeep.sched import sampling as cut
from emberkeep.sched.sampling import (
    GREEDY_BELOW,
    Candidates,
    Draw,
    Floats,
    Ints,
    Sampler,
    TokenConstraint,
    Uniforms,
    penalise,
)
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import TokenLogprob
from emberkeep.types.models import Vocab
from emberkeep.types.request import Sampling

_MIROSTAT_TOKENS = 100
"""The likeliest tokens, from which Mirostat estimates how quickly tokens become unlikely."""
_LEAST_IN_GAP = 0.2
"""Text that is less likely is not drawn where a gap is filled."""
_MERGED_IN_GAP = 256
"""The likeliest tokens, among which beginnings of each other are looked for where a gap is filled: the work grows
with the square of it. Each of the others is too unlikely to be drawn, and adds next to nothing to one of these."""


class ChainedSampler(Sampler):
    """Draws from what a chain leaves."""

    def __init__(
        self,
        chain: Chain,
        settings: Sampling,
        matcher: TokenConstraint | None = None,
        top_logprobs: int | None = None,
        forced: Iterable[int] = (),
        *,
        as_drawn: bool = False,
    ) -> None:
        """`as_drawn`: logprobs are those of the candidates that were drawn from."""
        super().__init__(settings, matcher, top_logprobs, forced)
        self._chain = chain
        self._as_drawn = as_drawn
        self._penalises = self._is_greedy = self._can_be_chosen = False
        self._chances = Uniforms(settings.seed, stream=1) if settings.uses_xtc else None

    def _accept(self, token: int, draw: Draw | None) -> None:
        self._chain.accept(token, draw.probability if draw else None)

    def _candidates(self, logits: Floats, drafted: Sequence[int], ahead: int | None) -> Candidates:
        chance = 0.0
        if self._chances is not None:
            chance = self._chances.take() if ahead is None else self._chances.peek(ahead)
        return self._chain.candidates(logits, drafted, chance)

    def _describe(self, logits: Floats, token: int, draw: Draw | None, pieces: Sequence[bytes]) -> TokenLogprob:
        """What cannot be drawn is left out."""
        if not self._as_drawn or draw is None:
            return super()._describe(logits, token, draw, pieces)
        shares = (np.diff(draw.cumulative, prepend=np.float32(0)) / draw.cumulative[-1]).astype(np.float64)
        best = [
            place for place in (-shares).argsort(kind="stable")[: self._top_logprobs].tolist() if shares[place]
        ]
        likeliest = [(draw.candidates.token(place), math.log(shares[place])) for place in best]
        top = tuple(TokenLogprob(other, pieces[other], chance) for other, chance in likeliest)
        return TokenLogprob(token, pieces[token], math.log(max(draw.probability, 1e-30)), top)


class Chain:
    """The samplers of one sequence. What it knows goes on with each token that was sampled, and with nothing
    else: a draft that is taken back leaves no trace."""

    def __init__(self, settings: Sampling, vocab: Vocab, prompt: TokenArray, breakers: Breakers) -> None:
        self._settings = settings
        self._vocab = vocab
        self._dry = Dry(settings, breakers) if settings.uses_dry else None
        self._window = max((self._dry and settings.dry_penalty_last_n) or 0, settings.repeat_last_n or 0)
        self._tokens: list[int] = prompt[-self._window :].tolist() if self._window else []
        self._counts: Counter[int] = Counter()
        self._most_surprise = 2 * settings.mirostat_tau
        self._steps = [] if settings.mirostat else self._steps_of(settings)

    def candidates(self, logits: Floats, drafted: Sequence[int], chance: float) -> Candidates:
        """What may be drawn after `drafted`, which was not sampled yet, with the temperature in the logits.
        Changes nothing. `chance`: a random number from 0 to 1, for XTC."""
        left = Candidates(None, logits)
        if self._settings.mirostat:
            return self._mirostat(_heated(left, self._settings.temperature))
        for step in self._steps:
            left = step(left, drafted, chance)
        return left

    def accept(self, token: int, probability: float | None) -> None:
        """A token was sampled, and had that probability among the candidates; None: it was forced."""
        if self._window:
            self._tokens.append(token)
            if len(self._tokens) > 2 * self._window:
                del self._tokens[: -self._window]
        if self._settings.repeat_last_n is None and self._settings.penalises:
            self._counts[token] += 1
        if self._settings.mirostat and probability is not None:
            surprise = -math.log2(max(probability, 1e-30))
            self._most_surprise -= self._settings.mirostat_eta * (surprise - self._settings.mirostat_tau)

    def _steps_of(self, settings: Sampling) -> list[_Step]:
        least = settings.min_keep
        steps: Mapping[str, tuple[bool, _Step]] = {
            "penalties": (settings.penalises and settings.repeat_last_n != 0, self._penalised),
            "dry": (self._dry is not None, self._unrepeated),
            "top_n_sigma": (settings.top_n_sigma > 0, _cutting(cut.near_highest, settings.top_n_sigma)),
            "top_k": (settings.top_k > 0, _cutting(cut.top_k, settings.top_k)),
            "typ_p": (settings.typical_p < 1, _cutting(cut.typical, settings.typical_p, least)),
            "top_p": (settings.top_p < 1, _cutting(cut.nucleus, settings.top_p, least)),
            "min_p": (settings.min_p > 0, _cutting(cut.relatively_likely, settings.min_p, least)),
            "xtc": (settings.uses_xtc, self._surprising),
            "temperature": (True, self._heated),
            "infill": (True, self._filling),
        }
        return [steps[name][1] for name in settings.samplers if name in steps and steps[name][0]]

    # ── steps ──

    def _penalised(self, left: Candidates, drafted: Sequence[int], chance: float) -> Candidates:
        last = self._settings.repeat_last_n
        seen = self._counts + Counter(drafted) if last is None else Counter([*self._tokens, *drafted][-last:])
        ids = np.array(sorted(seen), np.intp)
        counts = np.array([seen[token] for token in ids.tolist()], np.float32)
        return _changed(left, ids, lambda found, of: penalise(found, counts[of], self._settings))

    def _unrepeated(self, left: Candidates, drafted: Sequence[int], chance: float) -> Candidates:
        assert self._dry is not None
        lower = self._dry.penalties(np.array([*self._tokens, *drafted], np.int32))
        ids = np.array(sorted(lower), np.intp)
        by = np.array([lower[token] for token in ids.tolist()], np.float32)
        return _changed(left, ids, lambda found, of: found - by[of])

    def _surprising(self, left: Candidates, drafted: Sequence[int], chance: float) -> Candidates:
        """Without the likely tokens, but for the least likely of them."""
        if len(left.logits) < 2 or chance > self._settings.xtc_probability:
            return left
        ranked = left.ranked()
        likely = int(np.count_nonzero(cut.probabilities(ranked.logits) >= self._settings.xtc_threshold))
        out = max(likely - 1, 0)
        stays = len(ranked.logits) - out >= self._settings.min_keep
        return ranked.only(np.arange(out, len(ranked.logits))) if out and stays else left

    def _heated(self, left: Candidates, drafted: Sequence[int], chance: float) -> Candidates:
        """The surer the model is, the lower is a dynamic temperature."""
        settings = self._settings
        if settings.dynatemp_range <= 0:
            return _heated(left, settings.temperature)
        if len(left.logits) < 2:
            return left
        p = cut.probabilities(left.logits)
        entropy = -float((p * np.log(np.maximum(p, 1e-30))).sum()) / math.log(len(p))
        lowest = max(0.0, settings.temperature - settings.dynatemp_range)
        highest = settings.temperature + settings.dynatemp_range
        return _heated(left, lowest + (highest - lowest) * max(entropy, 0.0) ** settings.dynatemp_exponent)

    def _filling(self, left: Candidates, drafted: Sequence[int], chance: float) -> Candidates:
        """For code that fills a gap: ends early rather than late, and only goes on with what is likely."""
        ranked = left.ranked()
        assert ranked.ids is not None
        p = cut.probabilities(ranked.logits).astype(np.float64)
        is_end = np.isin(ranked.ids, list(self._vocab.eog))
        ending = float(p[is_end].sum())
        if 3 * ending * len(p) > float(p.sum()) - ending:
            return ranked.only(np.flatnonzero(is_end))
        looked_at = np.flatnonzero(is_end | (np.arange(len(p)) < _MERGED_IN_GAP))
        return self._likely_in_gap(ranked.only(looked_at), p[looked_at].tolist(), is_end[looked_at].tolist())

    def _likely_in_gap(self, ranked: Candidates, p: list[float], ends: list[bool]) -> Candidates:
        """Ends, and texts that are likely with what they begin. Changes `p`."""
        self._merge_beginnings(ranked, p)
        kept = [place for place, chance in enumerate(p) if chance >= _LEAST_IN_GAP or ends[place]]
        texts = sum(not ends[place] for place in kept)
        if not texts:
            end = self._vocab.eos if self._vocab.eos is not None else min(self._vocab.eog)
            return Candidates(np.array([end], np.intp), np.ones(1, np.float32))
        least = sum(p[place] for place in kept) / (texts + 1)
        return ranked.only(np.array([place for place in kept if p[place] >= least or ends[place]], np.intp))

    def _merge_beginnings(self, ranked: Candidates, p: list[float]) -> None:
        """A token that begins another one and that one count as the likelier of the two. Changes `p`."""
        pieces = [self._vocab.pieces[ranked.token(place)] for place in range(len(p))]
        for first in range(len(p)):
            for second in range(len(p)):
                if not p[first]:
                    break
                if first == second or not p[second] or not pieces[first]:
                    continue
                if pieces[second].startswith(pieces[first]):
                    likelier, other = (second, first) if p[second] > p[first] else (first, second)
                    p[likelier], p[other] = p[likelier] + p[other], 0.0

    def _mirostat(self, left: Candidates) -> Candidates:
        if len(left.logits) == 1:
            return left
        ranked = left.ranked()
        p = cut.probabilities(ranked.logits)
        count = self._count_likely(p) if self._settings.mirostat == 1 else self._count_unsurprising(p)
        return ranked.only(np.arange(max(count, 1)))

    def _count_unsurprising(self, p: Floats) -> int:
        surprising = -np.log2(np.maximum(p, 1e-30)) > self._most_surprise
        return int(surprising.argmax()) if surprising.any() else len(p)

    def _count_likely(self, p: Floats) -> int:
        """As many as keep the surprise in bounds if tokens become unlikely as Zipf's law has it."""
        first = p[:_MIROSTAT_TOKENS].astype(np.float64)
        first = first[first > 0]
        if len(first) < 2:
            return 1
        ranks = np.arange(1, len(first))
        steps = np.log((ranks + 1) / ranks)
        exponent = float((steps * np.log(first[:-1] / first[1:])).sum() / (steps * steps).sum())
        beyond = exponent - 1
        scale = 1 - float(len(p)) ** -beyond
        if exponent <= 0 or not scale:
            return len(p)
        # In logarithms: the bound grows for as long as a model is sure, and no number holds two to that power.
        log_count = (math.log(beyond / scale) + self._most_surprise * math.log(2)) / exponent
        return len(p) if log_count >= math.log(len(p)) else int(math.exp(log_count))


_Step = Callable[[Candidates, Sequence[int], float], Candidates]


def _cutting(places: Callable[..., Ints], *limits: float) -> _Step:
    return lambda left, drafted, chance: left.only(places(left.logits, *limits))


def _changed(left: Candidates, ids: Ints, change: Callable[[Floats, Ints], Floats]) -> Candidates:
    """With other logits for those of `ids`, which are sorted: `change` gets them, and which of `ids` they are."""
    if not len(ids):
        return left
    places, of = ids, np.arange(len(ids))
    if left.ids is not None:
        nearest = np.minimum(ids.searchsorted(left.ids), len(ids) - 1)
        places = np.flatnonzero(ids[nearest] == left.ids)
        of = nearest[places]
    logits = left.logits.copy()
    logits[places] = change(logits[places], of)
    return Candidates(left.ids, logits)


def _heated(left: Candidates, temperature: float) -> Candidates:
    """At no temperature the likeliest is left."""
    if temperature < GREEDY_BELOW:
        return left.only(np.array([left.logits.argmax()]))
    return Candidates(left.ids, left.logits / np.float32(temperature))


Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""Tokens with which a text begins that ends every repetition, and what may follow each of them to complete it:
nothing, mostly."""

_MOST_BYTES = 40
"""A text that ends repetitions is cut to so many."""
_MOST_TOKENS = 20
_LARGEST_EXPONENT = 88.7228391
"""The largest power of e that a float32 holds."""


class Dry:
    """Stateless: safe to use from any thread."""

    def __init__(self, settings: Sampling, breakers: Breakers) -> None:
        self._settings = settings
        self._breakers = breakers
        self._tails = {head: sorted(map(np.array, tails), key=len) for head, tails in breakers.items()}
        self._most = _largest_exponent(settings.dry_base)

    def penalties(self, tokens: TokenArray) -> dict[int, float]:
        """How much lower the logits of some tokens are after `tokens`, of which the last count."""
        allowed = self._settings.dry_allowed_length
        tokens = tokens[-self._settings.dry_penalty_last_n :]
        if len(tokens) <= allowed:
            return {}
        limit = self._unbroken(tokens)
        if limit < allowed:
            return {}
        lengths = _repetitions(tokens, allowed, min(limit, allowed + self._most))
        multiplier, base = self._settings.dry_multiplier, self._settings.dry_base
        return {
            token: multiplier * base ** (length - allowed)
            for token, length in lengths.items()
            if () not in self._breakers.get(token, ())  # it ends a repetition
        }

    def _unbroken(self, tokens: TokenArray) -> int:
        """How many of the last tokens stand after the last text that ends repetitions."""
        for after, token in enumerate(tokens[::-1].tolist()):
            for tail in reversed(self._tails.get(token, ())):
                following = tokens[len(tokens) - after :][: len(tail)]
                if np.array_equal(following, tail):
                    return after - len(tail)
        return len(tokens)


def _repetitions(tokens: TokenArray, least: int, most: int) -> dict[int, int]:
    """Each token that followed the same tokens as come last now, with how many those are: `least` at least, and
    more than `most` count as `most`."""
    ends = np.arange(1, len(tokens))
    found: dict[int, int] = {}
    for length in range(most + 1):
        if length >= least:
            found.update(dict.fromkeys(tokens[ends].tolist(), length))
        ends = ends[ends > length]
        ends = ends[tokens[ends - 1 - length] == tokens[len(tokens) - 1 - length]]
        if not len(ends):
            break
    return found


def _largest_exponent(base: float) -> int:
    """Powers of more are not told apart: they are more than any logit."""
    return int(_LARGEST_EXPONENT / math.log(base)) if base > 1.000001 else 1 << 30


def find_breakers(texts: Iterable[str], vocab: Vocab) -> Breakers:
    """In which tokens each of `texts` may be written. Blocks for tens of milliseconds."""
    found: dict[int, set[tuple[int, ...]]] = {}

    def tokenize(rest: str) -> list[int]:
        return vocab.tokenize(rest, parse_special=False)

    for text in texts:
        if breaker := text.encode()[:_MOST_BYTES]:
            for token, tail in _heads(breaker, vocab.pieces, tokenize):
                found.setdefault(token, set()).add(tail)
    return {token: tuple(tails) for token, tails in found.items()}


def _heads(
    breaker: bytes, pieces: Sequence[bytes], tokenize: Callable[[str], list[int]]
) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Each token that holds `breaker`, or ends with its beginning, and the tokens of the rest."""
    beginnings = [breaker[:length] for length in range(1, len(breaker))]
    tails: dict[bytes, tuple[int, ...]] = {}
    for token, piece in enumerate(pieces):
        if breaker in piece:
            yield token, ()
            continue
        for begin in beginnings:
            if piece.endswith(begin):
                if begin not in tails:
                    tails[begin] = tuple(tokenize(breaker[len(begin) :].decode(errors="replace")))[:_MOST_TOKENS]
                yield token, tails[begin]
