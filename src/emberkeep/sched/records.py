"""What is told of requests: who waited, was loaded, evaluated and sampled when, and why no more was reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import count
from time import monotonic

import numpy as np

from emberkeep.engine.base import Engine
from emberkeep.kv.lookups import Match
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.sequence_state import Phase
from emberkeep.sched.slots import HotMatch
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import Divergence, MissReason
from emberkeep.types.timeline import RequestState, TimelineRecord

REMEMBERED = 200


class Timeline:
    """Written by the engine's thread, and read by any."""

    def __init__(self) -> None:
        self._latest: deque[TimelineRecord] = deque(maxlen=REMEMBERED)
        self._numbers = count(1)

    def came(self, sequence: Sequence) -> None:
        sequence.number = next(self._numbers)

    def ended(self, sequence: Sequence, state: RequestState) -> None:
        self._latest.append(replace(_record(sequence), state=state, ended_at=monotonic()))

    def forget(self, owners: Container[str]) -> None:
        kept = [record for record in self._latest if record.namespace not in owners]
        self._latest = deque(kept, maxlen=REMEMBERED)

    def read(self, present: Iterable[Sequence]) -> list[TimelineRecord]:
        """The latest first; `present` are those that have not ended."""
        running = [_record(sequence) for sequence in present if sequence.output is not None]
        # One may get its slot, or end, while this is read: what is known last counts.
        found = {record.number: record for record in (*running, *list(self._latest))}
        return [found[number] for number in sorted(found, reverse=True)]


def _record(sequence: Sequence) -> TimelineRecord:
    request, has_slot = sequence.request, sequence.phase is not Phase.WAITING
    is_known = sequence.is_kept  # else nothing of it may be left, or its user was forgotten meanwhile
    reuse = sequence.reuse
    was_loaded = reuse.in_place + reuse.moved > reuse.hot
    return TimelineRecord(
        number=sequence.number,
        namespace=request.namespace if is_known else "",
        user=request.user if is_known else "",
        conversation_id=request.conversation_id if is_known else None,
        is_prefix=request.execution.is_prefix,
        state=_state(sequence),
        slot=sequence.slot,
        asked_at=sequence.submitted,
        started_at=sequence.started if has_slot else None,
        loaded_at=sequence.started + reuse.load_seconds if was_loaded and reuse.load_seconds else None,
        first_token_at=sequence.first_token_at,
        ended_at=None,
        computed_tokens=min(sequence.computed, sequence.prompt_length),
        sampled_tokens=sequence.sampled_count,
        lookup=sequence.lookup_record(),
    )


def _state(sequence: Sequence) -> RequestState:
    if sequence.phase is Phase.WAITING:
        return RequestState.WAITING
    if sequence.phase is Phase.LOADING:
        return RequestState.LOADING
    return RequestState.PREFILL if sequence.first_token_at is None else RequestState.DECODE


_EXCERPT_TOKENS = 12


class Misses:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._store = store
        self._pieces = engine.vocab.pieces
        self._whole_only = engine.capabilities.kv_unit.has_snapshots

    def reason(self, sequence: Sequence, match: Match, left_behind: TokenArray) -> MissReason:
        """Why not more than the longest of hot and stored state can be reused.

        `left_behind` is what the hot sequence has where the prompt goes on differently.
        """
        prompt = sequence.prompt
        if match.tokens < sequence.computed:
            return self._diverged(sequence, sequence.computed, left_behind)
        if not self._store.fits_engine:
            return MissReason.OTHER_MODEL
        if gone := self._store.why_gone(match.cursor, prompt.tokens):
            return gone
        stored = self._store.stored_after(match.cursor)
        if match.tokens == prompt.reusable or not len(stored):
            return MissReason.NO_SNAPSHOT if self._falls_short(sequence, match) else MissReason.NEW
        return self._diverged(sequence, match.tokens, stored)

    def _diverged(self, sequence: Sequence, reached: int, known: TokenArray) -> MissReason:
        """Note what is known after `reached` tokens, and what the prompt has there."""
        prompt = sequence.prompt
        if not len(known) or reached >= prompt.reusable:
            return MissReason.NEW
        stored_text, prompt_text = self._excerpt(known), self._excerpt(prompt.tokens[reached:])
        sequence.reuse.divergence = Divergence(reached, stored_text, prompt_text)
        return MissReason.DIVERGED

    def _falls_short(self, sequence: Sequence, match: Match) -> bool:
        """The tokens are known, but their state can be resumed only at an earlier place."""
        restored = max(match.snapshot.start if match.snapshot else 0, sequence.computed)
        return self._whole_only and restored < match.tokens

    def _excerpt(self, tokens: TokenArray) -> str:
        known = [t for t in tokens[:_EXCERPT_TOKENS].tolist() if t < len(self._pieces)]
        return b"".join(self._pieces[t] for t in known).decode("utf-8", "replace")


def left_behind(hot: HotMatch) -> TokenArray:
    if hot.sequence is None:
        return np.empty(0, np.int32)
    return hot.sequence.tokens[hot.tokens : hot.sequence.computed][:_EXCERPT_TOKENS].copy()
