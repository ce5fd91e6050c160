"""Which tokens may be drawn: ways to leave some out by their logits alone.

Most requests look at a few dozen candidates, so the vocabulary is cut down before anything is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

_WINDOWS = (4.0, 8.0, 16.0, 32.0)
"""Distances below the highest logit in which candidates are looked for before the whole vocabulary is sorted."""
_BLOCK = 64
"""The highest of all logits is looked for among the highest of every so many."""


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
