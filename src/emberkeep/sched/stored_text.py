"""A prompt that is still text: the ids that its texts were stored with.

What the model wrote gets the ids that it sampled. A long text begins with the ids that its beginning was stored
with: one that grows is not tokenized again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Container, Set
from collections.abc import Sequence as Items
from functools import cached_property

import numpy as np
import numpy.typing as npt

from emberkeep.kv.lookups import BLOCK_TOKENS
from emberkeep.kv.store import KvStore
from emberkeep.kv.text_walk import Replayed, in_order, next_border, stored_ids
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Span
from emberkeep.token_arrays import TokenArray, token_array
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import Vocab

_PROBE = 32
"""Tokens by which texts before answers are told apart."""
_LONG = 2048
"""Bytes of a text from which on its beginning is looked for."""
_JOINT = re.compile(rb"[a-z](?= [a-z])")
"""A word ends there and another begins."""
_OVER_A_JOINT = re.compile(rb"[a-z] ")
_NEAR = 256
"""The last joint of a text is nearly always within so many bytes of its end."""


class StoredText:
    """One prompt's view of the store. Used by one thread; never blocks on disk."""

    def __init__(
        self, store: KvStore, recent: RecentAnswers, vocab: Vocab, lineage: Lineage, *, snapshots: bool = False
    ) -> None:
        """`snapshots`: state is resumed only where it was stored as a whole."""
        self._store = store
        self._recent = recent
        self._pieces = vocab.pieces
        self._splits_at_specials = vocab.splits_at_specials
        """Else their texts may stand in ordinary tokens, because somebody quoted them."""
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
        found = self._recent.replay(self._lineage, before, text, start, borders)
        if found[0] or left_the_store:
            return found
        self._cursor = cursor = self._store.advance(self._cursor, before)
        if cursor.position < self._count:
            return (), start
        stop = next_border(in_order(frozenset(borders)), start)
        is_long = stop - start >= _LONG and self._recent.has_joints and self._splits_at_specials
        if is_long and stop == len(text):  # it may grow from turn to turn: all of it is hardly ever stored
            found = self._beginning(cursor, text, start, stop, is_part=True)
            if found[0]:
                return found
        found = self._store.replay(cursor, text, start, borders, self._pieces, self._borders)
        return found if found[0] or not is_long else self._beginning(cursor, text, start, stop)

    def _beginning(self, cursor: Cursor, text: bytes, start: int, stop: int, *, is_part: bool = False) -> Replayed:
        """What is stored of a text's beginning, up to a joint: behind it the tokenizer may begin anew. `is_part`:
        only where that is not all."""
        ids, end = self._store.beginning(cursor, text, start, stop, self._pieces)
        if end == stop and is_part:
            return (), start
        joint, count = _last_joint(text, start, end), len(ids)
        while start < joint < end:
            count -= 1
            end -= len(self._pieces[ids[count]])
        return (ids[:count], end) if end == joint else ((), start)

    def _take(self, ids: Items[int]) -> None:
        if len(ids) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(len(ids), np.int32)])
        self._ids[self._count : len(ids)] = token_array(ids[self._count :])
        self._count = len(ids)
        if self._prefetch_at is not None and self._count >= self._prefetch_at:
            self._prefetch_at = 2 * self._count  # few round trips, however long it is
            self._store.shared.prefetch(self._lineage, self._ids[: self._count].copy())


