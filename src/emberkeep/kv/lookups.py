"""What is found in a store: the longest verified prefix of a prompt, passages at other places, why there is no
more."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import field
from functools import lru_cache

import numpy as np

from emberkeep.kv.content import Moved, to_pieces
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import StoreCounters
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, RadixTree, Segment, last_snapshot, path_to
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Approximation, Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")


@dataclass(frozen=True, slots=True)
class Peek:
    cursor: Cursor
    tokens: int
    """How many could be reused."""
    spans: tuple[tuple[int, int, bool], ...]
    """Positions [start, end) of these, in order, and whether they are in RAM."""

    @property
    def warm_tokens(self) -> int:
        return sum(end - start for start, end, is_warm in self.spans if is_warm)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt. Its chunks are pinned until `KvStore.release`."""

    cursor: Cursor
    segments: tuple[Segment, ...]
    snapshot: Chunk | None = None
    """Asked for snapshots: the one that was taken where `segments` end; without one there are no segments."""

    @property
    def tokens(self) -> int:
        return self.cursor.position

    @property
    def chunks(self) -> list[Chunk]:
        chunks = [segment.chunk for segment in self.segments]
        return [*chunks, self.snapshot] if self.snapshot else chunks


class StoreLookups:
    """The part of a store that answers questions. `KvStore` adds what comes and what goes."""

    fingerprint: bytes
    chunk_tokens: int
    counters: StoreCounters
    _lock: threading.Lock
    _ledger: Ledger
    _fits_engine: bool

    def _store_late(self, chunks: Iterable[Chunk]) -> None:
        """These were not worth writing and have been reused."""
        raise NotImplementedError

    @property
    def fits_engine(self) -> bool:
        """Whether what the engine computes now may be stored here."""
        return self._fits_engine

    def match(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool = False) -> Match:
        """The longest verified prefix of `tokens`; with `snapshots`, its part up to the last of these.

        Never blocks on disk.
        """
        with self._lock:
            self._ledger.tick += 1
            self.counters.lookups += 1
            match = self._longest(lineage, tokens, snapshots=snapshots)
            late = self._ledger.acquire(match.chunks)
        self._store_late(late)
        return match

    def peek(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Peek:
        """What `match` would find; nothing is used or pinned by looking."""
        with self._lock:
            match = self._longest(lineage, tokens, snapshots=snapshots)
            spans = tuple((s.start, s.end, s.chunk.payload is not None) for s in match.segments)
        return Peek(match.cursor, spans[-1][1] if spans else 0, spans)

    def _longest(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Match:
        """Must be called with the lock held. The result is not pinned yet."""
        cursor = self._deepest(self._tree.origin(lineage), tokens)
        segments = path_to(cursor)
        if not snapshots:
            return Match(cursor, segments)
        snapshot = last_snapshot(cursor, len(tokens))
        end = snapshot.start if snapshot else 0
        kept = tuple(Segment(s.chunk, s.start, min(s.end, end)) for s in segments if s.start < end)
        return Match(cursor, kept, snapshot)

    def match_elsewhere(
        self, lineage: Lineage, tokens: TokenArray, begin: int, approximation: Approximation
    ) -> tuple[Moved, ...]:
        """Passages of `tokens` at or after `begin` that are stored at other places, in order and disjoint.

        Never blocks on disk. The first call looks at everything that is stored.
        """
        with self._lock:
            pieces = self._pieces(lineage, tokens, begin, approximation)
            late = self._ledger.acquire([chunk for piece in pieces for chunk in piece.chunks])
        self._store_late(late)
        return pieces

    def peek_elsewhere(
        self, lineage: Lineage, tokens: TokenArray, begin: int, approximation: Approximation
    ) -> int:
        """Counts the tokens that `match_elsewhere` would find."""
        with self._lock:
            return sum(piece.end - piece.start for piece in self._pieces(lineage, tokens, begin, approximation))

    def _pieces(
        self, lineage: Lineage, tokens: TokenArray, begin: int, approximation: Approximation
    ) -> tuple[Moved, ...]:
        """Must be called with the lock held. The result is not pinned yet."""
        if not self._fits_engine:
            return ()
        matches = self._ledger.content.find(lineage.owner, tokens, begin, approximation.sinks)
        return to_pieces(matches, approximation)

    def resumable(self, lineage: Lineage, tokens: TokenArray) -> int:
        """Returns up to where the last snapshot of `tokens` was taken."""
        return self.peek(lineage, tokens, snapshots=True).tokens

    def release(self, match: Match | Moved) -> None:
        """Unpin. Must be called exactly once per match; when it raises, nothing was unpinned."""
        chunks = match.chunks
        with self._lock:
            for chunk in chunks:
                chunk.pins -= 1
            try:
                self._ledger.shrink_ram()
            except Exception:  # the next lookup makes room
                log.exception("cannot make room in RAM")

    def why_gone(self, cursor: Cursor, tokens: TokenArray) -> MissReason | None:
        """Why nothing follows `cursor` though it once did, if that is so."""
        with self._lock:
            ghost = self._ledger.entries.ghosts.after(self.fingerprint, cursor, tokens)
            return ghost.reason if ghost else None

    def stored_after(self, cursor: Cursor) -> TokenArray:
        """Returns up to a chunk of what the store holds after `cursor`, to explain where a prompt diverged."""
        with self._lock:
            rest = cursor.chunk.tokens[cursor.used :]
            if len(rest):
                return rest
            seen = (child for child in cursor.chunk.children() if cursor.sees(child) and not child.is_snapshot)
            latest = max(seen, key=lambda child: child.last_used, default=None)
            return rest if latest is None else latest.tokens

    def replay(
        self,
        cursor: Cursor,
        text: bytes,
        start: int,
        borders: Set[int],
        pieces: Sequence[bytes],
        specials: Set[int] = frozenset(),
    ) -> Replayed:
        """The ids stored after `cursor` for `text[start:end]`, and that end, one of `borders`."""
        with self._lock:
            return stored_ids(cursor, text, start, borders, pieces, specials)

    def origin(self, lineage: Lineage) -> Cursor:
        with self._lock:
            return self._tree.origin(lineage)

    def advance(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """Move `cursor` along everything already stored for `tokens`."""
        with self._lock:
            return self._deepest(cursor, tokens)

    def growth_point(self, cursor: Cursor) -> Cursor:
        """Where the next chunk should begin: at `cursor`, or earlier if it ends an unshared tail.

        A tail is replaced by a chunk that contains it, so that long conversations stay in few files.
        """
        chunk = cursor.chunk
        with self._lock:
            at_end = cursor.used == len(chunk.tokens)
            is_theirs = chunk.lineage == cursor.lineage
            is_tail = not chunk.is_fork and len(chunk.tokens) < self.chunk_tokens
            if at_end and is_theirs and is_tail and chunk.is_leaf:
                assert chunk.parent is not None
                return cursor.at(chunk.parent, chunk.take)
            return cursor

    def has_snapshot(self, cursor: Cursor) -> bool:
        with self._lock:
            found = last_snapshot(cursor, cursor.position)
            return found is not None and found.start == cursor.position

    @property
    def _tree(self) -> RadixTree:
        return self._ledger.tree

    def _deepest(self, cursor: Cursor, tokens: TokenArray) -> Cursor:
        """Must be called with the lock held."""
        return self._tree.deepest(cursor, tokens) if self._fits_engine else self._tree.origin(cursor.lineage)


# ── ids by their text ──


Replayed = tuple[tuple[int, ...], int]
"""Ids, and where their text ends."""


def stored_ids(
    cursor: Cursor,
    text: bytes,
    start: int,
    borders: Set[int],
    pieces: Sequence[bytes],
    specials: Set[int] = frozenset(),
) -> Replayed:
    """Ids stored after `cursor` for `text` from `start` to one of `borders`, or ((), start).

    Sampled ones first. A template's own words may stand before the answer (in ChatML the role), up to the first
    border. What was sampled may go on over borders, because a model can write a special token's text in
    ordinary tokens. Of several ways the one with the most sampled tokens wins: when a crash has left only the
    beginning of an answer, the tokenizer's ids of the same text branch off from it.

    Else the tokenizer's own: up to the first border, when a token of `specials` follows there in the tree too.
    Such a token is where the tokenizer begins anew, so it was asked for exactly this text.
    """
    best: tuple[Chunk, int, int] | None = None
    most = 0
    ends = in_order(frozenset(borders))
    first_border = _next_border(ends, start)
    todo: list[tuple[Chunk, int, int, int]] = [(cursor.chunk, cursor.used, start, 0)]
    while todo:
        chunk, index, offset, sampled = todo.pop()
        while True:
            is_first = offset == first_border and not best and not chunk.is_given and index < len(chunk.tokens)
            is_whole = is_first and int(chunk.tokens[index]) in specials
            if (offset in borders and sampled > most) or is_whole:
                best, most = (chunk, index, offset), sampled
            for first, group in chunk.branches.get(index, {}).items():
                if offset == first_border or (
                    first in range(len(pieces)) and text.startswith(pieces[first], offset)
                ):
                    todo += ((child, 0, offset, sampled) for child in group if cursor.sees(child))
            if index == len(chunk.tokens):
                break
            stop, is_sampled = _run(chunk, index)
            if not is_sampled and (sampled or offset >= first_border):
                break
            room = _next_border(ends, offset) - offset
            written = _written(chunk, index, stop, pieces)
            if len(written) > room:
                stop = index + max(_fitting(chunk.tokens[index:stop], room, pieces), int(is_sampled))
                written = _written(chunk, index, stop, pieces)
            if not written or not text.startswith(written, offset):
                break
            sampled += (stop - index) * is_sampled
            offset, index = offset + len(written), stop
    return (_ids_between(cursor, *best[:2]), best[2]) if best else ((), start)


@lru_cache(maxsize=8)
def in_order(borders: frozenset[int]) -> tuple[int, ...]:
    """Asked for at every stretch of a prompt, and there may be as many of these as messages."""
    return tuple(sorted(borders))


def _next_border(ends: tuple[int, ...], offset: int) -> int:
    """The first of `ends` after `offset`; where there is none, `offset`."""
    at = bisect_right(ends, offset)
    return ends[at] if at < len(ends) else offset


def _run(chunk: Chunk, index: int) -> tuple[int, bool]:
    """The end of what can be compared at once from `index` on, and whether it was sampled: that is all up to the
    next branch, the next token that was sampled (or was not), or the end."""
    stop, is_sampled = len(chunk.tokens), False
    for take in chunk.branches:
        if index < take < stop:
            stop = take
    for begin, end in chunk.sampled:
        if begin <= index < end:
            stop, is_sampled = min(stop, end), True
        elif index < begin:
            stop = min(stop, begin)
    return stop, is_sampled


def _fitting(tokens: TokenArray, room: int, pieces: Sequence[bytes]) -> int:
    """How many of these have a text of no more than `room` bytes together."""
    for count, token in enumerate(tokens.tolist()):
        room -= len(pieces[token])
        if room < 0:
            return count
    return len(tokens)


def _written(chunk: Chunk, index: int, stop: int, pieces: Sequence[bytes]) -> bytes:
    """The text of these tokens. Empty at the end, and for those of a foreign file, which no prompt of this model
    has."""
    is_all = stop - index == len(chunk.tokens)
    if is_all and chunk.text is not None:
        return chunk.text
    tokens = chunk.tokens[index:stop].tolist()
    is_foreign = max(tokens, default=0) >= len(pieces)
    written = b"" if is_foreign else b"".join([pieces[token] for token in tokens])
    if is_all:
        chunk.text = written
    return written


def _ids_between(cursor: Cursor, chunk: Chunk, index: int) -> tuple[int, ...]:
    """Those on the way from `cursor` to `index` of `chunk`, which is at or below its chunk."""
    parts: list[TokenArray] = []
    while chunk is not cursor.chunk and chunk.parent is not None:
        parts.append(chunk.tokens[:index])
        chunk, index = chunk.parent, chunk.take
    parts.append(chunk.tokens[cursor.used : index])
    return tuple(np.concatenate(parts[::-1]).tolist())


def chunks_along(origin: Cursor, text: bytes, pieces: Sequence[bytes]) -> list[Chunk]:
    """Chunks below `origin`, a root, whose text lies along the beginning of `text`: what a lookup of its tokens
    will most likely want.

    Only a guess made before the text is tokenised, a whole chunk per comparison.
    """
    found = []
    todo = [(origin.chunk, 0)]
    while todo:
        chunk, offset = todo.pop()
        for take, by_first in chunk.branches.items():
            begin = offset + len(_written(chunk, 0, take, pieces))
            groups = (
                group
                for first, group in by_first.items()
                if first in range(len(pieces)) and text.startswith(pieces[first], begin)
            )
            for child in (child for group in groups for child in group if origin.sees(child)):
                if written := _written(child, 0, len(child.tokens), pieces):
                    found.append(child)
                    if text.startswith(written, begin):
                        todo.append((child, begin))
    return found


# ── what other hosts have ──

BLOCK_TOKENS = 128
"""State is shared in blocks, each of which begins at a multiple of its length."""


def block_start(position: int) -> int:
    """Where the block that holds `position` begins."""
    return position // BLOCK_TOKENS * BLOCK_TOKENS


class StillElsewhere(OSError):
    """Something is left where other hosts may find it."""


@dataclass(slots=True)
class Arrival:
    give_up: float
    """Nothing waits for it any longer then; on the monotonic clock."""
    done: Future[frozenset[ChunkKey]] = field(default_factory=Future)
    """The chunks of the tree that came for it."""
    moved_at: float | None = None
    """When it was begun, or something came for it; None before that."""


class SharedTier:
    """The tier of a host that is alone: nothing is there, and nothing is taken.

    Safe to use from any thread. Methods return at once and never raise, unless they say otherwise.
    """

    is_shared = False

    @property
    def takes_more(self) -> bool:
        """Whether what is offered now would reach other hosts."""
        return False

    def prefetch(self, lineage: Lineage, tokens: TokenArray) -> None:
        """Begin to fetch what is there of a prompt that begins with `tokens`."""

    def bring_in(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Arrival | None:
        """Fetch what is cheaper to load than to evaluate; None where there is nothing to wait for."""
        return None

    def was_late(self, arrival: Arrival) -> None:
        """A request has given up waiting for it."""

    def offer(self, chunks: Iterable[Chunk]) -> None:
        """They are worth having elsewhere, too; or have been used, and are wanted for longer."""

    def offer_loose(self, chunk: Chunk) -> None:
        """Offer one that is not in the tree."""

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """They were to be removed, and are out of the tree."""

    def forget(self, user: str) -> int:
        """Leave nothing of a user there; returns how many values went. Blocks. Raises StillElsewhere where
        something may be left: it is tried again."""
        return 0

    def flush(self) -> None:
        """Block until everything that was offered is there, or is not taken."""

    def close(self) -> None:
        """Write what is left, as far as there is time. Blocks."""

    def stats(self) -> dict[str, object] | None:
        return None
