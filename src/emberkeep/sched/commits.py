"""What a sequence has computed is stored: chunk by chunk while it grows, the rest when its turn ends.

State that cannot be cut by token is stored where it will be wanted again: at the borders that a prompt names (the
end of its stable prefix, the ends of messages) and at the end of every turn.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Container, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Engine, KvExport, Payload
from emberkeep.errors import EngineError
from emberkeep.kv.entries import Entry
from emberkeep.kv.lookups import BLOCK_TOKENS, Replayed, block_start, in_order, stored_ids
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Made, Span, place_at
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import NewChunk, Save
from emberkeep.token_arrays import TokenArray, token_array
from emberkeep.types.lineage import EXACT_BITS, Lineage
from emberkeep.types.models import Vocab

log = logging.getLogger("emberkeep.sched")

_SAVED_AT_ONCE = 4096
"""Tokens that are stored between two steps at most."""
_CROWD = 32
"""So many more answers make the state of each wait for one more chunk."""
_UNPACKED = 0.75
"""A chunk with less than this share of the bytes of exact state is packed: that leaves little more than half."""
_WORTH_A_CHUNK = 16
"""Tokens that are worth a file of their own where sequences branch; fewer are stored once per branch."""
_PROBE = 32
"""Tokens by which texts before answers are told apart."""


class Commits:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._engine = engine
        self._store = store
        self._chunk = store.chunk_tokens
        self._has_snapshots = engine.capabilities.kv_unit.has_snapshots
        # A layout that the engine does not know cannot be exported at all.
        self._can_export = not self._has_snapshots or engine.capabilities.snapshot_bytes > 0

    def commit(self, sequence: Sequence) -> None:
        """Store complete chunks, a bounded number of them, so that whoever is waiting for a token waits for less
        than a step. Cheap when there is none. What the engine does not have at once is stored by the next one.

        With snapshots nothing is stored between them: no lookup could use it.
        """
        if not self.has_to_commit(sequence):
            return
        if self._has_snapshots:
            self.commit_all(sequence)
            return
        self._finish_save(sequence)
        if sequence.unsaved >= self._chunk:
            end = min(sequence.computed, sequence.cursor.position + _SAVED_AT_ONCE)
            self._begin_save(sequence, end, tail=False, fork=False)

    def has_to_commit(self, sequence: Sequence, beside: int = 0) -> bool:
        """Whether `commit` would store something. With many others `beside` it, it waits for more chunks: they are
        stored in about the time of one."""
        if self._has_snapshots:
            return sequence.computed in sequence.prompt.borders and self.keeps(sequence)
        wanted = self._chunk * (1 + beside // _CROWD)
        return (sequence.saving is not None or sequence.unsaved >= wanted) and self.keeps(sequence)

    def commit_all(self, sequence: Sequence) -> None:
        """Store everything computed, with a tail chunk for what does not fill one. Blocks until the engine has
        copied it."""
        self._finish_save(sequence)
        if not self.keeps(sequence):
            return
        if sequence.unsaved > 0:
            self._save(sequence, sequence.computed, fork=False)
        if self._has_snapshots and sequence.computed:
            self._store_snapshot(sequence)

    def commit_fork(self, sequence: Sequence, position: int) -> None:
        """Store everything up to `position`, where another sequence is about to branch off. Blocks until the
        engine has copied it.

        Ending a chunk there keeps the branches from each storing the shared part of it.
        """
        self._finish_save(sequence)
        is_worth_it = position - sequence.cursor.position >= _WORTH_A_CHUNK
        if is_worth_it and self.keeps(sequence) and not self._has_snapshots:
            self._save(sequence, position, fork=True)

    def begin_turn(self, sequence: Sequence) -> None:
        """Let the engine copy what `commit_turn` will store. Cheap the second time."""
        if sequence.saving is None and sequence.unsaved > 0 and self.keeps(sequence):
            self._begin_save(sequence, sequence.computed, tail=True, fork=False)

    @staticmethod
    def is_copied(sequence: Sequence) -> bool:
        """Nothing of it is still on its way out of the engine."""
        return sequence.saving is None or sequence.saving.is_done

    def commit_turn(self, sequence: Sequence) -> Entry | None:
        """Store what is left, and tell the store whose turn this was and which prefix it had in common with
        others; returns its entry."""
        self.commit_all(sequence)
        if not sequence.is_kept:
            return None
        stable, cursor = sequence.stable, sequence.cursor
        if stable is not None and stable.length <= cursor.position:
            # A prefix that the operator shares is one entry, whatever request uses it.
            place = place_at(cursor, stable.length)
            self._store.turn_ended(stable.label, replace(place, lineage=place.chunk.lineage))
        return self._store.turn_ended(sequence.label, cursor) if sequence.label else None

    def keeps(self, sequence: Sequence) -> bool:
        return self._can_export and sequence.is_kept and self._store.fits_engine

    def _save(self, sequence: Sequence, end: int, *, fork: bool) -> None:
        """Store everything up to `end`. Nothing may be on its way."""
        self._begin_save(sequence, end, tail=True, fork=fork)
        self._finish_save(sequence)

    def _begin_save(self, sequence: Sequence, end: int, *, tail: bool, fork: bool) -> None:
        """Let the engine copy what is not stored; what it has at once is stored."""
        sequence.cursor = self._store.advance(sequence.cursor, sequence.tokens[:end])
        is_packed = self._is_packed(sequence.cursor.chunk)
        start = sequence.cursor if is_packed else self._store.growth_point(sequence.cursor)
        borders = self._borders(start.position, end, tail=tail)
        if sequence.cursor.position >= end or len(borders) < 2:
            return
        try:
            exports = self._export(sequence, borders)
            around = self._export_around(sequence, borders)
        except EngineError as error:
            log.warning("what was computed is not kept: %s", error)
            return
        sequence.saving = Save(start, _new_chunks(sequence, borders, fork=fork), exports, around)
        if sequence.saving.is_done:
            self._finish_save(sequence)

    def _finish_save(self, sequence: Sequence) -> None:
        """Store what is on its way, if anything is. Blocks until it is there."""
        save, sequence.saving = sequence.saving, None
        if save is None or not self.keeps(sequence):
            return
        try:
            payloads = save.payloads()
        except EngineError as error:
            log.warning("what was computed is not kept: %s", error)
            return
        if save.around is not None:
            self._share(save.start, save.around)
        if not self._insert(save, payloads):
            sequence.cursor = self._store.origin(sequence.lineage)
            return
        # It may have been cut back, or have become approximate, since the bytes were copied.
        before = place_at(sequence.cursor, min(save.start.position, sequence.cursor.position))
        sequence.cursor = self._store.advance(before, sequence.tokens[: sequence.computed])

    def _insert(self, save: Save, payloads: Items[Payload]) -> bool:
        """False: a full store takes nothing more, and the rest is tried again later."""
        cursor = save.start
        for chunk, payload in zip(save.chunks, payloads, strict=True):
            end = cursor.position + len(chunk.tokens)
            cursor = self._store.insert(
                cursor, chunk.tokens, payload, chunk.sampled, fork=chunk.is_fork, made=chunk.made
            )
            if cursor.position != end:
                return False
        log.debug("hot -> warm: up to token %d, %d bytes", cursor.position, sum(map(len, payloads)))
        return True

    def _share(self, start: Cursor, around: tuple[NewChunk, KvExport]) -> None:
        """Other hosts, where conversations part elsewhere, find the block around the place where this one did."""
        block, export = around
        begin = place_at(start, block_start(start.position))
        (payload,) = export.payloads()
        self._store.share(begin, block.tokens, payload, block.sampled, block.made)

    def _export_around(self, sequence: Sequence, borders: list[int]) -> tuple[NewChunk, KvExport] | None:
        """The block in which the first chunk lies, where that begins inside it and others could use it."""
        if not self._store.shared.takes_more or not sequence.lineage.is_exact:
            return None
        begin = block_start(borders[0])
        if begin == borders[0]:
            return None
        ends = [begin, min(begin + BLOCK_TOKENS, borders[-1])]
        return _new_chunks(sequence, ends, fork=False)[0], self._engine.export_kv(sequence.slot, ends)

    def _export(self, sequence: Sequence, borders: list[int]) -> list[KvExport]:
        """Full chunks in the bits of their lineage; the newest tokens, whose chunk will grow, as they are."""
        bits = sequence.lineage.bits
        origin = block_start(borders[0]) if self._store.shared.is_shared else borders[0]
        full = [border for border in borders if border == borders[0] or (border - origin) % self._chunk == 0]
        if bits == EXACT_BITS or len(full) < 2:
            return [self._engine.export_kv(sequence.slot, borders)]
        exports = [self._engine.export_kv(sequence.slot, full, bits)]
        return exports + ([self._engine.export_kv(sequence.slot, borders[-2:])] if full[-1] < borders[-1] else [])

    def _is_packed(self, chunk: Chunk) -> bool:
        """Whether it is in fewer bits, though it may be shorter than chunks are now: packed once more, together
        with what follows it, its errors would add up."""
        if chunk.lineage.bits == EXACT_BITS:
            return False
        payload = chunk.payload  # given back by other threads
        exact = self._engine.capabilities.kv_bytes_per_token * len(chunk.tokens)
        return (chunk.bytes if payload is None else len(payload)) < _UNPACKED * exact

    def _borders(self, begin: int, end: int, *, tail: bool) -> list[int]:
        """Where chunks of [begin, end) begin and end; the last one may be shorter if it may be a tail. Where hosts
        share them the first one too, so that those after it are blocks."""
        first = block_start(begin) + BLOCK_TOKENS if self._store.shared.is_shared else begin + self._chunk
        borders = [begin, *range(first, end + 1, self._chunk)]
        return [*borders, end] if tail and borders[-1] < end else borders

    def _store_snapshot(self, sequence: Sequence) -> None:
        cursor = sequence.cursor
        if cursor.position != sequence.computed or self._store.has_snapshot(cursor):
            return
        try:
            payload = self._engine.export_snapshot(sequence.slot)
            self._store.insert_snapshot(cursor, payload, _made(sequence, 0, sequence.computed))
            log.debug("hot -> warm: a snapshot at token %d, %d bytes", cursor.position, len(payload))
        except EngineError as error:
            log.warning("what was computed is not kept: %s", error)


def _made(sequence: Sequence, start: int, end: int) -> Made:
    is_given = sequence.prompt.tokenized.is_given
    return sequence.shapes.within(start, end) | (Made.GIVEN if is_given else Made.UNKNOWN)


def _new_chunks(sequence: Sequence, borders: list[int], *, fork: bool) -> list[NewChunk]:
    """What lies between consecutive `borders`; `fork`: another sequence branches off at the last one."""
    return [
        NewChunk(
            sequence.tokens[start:end].copy(),
            _sampled_spans(sequence, start, end),
            _made(sequence, start, end),
            is_fork=fork and end == borders[-1],
        )
        for start, end in pairwise(borders)
    ]


def _sampled_spans(sequence: Sequence, start: int, end: int) -> tuple[Span, ...]:
    """Which of the positions [start, end) were sampled here, relative to `start`."""
    begin, finish = max(start, sequence.prompt_length), min(end, sequence.answer_end)
    return ((begin - start, finish - start),) if begin < finish else ()


# ── a prompt that is still text ──


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
        found = self._recent.replay(self._lineage, before, text, start, borders)
        if found[0] or left_the_store:
            return found
        self._cursor = self._store.advance(self._cursor, before)
        if self._cursor.position < self._count:
            return (), start
        return self._store.replay(self._cursor, text, start, borders, self._pieces, self._borders)

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
        if position > self.since:
            before = self._text(pieces, position)
        else:
            if self._probe is None:
                self._probe = self._text(pieces, max(self.known.sampled[0][0] - _PROBE, position))
            # Mostly not even the end of it is there, and that is soon found out.
            if not text.startswith(self._probe, start + self._size - len(self._probe)):
                return None
            if self._before is None:
                self._before = self._text(pieces, position)
            before = self._before
        return len(before) if text.startswith(before, start) else None

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
