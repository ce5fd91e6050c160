"""Token ids for a prompt that is still text: what is stored for it is read ahead, and has the ids that it had
before.

The store learns an answer's tokens when its turn is closed, a step or two after the client has the answer. A
quick client's next request is here before that, so the latest answers are remembered beside it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

import numpy as np

from emberkeep.kv.store import KvStore
from emberkeep.kv.text_walk import Replayed, stored_ids
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Span
from emberkeep.token_arrays import TokenArray
from emberkeep.types import Lineage, Vocab


class StoredText:
    """One prompt's view of the store. Used by one thread; never blocks on disk."""

    def __init__(self, store: KvStore, recent: RecentAnswers, vocab: Vocab, lineage: Lineage) -> None:
        self._store = store
        self._recent = recent
        self._pieces = vocab.pieces
        # Only there the tokenizer begins anew, whatever came before.
        self._borders = frozenset(vocab.specials.values() if vocab.splits_at_specials else ())
        self._lineage = lineage
        self._cursor = store.origin(lineage)
        self._ids = np.empty(1024, np.int32)
        self._count = 0

    def read_ahead(self, text: str) -> set[ChunkKey]:
        return self._store.readahead(self._lineage, text.encode("utf-8", "surrogatepass"), self._pieces)

    def replay(self, ids: Sequence[int], text: bytes, start: int, borders: Set[int]) -> Replayed:
        """The ids that are stored for `text[start:end]` after `ids` (which may only grow), and that end."""
        left_the_store = self._cursor.position < self._count
        self._take(ids)
        before = self._ids[: self._count]
        found = self._recent.replay(self._lineage, before, text, start, borders, self._pieces)
        if found[0] or left_the_store:
            return found
        self._cursor = self._store.advance(self._cursor, before)
        if self._cursor.position < self._count:
            return (), start
        return self._store.replay(self._cursor, text, start, borders, self._pieces, self._borders)

    def _take(self, ids: Sequence[int]) -> None:
        if len(ids) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(len(ids), np.int32)])
        self._ids[self._count : len(ids)] = ids[self._count :]
        self._count = len(ids)


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
                found = stored_ids(Cursor(spelled, len(ids), lineage), text, start, borders, pieces)
                if found[0]:
                    return found
        return (), start


def _begins_with(tokens: TokenArray, ids: TokenArray) -> bool:
    """Asked at every stretch of a prompt: most are told apart by their last token."""
    count = len(ids)
    if count > len(tokens) or (count and tokens[count - 1] != ids[-1]):
        return False
    return np.array_equal(tokens[:count], ids)
