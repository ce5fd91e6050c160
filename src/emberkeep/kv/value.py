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
