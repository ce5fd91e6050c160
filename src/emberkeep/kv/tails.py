"""Tails: chunks that end a turn, and are replaced by longer ones when the conversation grows."""

from __future__ import annotations

from emberkeep.kv.tree import Chunk, Span, common_prefix


def tail_inside(chunk: Chunk) -> Chunk | None:
    """The longest sibling that `chunk` begins with, goes beyond and can replace.

    The chunk inherits what its siblings know was sampled: a lookup will find only one of them. Siblings of other
    lineages are seen by others.
    """
    assert chunk.parent is not None
    replaced = None
    beside = chunk.parent.branches[chunk.take][int(chunk.tokens[0])]
    for sibling in (known for known in beside if known.lineage == chunk.lineage):
        size, shared = len(sibling.tokens), common_prefix(sibling.tokens, chunk.tokens)
        known = ((begin, min(end, shared)) for begin, end in sibling.sampled if begin < shared)
        chunk.sampled = _merged((*chunk.sampled, *known))
        is_inside = shared == size < len(chunk.tokens) and not sibling.is_fork and sibling.is_leaf
        if is_inside and (replaced is None or size > len(replaced.tokens)):
            replaced = sibling
    return replaced


def _merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans in order, touching and overlapping ones joined."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
