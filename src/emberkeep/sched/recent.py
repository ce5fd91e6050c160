"""The latest answers, spelled as they were sampled.

The store learns an answer's tokens when its turn is closed, a step or two after the client has the answer. A
quick client's next request is here before that.
"""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

import numpy as np

from emberkeep.kv.replay import Replayed, stored_spelling
from emberkeep.kv.tree import ROOT, Chunk, Cursor, Span, TokenArray
from emberkeep.types import Lineage


class RecentAnswers:
    """Added to by the engine's thread, read by any."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest_first: tuple[Chunk, ...] = ()

    def add(self, lineage: Lineage, tokens: TokenArray, answer: Span) -> None:
        """`tokens` is a whole sequence, of which [answer) was sampled."""
        spelled = Chunk(key=ROOT, parent=None, take=0, tokens=tokens.copy(), sampled=(answer,), lineage=lineage)
        # One assignment of a new tuple: readers need no lock.
        self._latest_first = (spelled, *self._latest_first[: self._limit - 1])

    def forget(self, owners: Container[str]) -> None:
        """On the engine's thread: what is added later is of answers that were not being written before."""
        kept = (s for s in self._latest_first if s.lineage.owner not in owners)
        self._latest_first = tuple(kept)

    def replay(
        self,
        lineage: Lineage,
        ids: TokenArray,
        text: bytes,
        start: int,
        borders: Set[int],
        pieces: Sequence[bytes],
    ) -> Replayed:
        """As `KvStore.replay`, for an answer that came after exactly `ids`."""
        # What comes before an answer is spelled with at most a token a byte.
        furthest = len(ids) + min((border for border in borders if border > start), default=start) - start
        for spelled in self._latest_first:
            if not len(ids) <= spelled.sampled[0][0] <= furthest:
                continue
            if lineage.sees(spelled.lineage) and _begins_with(spelled.tokens, ids):
                found = stored_spelling(Cursor(spelled, len(ids), lineage), text, start, borders, pieces)
                if found[0]:
                    return found
        return (), start


def _begins_with(tokens: TokenArray, ids: TokenArray) -> bool:
    """Asked at every stretch of a prompt: most are told apart by their last token."""
    count = len(ids)
    if count > len(tokens) or (count and tokens[count - 1] != ids[-1]):
        return False
    return np.array_equal(tokens[:count], ids)