class RecentAnswers:
    """Added to by the engine's thread, read by any."""

    def __init__(self, limit: int, vocab: Vocab) -> None:
        self._limit = limit
        self._pieces = vocab.pieces
        self._is_special = np.zeros(vocab.size, bool)
        """Where the tokenizer begins anew."""
        self._is_special[[*vocab.specials.values()] if vocab.splits_at_specials else []] = True
        self._latest_first: tuple[_Answered, ...] = ()

    def add(self, lineage: Lineage, tokens: TokenArray, answer: Span) -> None:
        """`tokens` is a whole sequence, of which [answer) was sampled."""
        known = Chunk(key=ROOT, parent=None, take=0, tokens=tokens.copy(), lineage=lineage)
        known.sampled = (answer,)
        (specials,) = self._is_special[tokens[: answer[0]]].nonzero()
        since = int(specials[-1]) + 1 if len(specials) else 0
        answered = _Answered(known, since, int(self._lengths[tokens[since : answer[0]]].sum()))
        # One assignment of a new tuple: readers need no lock.
        self._latest_first = (answered, *self._latest_first[: self._limit - 1])

    @cached_property
    def has_joints(self) -> bool:
        """No token goes over one. So nothing is joined there, and the tokens before it are the same whatever
        follows."""
        return not any(_OVER_A_JOINT.search(piece) for piece in self._pieces)

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int32]:
        """Bytes of each token."""
        return np.fromiter(map(len, self._pieces), np.int32, len(self._pieces))

    def forget(self, owners: Container[str]) -> None:
        """On the engine's thread: what is added later is of answers that were not being written before."""
        kept = (s for s in self._latest_first if s.known.lineage.owner not in owners)
        self._latest_first = tuple(kept)

    def replay(self, lineage: Lineage, ids: TokenArray, text: bytes, start: int, borders: Set[int]) -> Replayed:
        """As `KvStore.replay`, for an answer that came after exactly `ids`."""
        ends = in_order(frozenset(borders))
        at = bisect_right(ends, start)
        room = ends[at] - start if at < len(ends) else 0
        for each in self._latest_first:
            known, begin = each.known, each.known.sampled[0][0]
            # What comes before an answer has at most a token a byte.
            if not each.since <= len(ids) <= begin <= len(ids) + room or len(ids) >= len(known.tokens):
                continue
            # Asked at every stretch of a prompt: most are told apart by what stands before it or the answer.
            if not lineage.sees(known.lineage) or not _begins_with(known.tokens, ids):
                continue
            size = each.size_before(self._pieces, len(ids), text, start)
            if size is not None and size <= room:
                answer, end = stored_ids(Cursor(known, begin, lineage), text, start + size, borders, self._pieces)
                if answer:
                    return (*known.tokens[len(ids) : begin].tolist(), *answer), end
        return (), start


class _Answered:
    def __init__(self, known: Chunk, since: int, size: int) -> None:
        """`since`: where the stretch of text begins in which the answer does, `size` bytes before it."""
        self.known, self.since = known, since
        self._size = size
        self._probe: bytes | None = None
        self._before: bytes | None = None

    def size_before(self, pieces: Items[bytes], position: int, text: bytes, start: int) -> int | None:
        """How many bytes are written from `position` on up to the answer; None where `text` has others there. What
        is written from the beginning of the stretch on is remembered."""
        skipped = sum(len(pieces[token]) for token in self.known.tokens[self.since : position].tolist())
        size = self._size - skipped
        if self._probe is None:
            self._probe = self._text(pieces, max(self.known.sampled[0][0] - _PROBE, self.since))
        # Mostly not even the end of it is there, and that is soon found out.
        probe = self._probe[max(len(self._probe) - size, 0) :]
        if not text.startswith(probe, start + size - len(probe)):
            return None
        if self._before is None:
            self._before = self._text(pieces, self.since)
        return size if text.startswith(self._before[skipped:], start) else None

    def _text(self, pieces: Items[bytes], position: int) -> bytes:
        begin = self.known.sampled[0][0]
        return b"".join([pieces[token] for token in self.known.tokens[position:begin].tolist()])


def _begins_with(tokens: TokenArray, ids: TokenArray) -> bool:
    count = len(ids)
    if not count:
        return True
    if count > len(tokens) or tokens[count - 1] != ids[-1]:
        return False
    return np.array_equal(tokens[:count], ids)


def _last_joint(text: bytes, start: int, end: int) -> int:
    """Where the last joint of `text[start:end]` is; `start` where there is none."""
    for begin in (max(end - _NEAR, start), start):
        joints = [match.end() for match in _JOINT.finditer(text, begin, end)]
        if joints:
            return joints[-1]
    return start
