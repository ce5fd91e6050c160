"""What an entry is worth: one function that every eviction asks."""

from __future__ import annotations

from math import log2

from emberkeep.kv.tree import Chunk

_RECENT = 128
"""Lookups for which a chunk stays about as good as new. Between two turns of one conversation come those of the
others, so among uses that are closer than this the number says more than the order."""


def worth(chunk: Chunk, now: int) -> float:
    """Evaluated tokens that a byte is expected to save per lookup from now on, up to a constant.

    Half of what is stored is never asked for; what was asked for once is asked for again twice as often, and each
    doubling after that adds as much. A chunk that had to be computed again counts as asked for: otherwise nothing
    that comes back later than the store can wait would ever be kept. Deep tokens cost more to evaluate and are
    reached by fewer prompts, which cancels out, so depth has no say.

    `now` and `last_used` are ticks of the store's logical clock: a clock that jumps changes nothing.
    """
    asked = chunk.hits + chunk.came_back
    age = max(now - chunk.last_used, 0)
    return chunk.saved_tokens * (1 + log2(1 + asked)) / (max(chunk.bytes, 1) * (age + _RECENT))


def worth_writing(chunk: Chunk, spent_today: int, budget: int | None) -> bool:
    """Whether the SSD should wear for it: not a second time for what was never reused, and over the daily budget
    only for what was."""
    is_proven = chunk.hits > 0
    within = budget is None or spent_today + chunk.bytes <= budget
    return is_proven or (within and not chunk.was_written)
