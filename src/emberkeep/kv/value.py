"""What a chunk is worth: one function that every eviction asks."""

from __future__ import annotations

from math import exp, log, log2

from emberkeep.kv.tree import Chunk

_PATIENCE = 4
"""Rhythms after which a chunk that nobody asked for is worth half of what it was."""
_MEMORY = 1024
"""Reused chunks over which the rhythm is averaged: what is older fades."""


class Rhythm:
    """How many lookups pass until a chunk is asked for again: one where a person works alone, hundreds where many
    conversations take turns. A mean of logarithms, so that what comes back after a week changes little."""

    def __init__(self) -> None:
        self._log = log(8)
        self._weight = 16

    @property
    def lookups(self) -> float:
        return exp(self._log)

    def heard(self, lookups: int) -> None:
        """A chunk was asked for so many lookups after the last time."""
        self._weight = min(self._weight + 1, _MEMORY)
        self._log += (log(max(lookups, 1)) - self._log) / self._weight


def worth(chunk: Chunk, now: int, rhythm: float) -> float:
    """Tokens of evaluation that a byte is likely to save per lookup, up to a constant.

    The chance that a chunk is asked for fades with age, measured in the store's own `rhythm`. Having been asked
    for makes up for age, by one rhythm each time the number doubles: most chunks are never asked for, and of those
    that were, twice as many are again. A chunk that had to be computed again counts as asked for; otherwise
    nothing would ever be kept that comes back later than the store can wait. Depth has no say: deep tokens cost
    more, but to prefer them gives up more than that gains.

    `now` and `last_used` are ticks of the store's logical clock: a clock that jumps changes nothing.
    """
    asked = chunk.hits + chunk.came_back
    age = max(now - chunk.last_used, 0)
    chance = (_PATIENCE + log2(1 + asked)) / (age + _PATIENCE * rhythm)
    return chance * chunk.saved_tokens / max(chunk.bytes, 1)


def worth_writing(chunk: Chunk, spent_today: int, budget: int | None) -> bool:
    """Whether the SSD should wear for it: not a second time for what was never reused, and over the daily budget
    only for what was."""
    is_proven = chunk.hits > 0
    within = budget is None or spent_today + chunk.bytes <= budget
    return is_proven or (within and not chunk.was_written)
