"""Finding text that is stored at another place: the same passage after another beginning.

As rsync does it: stored chunks are known by the hashes of a few windows of their tokens, and a prompt is hashed
at every offset. Where a window is found, all tokens are compared, and the match grows in both directions for as
long as they are equal, through the chunks before and after. So a passage is found whatever its alignment.

Only exact state is a source: what was moved once is not moved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.kv.tree import Chunk, Cursor, Segment, descend, path_to
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import SHARED, Approximation, Lineage, Repair
from emberkeep.values import dataclass

WINDOW = 32
"""Tokens that are hashed together, and the fewest that are worth being moved."""

_PLACES = 8
"""Places remembered per window, the latest: a phrase that is everywhere costs no more than a rare one."""
_AT_ONCE = 1 << 12

_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_BASE, WINDOW - 1 - i, 1 << 64) for i in range(WINDOW)], np.uint64)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Moved:
    """Stored state for the tokens of a prompt from `start` on, which was computed at the positions of `segments`.

    What a lookup returns is pinned until `KvStore.release`.
    """

    start: int
    segments: tuple[Segment, ...]

    @property
    def end(self) -> int:
        return self.segments[-1].end + self.shift

    @property
    def shift(self) -> int:
        """What to add to a position of the source to get that in the prompt."""
        return self.start - self.segments[0].start

    @property
    def chunks(self) -> list[Chunk]:
        return [segment.chunk for segment in self.segments]

    def part(self, start: int, end: int) -> Moved:
        return Moved(start, _between(self.segments, start - self.shift, end - self.shift))


class ContentIndex:
    """Where the windows of exact state are, each owner for itself. Callers hold the store's lock."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._places: dict[str, dict[int, list[tuple[Chunk, int]]]] = {}
        waiting: list[Chunk] = []
        for chunk in chunks:  # together, which is quicker
            waiting.append(chunk)
            if len(waiting) == _AT_ONCE:
                self.add(waiting)
                waiting = []
        self.add(waiting)

    def add(self, chunks: Sequence[Chunk]) -> None:
        listed = [chunk for chunk in chunks if _is_source(chunk)]
        for (chunk, offset), hashed in zip(_windows(listed), _hashes_of(listed), strict=True):
            places = self._places.setdefault(chunk.lineage.owner, {}).setdefault(hashed, [])
            places.append((chunk, offset))
            del places[:-_PLACES]

    def remove(self, chunk: Chunk) -> None:
        table = self._places.get(chunk.lineage.owner)
        if table is None or not _is_source(chunk):
            return
        for hashed in _hashes_of([chunk]):
            left = [place for place in table.get(hashed, ()) if place[0] is not chunk]
            if left:
                table[hashed] = left
            else:
                table.pop(hashed, None)
        if not table:
            del self._places[chunk.lineage.owner]

    def find(self, owner: str, tokens: TokenArray, begin: int, sinks: int) -> list[Moved]:
        """Everything stored for passages of `tokens` at or after `begin`; matches may overlap each other."""
        tables = [self._places[seen] for seen in {owner, SHARED} if seen in self._places]
        first = max(begin, sinks)
        hashes: list[int] = window_hashes(tokens[first:]).tolist() if tables else []
        hits = [(at, table[key]) for table in tables for at, key in enumerate(hashes, first) if key in table]
        found: list[Moved] = []
        reached: dict[tuple[int, int], int] = {}
        for at, chunk, offset in ((at, *place) for at, places in hits for place in places):
            shift = at - chunk.start - offset
            if at < reached.get((shift, id(chunk)), 0):
                continue  # inside a match that is known
            if moved := _grown(Cursor(chunk, offset, Lineage(owner)), tokens, at, first, sinks):
                found.append(moved)
                reached.update({(shift, id(known)): moved.end for known in moved.chunks})
        return found


def to_pieces(matches: Sequence[Moved], approximation: Approximation) -> tuple[Moved, ...]:
    """What is moved of `matches`: in order, disjoint, and without the tokens that are to be evaluated again.

    The longest match keeps what it shares with others.
    """
    end = max((match.end for match in matches), default=0)
    owner = np.full(end, -1, np.int32)
    for index in sorted(range(len(matches)), key=lambda i: matches[i].start - matches[i].end):
        taken = owner[matches[index].start : matches[index].end]
        taken[taken < 0] = index
    for start, stop in list(_doubly_known(owner, matches, approximation.overlap)):
        owner[start:stop] = -1
    pieces = [matches[owner[start]].part(*_trimmed(start, stop, approximation)) for start, stop in _runs(owner)]
    return tuple(piece for piece in pieces if piece.segments and piece.end - piece.start >= WINDOW)


