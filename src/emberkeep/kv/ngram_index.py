"""What followed some tokens before: token sequences in which any suffix of a text is found, for drafts.

    buffer    | . . the quick brown fox . the quick brown dog |      "." is `_BORDER`: no match goes over it
    pieces     [------------ sorted ------------)[-- sorted -)[ tail )

A piece holds its positions in the order of the tokens before them, read backwards, so that those after the same
suffix lie side by side. The tail is what came since, and is compared as it is. Looking up a suffix takes tens of
microseconds with a million tokens, adding a token one; sorting is left to another thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from emberkeep.token_arrays import TokenArray
from emberkeep.values import dataclass

MIN_MATCH = 2
"""What follows a single token says next to nothing."""
MAX_MATCH = 32
"""Tokens before a position that are compared."""
OCCURRENCES = 16
"""How many of the places where a suffix stands have a say: the most recent ones."""

_BORDER = -1
_FIRST_CAPACITY = 1 << 10
_MERGE_RATIO = 4
"""A piece is sorted again together with those before it that are less than so many times as long."""
_CANDIDATES = 1024
"""So many places are looked at where a suffix stands at more."""
FEW = 32
"""So many positions are compared at once, in all of their tokens."""
_SELECTIVE = 8
"""Tokens after which the latest of those that agree are enough."""

_DOUBT = 3.0
"""Divided by the length of the match, it counts as so many places more that go on otherwise. So the agreement is
what is accepted: measured with source code and prose, after matches of 2 to 32 tokens, for up to 8 tokens."""

_BORDER_BYTES = np.int32(_BORDER).tobytes()
_BACKWARDS = -1 - np.arange(MAX_MATCH)


@dataclass(frozen=True, slots=True)
class Continuation:
    tokens: TokenArray
    """At each place the token that was there most often; the more recent one among equals."""
    matched: int
    """How many of the last tokens were found together."""
    agreement: tuple[float, ...]
    """For each token, the share of the places found that go on with it and with all tokens before it, less what
    few places and short matches leave in doubt: about how likely it is that all of these come."""
    place: int
    """Where the first of these tokens stands in the index, latest."""


class NgramIndex:
    """Belongs to one thread; `compact` is for another one, and goes on beside everything else."""

    def __init__(self) -> None:
        self._buffer: TokenArray = np.full(_FIRST_CAPACITY, _BORDER, np.int32)
        """After the last token everything is `_BORDER`; before the first one there is room to look back."""
        self._end = MAX_MATCH
        self._tokens = 0
        self._pieces: tuple[_Piece, ...] = ()

    def __len__(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes + sum(piece.nbytes for piece in self._pieces)

    @property
    def unsorted(self) -> int:
        """How long the tail is that `compact` would sort. Lookups take a microsecond longer for every 1,000."""
        return self._end - _sorted_end(self._pieces)

    def begin(self, tokens: TokenArray | Sequence[int] = ()) -> int:
        """Start a new segment: nothing is found that lies in two of them. Returns its place."""
        if self._buffer[self._end - 1] != _BORDER:
            self._reserve(1)
            self._end += 1
        place = self._end
        self.extend(tokens)
        return place

    def extend(self, tokens: TokenArray | Sequence[int]) -> None:
        count = len(tokens)
        self._reserve(count)
        self._buffer[self._end : self._end + count] = tokens
        self._end += count  # last: `compact` reads up to here
        self._tokens += count

    def read(self, place: int, limit: int) -> list[int]:
        """What stands at a place, as far as its segment goes."""
        tokens: list[int] = self._buffer[place : min(place + limit, self._end)].tolist()
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens

    def find(self, context: TokenArray, limit: int) -> Continuation | None:
        """What followed the longest suffix of `context` that stands anywhere, at most `limit` tokens.

        A suffix of less than `MIN_MATCH` tokens is none, nor is one after which nothing comes. Where the suffix is
        also the end of the index itself, what comes after that end is the continuation: a loop goes on.
        """
        wanted = context[-MAX_MATCH:]
        if len(wanted) < MIN_MATCH or limit < 1 or not self._tokens:
            return None
        pieces, end = self._pieces, self._end
        matched, places = _find_unsorted(self._buffer[:end], _sorted_end(pieces), wanted)
        key = wanted[::-1].astype(">u4").tobytes() if pieces else b""
        for piece in reversed(pieces):
            length, found = piece.find(key, max(matched, MIN_MATCH))
            if length > matched:
                matched, places = length, found
            elif length:
                places += found
        if not places:
            return None
        places = places[:OCCURRENCES]
        tokens, votes = _most_frequent(self._rows(places, end, limit, wanted[-matched:]), limit)
        place = next(at for at in places if self._buffer[at] == tokens[0])
        return Continuation(np.array(tokens, np.int32), matched, agreement(len(places), votes, matched), place)

    def compact(self) -> None:
        """Sort the tail, so that lookups stay quick. Takes about a second for a million tokens. At most one thread
        at a time."""
        end = self._end  # before the buffer, which may be replaced by a longer one
        buffer, pieces = self._buffer, list(self._pieces)
        start = _sorted_end(pieces)
        while pieces and pieces[-1].end - pieces[-1].start < _MERGE_RATIO * (end - start):
            start = pieces.pop().start
        if start < end:
            self._pieces = (*pieces, _Piece(buffer, start, end))

    def _rows(self, places: list[int], end: int, limit: int, suffix: TokenArray) -> Counter[bytes]:
        """What stands at these places and how often, in the order in which it is first met. Each row has `limit`
        tokens, or `_BORDER` after its last one."""
        buffer, size = self._buffer, 4 * limit
        rows = [buffer[at : min(at + limit, end)].tobytes() for at in places]
        if min(map(len, rows)) < size:
            is_own_end = buffer[end - len(suffix) : end].tobytes() == suffix.tobytes()
            rows = [(row * (size // len(row) + 1))[:size] if is_own_end else row + _BORDER_BYTES for row in rows]
        return Counter(rows)

    def _reserve(self, count: int) -> None:
        """One more than that: what comes after the end can always be read."""
        needed = self._end + count + 1
        if needed > len(self._buffer):
            longer = np.full(max(needed, len(self._buffer) * 3 // 2), _BORDER, np.int32)
            longer[: self._end] = self._buffer[: self._end]
            self._buffer = longer


def _most_frequent(rows: Counter[bytes], limit: int) -> tuple[list[int], list[int]]:
    """Token by token, the most frequent one of those rows that agree so far, and how many they are; the earlier
    row among equals."""
    alive = [(memoryview(row).cast("i"), count) for row, count in rows.items()]
    tokens: list[int] = []
    votes: list[int] = []
    while len(alive) > 1 and len(tokens) < limit:
        place, named = len(tokens), dict[int, int]()
        for row, count in alive:
            named[row[place]] = named.get(row[place], 0) + count
        is_split = len(named) > 1
        named.pop(_BORDER, 0)
        if not named:
            return tokens, votes
        token = max(named, key=named.__getitem__)
        tokens.append(token)
        votes.append(named[token])
        if is_split:
            alive = [(row, count) for row, count in alive if row[place] == token]
    row, count = alive[0]
    rest = row[len(tokens) : limit].tolist()
    if _BORDER in rest:
        del rest[rest.index(_BORDER) :]
    return tokens + rest, votes + [count] * len(rest)


def agreement(places: int, votes: list[int], matched: int) -> tuple[float, ...]:
    """How likely it is that each token comes with all before it, which `votes` of the places have. Each token that
    agrees makes the match longer, and the next one less doubtful."""
    share, before = 1.0, places
    shares = []
    for length, count in enumerate(votes, matched):
        share *= count / (before + _DOUBT / length)
        before = count
        shares.append(share)
    return tuple(shares)


def _find_unsorted(buffer: TokenArray, start: int, wanted: TokenArray) -> tuple[int, list[int]]:
    """How long the longest suffix of `wanted` is that stands before a place from `start` on, and the latest of
    these places."""
    if start >= len(buffer):
        return 0, []
    places = (buffer[start - 1 : -1] == wanted[-1]).nonzero()[0]
    if not len(places):
        return 0, []
    places += start
    places = places[(buffer[places - 2] == wanted[-2]) & (buffer[places] != _BORDER)][-_CANDIDATES:]
    matched = MIN_MATCH
    while len(places) > FEW and matched < min(_SELECTIVE, len(wanted)):
        agree = places[buffer[places - (matched + 1)] == wanted[-1 - matched]]
        if not len(agree):
            return matched, _latest_first(places)
        places, matched = agree, matched + 1
    places = places[-FEW:]
    if not len(places):
        return 0, []
    equal = buffer[places[:, None] + _BACKWARDS[: len(wanted)]] == wanted[::-1]
    lengths = equal.cumprod(axis=1).sum(axis=1)
    matched = int(lengths.max())
    return matched, _latest_first(places[lengths == matched])


def _latest_first(places: npt.NDArray[np.int64]) -> list[int]:
    latest: list[int] = places[-OCCURRENCES:].tolist()
    return latest[::-1]


def _sorted_end(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].end if pieces else MAX_MATCH


class _Piece:
    """The positions from `start` to `end` in the order of the tokens before them. Never changes."""

    def __init__(self, buffer: TokenArray, start: int, end: int) -> None:
        self.start, self.end = start, end
        before = buffer[start - MAX_MATCH : end - 1][::-1]
        self._before = before.astype(">u4").tobytes()
        """For each position, bytes that compare as its tokens do; those of the last one come first."""
        order = _sorted_suffixes(before)
        order = order[order < end - start]
        at = end - 1 - order
        order = order[(buffer[at] != _BORDER) & (buffer[at - 1] != _BORDER)]
        self._order: npt.NDArray[np.int32] = (4 * order).astype(np.int32)
        """Where in `_before` they begin. Of equal ones the latest comes first."""

    @property
    def nbytes(self) -> int:
        return len(self._before) + self._order.nbytes

    def find(self, key: bytes, least: int) -> tuple[int, list[int]]:
        """How long the longest suffix is that stands here, and where: the latest places first. `key` is the
        context read backwards. (0, none) for what is shorter than `least`."""
        before, order = self._before, memoryview(self._order)
        size = len(key)
        near = bisect_left(order, key, key=lambda at: before[at : at + size])
        beside = [before[at : at + size] for at in order[max(near - 1, 0) : near + 1]]
        matched = max((_equal_tokens(key, other) for other in beside), default=0)
        if matched < least:
            return 0, []
        low, high = self._range(key[: 4 * matched], near)
        last = self.end - 1
        return matched, [last - at // 4 for at in self._latest(low, high)]

    def _range(self, key: bytes, near: int) -> tuple[int, int]:
        """Where in the order all those lie that begin with `key`, which are around `near`: mostly a few."""
        before, order, size = self._before, memoryview(self._order), len(key)
        low, high = max(near - FEW, 0), min(near + FEW, len(order))
        if before.startswith(key, order[low]):
            low = 0
        if before.startswith(key, order[high - 1]):
            high = len(order)
        first = bisect_left(order, key, low, near, key=lambda at: before[at : at + size])
        return first, bisect_right(order, key, near, high, key=lambda at: before[at : at + size])

    def _latest(self, low: int, high: int) -> list[int]:
        found = self._order[low : high : -(-(high - low) // _CANDIDATES)]
        if len(found) > OCCURRENCES:
            found = np.partition(found, OCCURRENCES)[:OCCURRENCES]
        latest: list[int] = sorted(found.tolist())
        return latest


def _equal_tokens(a: bytes, b: bytes) -> int:
    """How many tokens of four bytes at the beginning are the same."""
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (8 * size - differ.bit_length()) // 32


def _sorted_suffixes(tokens: TokenArray) -> npt.NDArray[np.int64]:
    """The order of all suffixes by their first `MAX_MATCH` tokens, `_BORDER` last; equal ones stay in order.

    By doubling: where suffixes stand among all, by their first tokens, sorts them by twice as many.
    """
    rank = np.where(tokens == _BORDER, np.uint64(1 << 31), tokens.astype(np.uint64))
    known = 1
    while known < MAX_MATCH:
        key = rank << np.uint64(32)
        key[:-known] |= rank[known:] + np.uint64(1)
        # Before the last time the order of equal ones is of no account, and a quicker way of sorting will do.
        order = np.argsort(key, kind="quicksort" if 2 * known < MAX_MATCH else "stable")
        ordered = key[order]
        rank[order[1:]] = np.cumsum(ordered[1:] != ordered[:-1])
        rank[order[0]] = 0
        known *= 2
    return order
