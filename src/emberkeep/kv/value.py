"""What an entry is worth: one function that every eviction asks."""

from __future__ import annotations

from emberkeep.kv.tree import Chunk

_DEPTH_SCALE = 4096
"""Attention makes a token at this position cost about twice what the first one costs."""


def worth(chunk: Chunk, now: int) -> float:
    """Seconds of evaluation saved per byte kept, up to a constant: more for deep, reused and recent chunks.

    `now` and `last_used` are ticks of the store's logical clock, so a clock that jumps changes nothing.
    """
    cost = len(chunk.tokens) * (1 + chunk.start / _DEPTH_SCALE)
    age = max(now - chunk.last_used, 0) + 1
    return cost * (1 + chunk.hits) / (max(chunk.bytes, 1) * age)


def worth_writing(chunk: Chunk, spent_today: int, budget: int | None) -> bool:
    """Whether the SSD should wear for it: not a second time for what was never reused, and over the daily budget
    only for what was."""
    is_proven = chunk.hits > 0
    within = budget is None or spent_today + chunk.bytes <= budget
    return is_proven or (within and not chunk.was_written)
