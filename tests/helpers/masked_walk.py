"""A model that knows nothing but the mask of a grammar."""

from __future__ import annotations

import random

import numpy as np

from emberkeep.chat.grammar import Matcher
from emberkeep.types.models import Vocab


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def walk(vocab: Vocab, matcher: Matcher, seed: int, limit: int = 400) -> list[int]:
    """Sampled tokens of a model that knows nothing but the mask."""
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < limit and not matcher.finished:
        choices = allowed(matcher)
        ending = [token for token in choices if token in vocab.eog]
        token = rng.choice(ending or choices)
        matcher.advance(token)
        if token in vocab.eog:
            break
        ids.append(token)
    return ids
