"""What happens while a request is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from emberkeep.types.cost import Fit, LookupRecord, Timings, Usage
from emberkeep.types.tools import CallEnded, CallStarted, Exchanged, PermissionAsked


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt evaluation so far; `processed` includes `cached`."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[int, ...] = ()
    """The sampled ids behind the text, where the text is passed on as it was sampled."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The first delta of a call carries `id` and `name`; arguments may follow in pieces."""

    index: int
    call_index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` has ended."""

    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that succeeded."""

    usage: Usage
    timings: Timings
    lookup: LookupRecord
    fit: Fit = field(default_factory=Fit)
    answered_by: str = ""
    """The backend, where there are several that stand in for each other."""


ToolEvent = CallStarted | CallEnded | PermissionAsked | Exchanged
"""Of tools that run here, for a model and not for its client."""

Event = Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Completed | ToolEvent
