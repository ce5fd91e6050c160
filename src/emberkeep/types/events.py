"""What happens while a request is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from emberkeep.types.cost import Fit, LookupRecord, MissReason, Timings, Usage
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


def merge_usage(completed: Sequence[Completed], *, are_rounds: bool = False) -> Completed:
    """One for the several prompts of one HTTP request, or for the rounds of one answer (`are_rounds`).

    The prompt of a round holds those of the rounds before it: only the last one's counts.
    """
    first, last = completed[0], completed[-1]
    if len(completed) == 1:
        return first
    prompts = [last] if are_rounds else completed
    timings = [one.timings for one in prompts]
    return Completed(
        usage=Usage(
            prompt_tokens=sum(one.usage.prompt_tokens for one in prompts),
            completion_tokens=sum(one.usage.completion_tokens for one in completed),
            cached_tokens=sum(one.usage.cached_tokens for one in prompts),
            reasoning_tokens=sum(one.usage.reasoning_tokens for one in completed),
        ),
        timings=Timings(
            cache_n=sum(one.cache_n for one in timings),
            prompt_n=sum(one.prompt_n for one in timings),
            prompt_ms=sum(one.prompt_ms for one in timings),
            predicted_n=sum(one.timings.predicted_n for one in completed),
            predicted_ms=sum(one.timings.predicted_ms for one in completed),
            ttft_ms=first.timings.ttft_ms if are_rounds else min(one.ttft_ms for one in timings),
            queue_ms=first.timings.queue_ms if are_rounds else max(one.queue_ms for one in timings),
        ),
        lookup=_merge_lookups([one.lookup for one in prompts]),
        fit=replace(
            _merge_fits([one.fit for one in prompts]),
            evictions=tuple(eviction for one in completed for eviction in one.fit.evictions),
        ),
        answered_by=prompts[0].answered_by,
    )


def _merge_lookups(lookups: Sequence[LookupRecord]) -> LookupRecord:
    """The reason and the divergence are those of the first prompt that missed something."""
    if len(lookups) == 1:
        return lookups[0]
    missed = next((one for one in lookups if one.reason is not MissReason.NONE), lookups[0])
    return LookupRecord(
        prompt_tokens=sum(one.prompt_tokens for one in lookups),
        hot_tokens=sum(one.hot_tokens for one in lookups),
        warm_tokens=sum(one.warm_tokens for one in lookups),
        cold_tokens=sum(one.cold_tokens for one in lookups),
        moved_tokens=sum(one.moved_tokens for one in lookups),
        repaired_tokens=sum(one.repaired_tokens for one in lookups),
        is_approximate=any(one.is_approximate for one in lookups),
        load_ms=sum(one.load_ms for one in lookups),
        reason=missed.reason,
        divergence=missed.divergence,
    )


def _merge_fits(fits: Sequence[Fit]) -> Fit:
    """The plan is the one that was predicted to need most."""
    return replace(
        max(fits, key=lambda one: one.predicted_bytes),
        truncated_tokens=sum(one.truncated_tokens for one in fits),
        truncated_messages=sum(one.truncated_messages for one in fits),
        recalled=sum(one.recalled for one in fits),
    )
