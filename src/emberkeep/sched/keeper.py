"""Storing what a sequence has computed: chunk by chunk while it grows, the tail when it rests."""

from __future__ import annotations

import logging

from emberkeep.engine.base import Engine, KvUnit
from emberkeep.errors import EngineError
from emberkeep.kv.store import CHUNK_TOKENS, KvStore
from emberkeep.sched.sequence import Sequence

log = logging.getLogger("emberkeep.sched")

_WORTH_A_CHUNK = 16
"""Tokens that are worth a file of their own where sequences branch; fewer are stored once per branch."""


class Keeper:
    """Runs on the engine's thread between steps. Exports copy bytes; the disk is somebody else's work."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._engine = engine
        self._store = store
        self._enabled = engine.capabilities.kv_unit is KvUnit.RANGE

    def keep_full_chunks(self, sequence: Sequence) -> None:
        """Store every complete chunk. Cheap when there is none."""
        if sequence.unsaved >= CHUNK_TOKENS:
            self._keep(sequence, sequence.computed, tail=False, fork=False)

    def keep_all(self, sequence: Sequence) -> None:
        """Store everything computed, with a tail chunk for what does not fill one."""
        if sequence.unsaved > 0:
            self._keep(sequence, sequence.computed, tail=True, fork=False)

    def keep_fork(self, sequence: Sequence, position: int) -> None:
        """Store everything up to `position`, where another sequence is about to branch off.

        Ending a chunk there keeps the branches from each storing the shared part of it.
        """
        if position - sequence.cursor.position >= _WORTH_A_CHUNK:
            self._keep(sequence, position, tail=True, fork=True)

    def _keep(self, sequence: Sequence, end: int, *, tail: bool, fork: bool) -> None:
        if not self._enabled:
            return
        tokens = sequence.tokens[:end]
        cursor, before = sequence.cursor, -1
        # A full store takes nothing more: then the place does not move, and the rest is tried again later.
        while before < (cursor := self._store.advance(cursor, tokens)).position < end:
            before = cursor.position
            begin = self._store.growth_point(cursor)
            stop = min(begin.position + CHUNK_TOKENS, end)
            if stop - begin.position < CHUNK_TOKENS and not tail:
                break
            try:
                payload = self._engine.export_kv(sequence.slot, begin.position, stop)
            except EngineError as error:
                log.warning("what was computed is not kept: %s", error)
                break
            spans = sequence.sampled_spans(begin.position, stop)
            part = tokens[begin.position : stop]
            cursor = self._store.insert(
                begin, part, payload, spans, fork=fork and stop == end, given=sequence.given
            )
        sequence.cursor = cursor
