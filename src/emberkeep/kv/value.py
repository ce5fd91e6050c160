"""What a chunk is worth: one function that every eviction asks."""

from __future__ import annotations

from math import exp, log, log2

from emberkeep.kv.tree import Chunk

_MEMORY = 1024
"""Reused chunks over which the rhythm is averaged: what is older fades."""


class Rhythm:
    """How many lookups pass until a chunk is asked for again: one where a person works alone, hundreds where many
    conversations take turns. A mean of logarithms, so that one that comes back after a week changes little."""

    def __init__(self) -> None:
        self._log = log(8)

    @property
    def lookups(self) -> float:
        return exp(self._log)

    def heard(self, lookups: int) -> None:
        """A chunk was asked for so many lookups after the last time."""
        self._log += (log(max(lookups, 1)) - self._log) / _MEMORY


def worth(chunk: Chunk, now: int, rhythm: float) -> float:
    """Tokens of evaluation that a byte may save in the next lookup, up to a constant.

    What was asked for once is twice as likely to be asked for again, and each doubling after that adds as much. The chance fades with age, but nothing is old before it has missed its turn in the store's `rhythm`. A
    chunk that had to be computed again counts as asked for: otherwise nothing would ever be kept that comes back
    later than the store can wait. Depth has no say: deep tokens cost more, and fewer prompts reach them.

    `now` and `last_used` are ticks of the store's logical clock: a clock that jumps changes nothing.
    """
    asked = chunk.hits + chunk.came_back
    age = max(now - chunk.last_used, 0)
    chance = (4 + log2(1 + asked)) / (age + 4 * rhythm)
    return chance * chunk.saved_tokens / max(chunk.bytes, 1)


def worth_writing(chunk: Chunk, spent_today: int, budget: int | None) -> bool:
    """Whether the SSD should wear for it: not a second time for what was never reused, and over the daily budget
    only for what was."""
    is_proven = chunk.hits > 0
    within = budget is None or spent_today + chunk.bytes <= budget
    return is_proven or (within and not chunk.was_written)
