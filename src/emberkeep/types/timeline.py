"""How one request goes, or went: what a timeline is drawn of."""

from __future__ import annotations

from enum import StrEnum

from emberkeep.types.events import LookupRecord
from emberkeep.values import dataclass


class RequestState(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """One answer of one request, without its texts. Times are on the monotonic clock; None: not yet, or never."""

    number: int
    namespace: str
    user: str
    conversation_id: str | None
    is_prefix: bool
    """It was only to be ready: nothing is sampled."""
    state: RequestState
    slot: int
    """-1: it has, or had, none."""
    asked_at: float
    started_at: float | None
    loaded_at: float | None
    """Where something was loaded."""
    first_token_at: float | None
    ended_at: float | None
    computed_tokens: int
    """How much of the prompt is in the engine now, reused or evaluated."""
    sampled_tokens: int
    lookup: LookupRecord
