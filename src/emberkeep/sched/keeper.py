"""Storing what a sequence has computed: chunk by chunk while it grows, the tail when it rests.

State that cannot be cut by token is stored where it will be wanted again: at the borders that a job names (the end
of its stable prefix, the ends of messages) and at the end of every turn.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from emberkeep.engine.base import Engine, Payload
from emberkeep.errors import EngineError
from emberkeep.kv.entries import Entry
from emberkeep.kv.store import CHUNK_TOKENS, KvStore
from emberkeep.kv.tree import place_at
from emberkeep.sched.sequence import Sequence
from emberkeep.types import EXACT_BITS

log = logging.getLogger("emberkeep.sched")

_WORTH_A_CHUNK = 16
"""Tokens that are worth a file of their own where sequences branch; fewer are stored once per branch."""


class Keeper:
    """Runs on the engine's thread between steps. Exports copy bytes; the disk is somebody else's work."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._engine = engine
        self._store = store
        self._takes_snapshots = engine.capabilities.kv_unit.has_snapshots
        # A layout that the engine does not know cannot be exported at all.
        self._can_export = not self._takes_snapshots or engine.capabilities.snapshot_bytes > 0

    def keep_full_chunks(self, sequence: Sequence) -> None:
        """Store every complete chunk. Cheap when there is none.

        With snapshots nothing is stored between them: no lookup could use it.
        """
        if not self._keeps(sequence):
            return
        if self._takes_snapshots:
            if sequence.computed in sequence.borders:
                self.keep_all(sequence)
        elif sequence.unsaved >= CHUNK_TOKENS:
            self._keep(sequence, sequence.computed, tail=False, fork=False)

    def keep_all(self, sequence: Sequence) -> None:
        """Store everything computed, with a tail chunk for what does not fill one."""
        if not self._keeps(sequence):
            return
        if sequence.unsaved > 0:
            self._keep(sequence, sequence.computed, tail=True, fork=False)
        if self._takes_snapshots and sequence.computed:
            self._keep_snapshot(sequence)

    def keep_fork(self, sequence: Sequence, position: int) -> None:
        """Store everything up to `position`, where another sequence is about to branch off.

        Ending a chunk there keeps the branches from each storing the shared part of it.
        """
        is_worth_it = position - sequence.cursor.position >= _WORTH_A_CHUNK
        if is_worth_it and self._keeps(sequence) and not self._takes_snapshots:
            self._keep(sequence, position, tail=True, fork=True)

    def write_down(self, sequence: Sequence) -> Entry | None:
        """Tell the store whose turn this was, and which prefix it had in common with others; returns its entry."""
        label, stable, cursor = sequence.notes.label, sequence.notes.stable, sequence.cursor
        if stable is not None and stable.length <= cursor.position:
            # A prefix that the operator shares is one entry, whoever uses it.
            place = place_at(cursor, stable.length)
            self._store.turn_ended(stable.label, replace(place, lineage=place.chunk.lineage))
        entry = self._store.turn_ended(label, cursor) if label else None
        if entry is not None:
            sequence.entry, sequence.turn = entry.id, entry.turns
        return entry

    def _keeps(self, sequence: Sequence) -> bool:
        return self._can_export and sequence.is_kept and self._store.fits_engine

    def _keep(self, sequence: Sequence, end: int, *, tail: bool, fork: bool) -> None:
        tokens = sequence.tokens[:end]
        sequence.cursor = self._store.advance(sequence.cursor, tokens)
        begin = self._store.growth_point(sequence.cursor)
        borders = _borders(begin.position, end, tail=tail)
        if sequence.cursor.position >= end or len(borders) < 2:
            return
        try:
            payloads = self._export(sequence, borders)
        except EngineError as error:
            log.warning("what was computed is not kept: %s", error)
            return
        cursor = begin
        for start, stop, payload in zip(borders, borders[1:], payloads, strict=False):
            cursor = self._store.insert(
                cursor,
                tokens[start:stop],
                payload,
                sequence.sampled_spans(start, stop),
                fork=fork and stop == end,
                made=sequence.made(start, stop),
            )
            if cursor.position != stop:
                break  # a full store takes nothing more: the rest is tried again later
        sequence.cursor = cursor

    def _export(self, sequence: Sequence, borders: list[int]) -> list[Payload]:
        """Full chunks in the bits of their lineage; the newest tokens, whose chunk will grow, as they are."""
        bits = sequence.lineage.bits
        full = [border for border in borders if (border - borders[0]) % CHUNK_TOKENS == 0]
        if bits == EXACT_BITS or len(full) < 2:
            return self._engine.export_kv(sequence.slot, borders)
        payloads = self._engine.export_kv(sequence.slot, full, bits)
        return payloads + (self._engine.export_kv(sequence.slot, borders[-2:]) if full[-1] < borders[-1] else [])

    def _keep_snapshot(self, sequence: Sequence) -> None:
        cursor = sequence.cursor
        if cursor.position != sequence.computed or self._store.has_snapshot(cursor):
            return
        try:
            payload = self._engine.export_snapshot(sequence.slot)
            self._store.insert_snapshot(cursor, payload, sequence.made(0, sequence.computed))
        except EngineError as error:
            log.warning("what was computed is not kept: %s", error)


def _borders(begin: int, end: int, *, tail: bool) -> list[int]:
    """Where chunks of [begin, end) begin and end; the last one may be shorter if it may be a tail."""
    borders = list(range(begin, end + 1, CHUNK_TOKENS))
    return [*borders, end] if tail and borders[-1] < end else borders