def window_hashes(tokens: TokenArray) -> Hashes:
    """Hashes `WINDOW` tokens at every offset."""
    if len(tokens) < WINDOW:
        return np.empty(0, np.uint64)
    return _hash(np.lib.stride_tricks.sliding_window_view(tokens, WINDOW))


def _hash(windows: TokenArray) -> Hashes:
    """A polynomial modulo 2**64."""
    hashed: Hashes = np.zeros(len(windows), np.uint64)
    for column in range(WINDOW):  # by columns: no copy of all windows is made
        hashed += (windows[:, column].astype(np.uint64) + np.uint64(1)) * _POWERS[column]
    return hashed


def _is_source(chunk: Chunk) -> bool:
    return chunk.lineage.is_exact and len(chunk.tokens) >= WINDOW


def _windows(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, int]]:
    for chunk in chunks:
        for offset in range(0, len(chunk.tokens) - WINDOW + 1, WINDOW):
            yield chunk, offset


def _hashes_of(chunks: Sequence[Chunk]) -> list[int]:
    """Returns one for each of `_windows`, in that order."""
    if not chunks:
        return []
    whole = [chunk.tokens[: len(chunk.tokens) // WINDOW * WINDOW] for chunk in chunks]
    hashed: list[int] = _hash(np.concatenate(whole).reshape(-1, WINDOW)).tolist()
    return hashed


def _grown(here: Cursor, tokens: TokenArray, at: int, first: int, sinks: int) -> Moved | None:
    """The longest match through `here`, where the prompt is at `at`; None where the window's hash deceived."""
    if common_prefix(here.chunk.tokens[here.used :], tokens[at:]) < WINDOW:
        return None
    shift = at - here.position
    deepest = descend(here, _shifted(tokens, shift))
    source = max(here.position - _equal_before(here, tokens[first:at]), sinks)
    if deepest.position - source < WINDOW:
        return None
    return Moved(source + shift, _between(path_to(deepest), source, deepest.position))


def _shifted(tokens: TokenArray, shift: int) -> TokenArray:
    """The prompt as if it stood where the source does."""
    return tokens[shift:] if shift >= 0 else np.concatenate([np.zeros(-shift, np.int32), tokens])


def _equal_before(cursor: Cursor, tokens: TokenArray) -> int:
    """How many of the last of `tokens` are stored before `cursor`."""
    count = 0
    for segment in reversed(path_to(cursor)):
        stored = segment.chunk.tokens[: segment.end - segment.start][::-1]
        equal = common_prefix(stored, tokens[: len(tokens) - count][::-1])
        count += equal
        if equal < len(stored):
            break
    return count


def _between(segments: Iterable[Segment], start: int, end: int) -> tuple[Segment, ...]:
    inside = (s for s in segments if s.start < end and s.end > start)
    return tuple(Segment(s.chunk, max(s.start, start), min(s.end, end)) for s in inside)


def _runs(owner: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yields the ranges that belong to one match."""
    borders = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return ((start, stop) for start, stop in pairwise(borders) if start < stop and owner[start] >= 0)


def _doubly_known(owner: npt.NDArray[np.int32], matches: Sequence[Moved], limit: int) -> Iterator[tuple[int, int]]:
    """At each seam between two matches, up to `limit` of the tokens that both know, on the side that has them."""
    for (begin, seam), (after, stop) in pairwise(_runs(owner)):
        if seam == after:
            left, right = matches[owner[begin]], matches[owner[seam]]
            yield seam, min(seam + limit, max(left.end, seam), stop)
            yield max(seam - limit, min(right.start, seam), begin), seam


def _trimmed(start: int, stop: int, approximation: Approximation) -> tuple[int, int]:
    if approximation.repair is not Repair.SELECTIVE:
        return start, stop
    first = approximation.boundary if approximation.side in ("first", "both") else 0
    last = approximation.boundary if approximation.side in ("last", "both") else 0
    return start + first, max(stop - last, start + first)
