"""What the store can do for a prompt that is still text: read ahead, and spell it as before."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from emberkeep.kv.replay import Replayed
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import ChunkKey
from emberkeep.sched.recent import RecentAnswers
from emberkeep.types import Lineage, Vocab


class Lookahead:
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
