"""What is found in a store: the longest verified prefix of a prompt, passages at other places, why there is no
more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import field

from emberkeep.kv.content import Moved, to_pieces
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import StoreCounters
from emberkeep.kv.text_walk import Replayed, ids_along, stored_ids
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

    def beginning(self, cursor: Cursor, text: bytes, start: int, stop: int, pieces: Sequence[bytes]) -> Replayed:
        """The ids stored after `cursor` for as much of `text[start:stop]` as there is, and where that ends."""
        with self._lock:
            return ids_along(cursor, text, start, stop, pieces)

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
