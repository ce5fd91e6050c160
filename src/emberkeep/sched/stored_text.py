"""A prompt that is still text, beside what is stored: it is read ahead, and gets the ids that it had before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Set
from collections.abc import Sequence as Items
from functools import lru_cache

import numpy as np

from emberkeep.kv.keys import ROOT, ChunkKey, Span
from emberkeep.kv.lookups import Replayed, stored_ids
from emberkeep.kv.remote.blocks import BLOCK_TOKENS
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, Cursor
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import Vocab


class StoredText:
    """One prompt's view of the store. Used by one thread; never blocks on disk."""

    def __init__(
        self, store: KvStore, recent: RecentAnswers, vocab: Vocab, lineage: Lineage, *, snapshots: bool = False
    ) -> None:
        """`snapshots`: state is resumed only where it was stored as a whole."""
        self._store = store
        self._recent = recent
        self._pieces = vocab.pieces
        # Only there the tokenizer begins anew, whatever came before.
        self._borders = frozenset(vocab.specials.values() if vocab.splits_at_specials else ())
        self._lineage = lineage
        self._cursor = store.origin(lineage)
        self._ids = np.empty(1024, np.int32)
        self._count = 0
        self._can_prefetch = store.shared.is_shared and not snapshots
        self._prefetch_at: int | None = None
        """With so many ids, what other hosts have of them is asked for."""

    def read_ahead(self, text: str) -> set[ChunkKey]:
        if self._can_prefetch:
            self._prefetch_at = BLOCK_TOKENS
        return self._store.readahead(self._lineage, text.encode("utf-8", "surrogatepass"), self._pieces)

    def replay(self, ids: Items[int], text: bytes, start: int, borders: Set[int]) -> Replayed:
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

    def _take(self, ids: Items[int]) -> None:
        if len(ids) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(len(ids), np.int32)])
        self._ids[self._count : len(ids)] = ids[self._count :]
        self._count = len(ids)
        if self._prefetch_at is not None and self._count >= self._prefetch_at:
            self._prefetch_at = 2 * self._count  # few round trips, however long it is
            self._store.shared.prefetch(self._lineage, self._ids[: self._count].copy())


class RecentAnswers:
    """Added to by the engine's thread, read by any."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest_first: tuple[Chunk, ...] = ()

    def add(self, lineage: Lineage, tokens: TokenArray, answer: Span) -> None:
        """`tokens` is a whole sequence, of which [answer) was sampled."""
        known = Chunk(key=ROOT, parent=None, take=0, tokens=tokens.copy(), lineage=lineage)
        known.sampled = (answer,)
        # One assignment of a new tuple: readers need no lock.
        self._latest_first = (known, *self._latest_first[: self._limit - 1])

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
        pieces: Items[bytes],
    ) -> Replayed:
        """As `KvStore.replay`, for an answer that came after exactly `ids`."""
        ends = _in_order(frozenset(borders))
        at = bisect_right(ends, start)
        # What comes before an answer has at most a token a byte.
        furthest = len(ids) + (ends[at] - start if at < len(ends) else 0)
        for known in self._latest_first:
            if not len(ids) <= known.sampled[0][0] <= furthest:
                continue
            if lineage.sees(known.lineage) and _begins_with(known.tokens, ids):
                found = stored_ids(Cursor(known, len(ids), lineage), text, start, borders, pieces)
                if found[0]:
                    return found
        return (), start


@lru_cache(maxsize=8)
def _in_order(borders: frozenset[int]) -> tuple[int, ...]:
    """Asked for at every stretch of a prompt, and there may be as many of these as messages."""
    return tuple(sorted(borders))


def _begins_with(tokens: TokenArray, ids: TokenArray) -> bool:
    """Asked at every stretch of a prompt: most are told apart by their last token."""
    count = len(ids)
    if count > len(tokens) or (count and tokens[count - 1] != ids[-1]):
        return False
    return np.array_equal(tokens[:count], ids)
