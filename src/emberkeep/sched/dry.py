"""DRY ("don't repeat yourself"): a token that would go on with a repetition is penalised, the more the longer the
repetition is. The formula is llama.cpp's: `multiplier * base ** (length - allowed_length)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from emberkeep.token_arrays import TokenArray
from emberkeep.types.models import Vocab
from emberkeep.types.sampling import Sampling

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
        return {token: self._penalty(length) for token, length in lengths.items() if not self._ends_one(token)}

    def _penalty(self, length: int) -> float:
        settings = self._settings
        return settings.dry_multiplier * settings.dry_base ** (length - settings.dry_allowed_length)

    def _ends_one(self, token: int) -> bool:
        return () in self._breakers.get(token, ())

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
