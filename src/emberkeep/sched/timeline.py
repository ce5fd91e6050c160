"""What runs, and what ran lately: who waited, was loaded, evaluated and sampled when, and in which slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import count
from time import monotonic

from emberkeep.sched.sequence import Phase, Sequence
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
