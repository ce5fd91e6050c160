"""What a sequence has computed is stored: chunk by chunk while it grows, the rest when its turn ends.

State that cannot be cut by token is stored where it will be wanted again: at the borders that a prompt names (the
end of its stable prefix, the ends of messages) and at the end of every turn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise

from emberkeep.engine.base import Engine, KvExport, Payload
from emberkeep.errors import EngineError
from emberkeep.kv.entries import Entry
from emberkeep.kv.lookups import BLOCK_TOKENS, block_start
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, Cursor, Made, Span, place_at
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import NewChunk, Save
from emberkeep.types.lineage import EXACT_BITS

log = logging.getLogger("emberkeep.sched")

SAVED_AT_ONCE = 4096
"""Tokens that are stored between two steps at most."""
_CROWD = 32
"""So many more answers make the state of each wait for one more chunk."""
_UNPACKED = 0.75
"""A chunk with less than this share of the bytes of exact state is packed: that leaves little more than half."""
WORTH_A_CHUNK = 16
"""Tokens that are worth a file of their own where sequences branch; fewer are stored once per branch."""


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
            end = min(sequence.computed, sequence.cursor.position + SAVED_AT_ONCE)
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
        is_worth_it = position - sequence.cursor.position >= WORTH_A_CHUNK
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
        # Its last chunk may have become a part of one of the next turn's.
        sequence.cursor = self._store.advance(sequence.cursor, sequence.tokens[: sequence.computed])
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
        before, sequence.goes_on_from = sequence.goes_on_from, None
        if before is not None and before.is_active:
            try:
                self.commit_all(before)  # what was sampled there is known there only
            except Exception:
                log.exception("a turn is not stored before the one that goes on from it")
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
