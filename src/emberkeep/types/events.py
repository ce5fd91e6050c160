"""What happens while a request is answered, and what it cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from emberkeep.types.request import Message, ToolCall
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Marked:
    """How much of a prompt lies before its breakpoints."""

    tokens: int = 0
    """Before the last one; 0: there is none."""
    long_tokens: int = 0
    """Before the last one that is to be kept for longer than the short TTL."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Those of the completion that were drafted before they were sampled."""
    rejected_prediction_tokens: int = 0
    """Drafted, evaluated, and taken back."""
    marked: Marked = Marked()

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def created_tokens(self) -> int:
        """Those before the last breakpoint that were not reused, and are stored for the next request."""
        return max(self.marked.tokens - self.cached_tokens, 0)


@dataclass(frozen=True, slots=True)
class Timings:
    """llama.cpp's vocabulary. `prompt_n` excludes reused tokens."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    saved_ms: float = 0.0
    """What evaluating the reused tokens would have taken, less what loading them took; 0: unknown."""

    @property
    def prompt_per_second(self) -> float:
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def predicted_per_second(self) -> float:
        return 1e3 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request is evaluated so that it fits into memory."""

    prefill_slice: int
    """Most of its prompt tokens in one step."""
    kv_bits: int
    """In how many bits its state is stored."""


@dataclass(frozen=True, slots=True)
class Admitted:
    plan: Plan
    prompt_tokens: int
    max_new: int
    """Most tokens of the answer: what was asked for, or what fits into memory."""
    predicted: int
    """The peak of the device's memory, in bytes."""
    beyond: int
    """The part of it beyond what the engine always holds."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What left the context for the sake of one request, and how long that took."""

    messages: int
    tokens: int
    out: int
    """Messages that are out of the context in all."""
    archived: bool = True
    error: str = ""
    """Why they were not archived."""
    plan_ms: float = 0.0
    """Deciding what leaves."""
    archive_ms: float = 0.0
    engine_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """What was done to make a request fit."""

    plan: Plan | None = None
    """None: nothing was planned."""
    predicted_bytes: int = 0
    """The peak of memory that was predicted with the plan."""
    truncated_tokens: int = 0
    truncated_messages: int = 0
    """How much was left out of the prompt."""
    evictions: tuple[Eviction, ...] = ()
    """What left the context, before the answer or while it was written."""
    recalled: int = 0
    """Archived turns that stand before the user's message."""
    clamped_to: int | None = None
    """Most tokens of the answer, where the configuration allows fewer than were asked for."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt differs from what is stored: the token index and the text on both sides."""

    token_index: int
    stored_text: str
    prompt_text: str
    where: str = ""
    """The part of the request at that token (`message 3 (user)`), if it is known."""
    volatile: tuple[str, ...] = ()
    """What it differs in from an earlier request of the same client, if in nothing else: `timestamps`, `ids`,
    `numbers`, `tool-order`."""


class MissReason(StrEnum):
    """Why no more was reused."""

    NONE = "none"  # everything stored for this prompt was reused
    NEW = "new"  # nothing is stored for what follows
    DIVERGED = "diverged"  # stored text goes on differently
    EDITED = "edited_message"  # the same, inside a message that was stored with another text
    TOOLS = "changed_tools"  # the same, inside the definitions of tools
    VOLATILE = "volatile_text"  # the same, in nothing but what changes with every call: a time, an id
    EVICTED = "evicted"  # it was stored, and its room was needed
    EXPIRED = "expired"  # it was stored, outlived its TTL, and was removed
    REMOVED = "removed"  # a request removed it
    OTHER_USER = "other_user"  # it is stored, for another user
    OTHER_MODEL = "other_model"  # it is stored, for another model or engine
    NO_SNAPSHOT = "no_snapshot"  # this model's state can be resumed only where it was snapshotted
    CORRUPT = "corrupt"  # a stored chunk failed verification
    GONE = "gone"  # a stored chunk disappeared between lookup and load
    CHEAPER = "cheaper_to_recompute"  # loading was predicted to take longer
    REMOTE = "remote"  # the model runs elsewhere, where what is reused is not ours to know
    DISABLED = "disabled"  # the request asked for fresh evaluation


class Source(StrEnum):
    """Where the state of a token came from."""

    HOT = "hot"  # it was in the engine
    WARM = "warm"  # from RAM
    COLD = "cold"  # from disk
    REMOTE = "remote"  # from the tier that hosts share
    MOVED = "moved"  # computed at another position
    EVALUATED = "evaluated"


@dataclass(frozen=True, slots=True)
class Sourced:
    """Tokens of a prompt, one after the other, whose state came from one place."""

    source: Source
    tokens: int


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """What one request reused, from where, and why not more."""

    prompt_tokens: int = 0
    hot_tokens: int = 0
    warm_tokens: int = 0
    cold_tokens: int = 0
    remote_tokens: int = 0
    moved_tokens: int = 0
    """Their state was moved from other positions, or moved up by a splice: approximate."""
    repaired_tokens: int = 0
    """How many of them were evaluated again, through most of the layers."""
    wide_tokens: int = 0
    """How many of the reused ones were computed in steps of many rows; those of few rows round differently."""
    reproducible_tokens: int = 0
    """The first so many of the reused ones: evaluated again, alone and in steps of many rows, they have the very
    bytes that were stored."""
    is_approximate: bool = False
    """The answer depends on state that was moved or quantised, by this request or before it."""
    load_ms: float = 0.0
    cut_ms: float = 0.0
    """Time of the engine to splice out what left the context."""
    reason: MissReason = MissReason.NEW
    divergence: Divergence | None = None
    sources: tuple[Sourced, ...] = ()
    """Where each part of the prompt came from, in its order; empty where that is not known."""

    @property
    def reused_tokens(self) -> int:
        return self.hot_tokens + self.warm_tokens + self.cold_tokens + self.remote_tokens

    @property
    def cached_tokens(self) -> int:
        """Reused where they were computed, or moved."""
        return self.reused_tokens + self.moved_tokens


class Decision(StrEnum):
    """The user's answer about a call that may do harm."""

    ONCE = "once"
    NO = "no"  # not this one
    ALWAYS = "always"  # of this tool, for this session
    NEVER = "never"  # neither


@dataclass(frozen=True, slots=True)
class Caller:
    """The user for whom a tool runs."""

    owner: str = ""
    """The user's namespace: what is remembered belongs to it."""
    depth: int = 0
    """How many models stand between the user and this call."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of a tool call. A call that failed has a text too, which tells the model why."""

    call: ToolCall
    text: str
    failed: bool = False
    ms: float = 0.0
    remark: str = ""
    """For the user: which model answered, and how many tokens it took."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallEnded:
    outcome: ToolOutcome


@dataclass(frozen=True, slots=True)
class PermissionAsked:
    """The call waits until the user has decided."""

    call: ToolCall
    group: str
    id: str = ""
    """The question's: whoever has it can answer."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The conversation now has these messages too: what the model said and called, and the results."""

    messages: tuple[Message, ...]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    piece: bytes
    """Empty for a token that the text does not have: what a model wants before any text."""
    logprob: float
    """NaN: there is none, because nothing comes before it."""
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """Nothing is wrong with the request: it waits for its turn in the engine."""

    prompt_tokens: int
    prompt: str = field(default="", repr=False)
    """As the model reads it, where that is known."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The answer waits until its model is loaded. Comes again every few moments until then."""

    model: str
    fraction: float | None = None
    """How much of it is loaded; None: that is not known."""
    step: str = ""
    """What is being done, where that is known: it may have to be fetched first."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt evaluation so far; `processed` includes `cached`."""

    total: int
    cached: int
    processed: int
    elapsed_ms: float
    marked: Marked = Marked()


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

    def added_to(self, call: ToolCall | None) -> ToolCall:
        """The call with this delta too; None before its first."""
        known = call or ToolCall("", "", "")
        return ToolCall(known.id or self.id or "", known.name or self.name or "", known.arguments + self.arguments)


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` has ended."""

    index: int
    reason: FinishReason
    stop: str | None = None
    """The stop string that ended it; None where none did, or a service does not tell."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that succeeded."""

    usage: Usage
    timings: Timings
    lookup: LookupRecord
    fit: Fit = field(default_factory=Fit)
    answered_by: str = ""
    """The backend that answered, if there are several."""
    slot: int = -1
    """The engine's slot of the first choice; -1: it is not known."""
    hygiene: tuple[str, ...] = ()
    """Rules that changed the prompt before it was evaluated."""


ToolEvent = CallStarted | CallEnded | PermissionAsked | Exchanged
"""Events about tools that run here."""

Event = (
    Loading | Accepted | Progress | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Completed | ToolEvent
)
Events = AsyncGenerator[Event, None]
"""What happens during one answer. Closing it gives the answer up."""


def merge_usage(completed: Sequence[Completed], *, are_rounds: bool = False) -> Completed:
    """One for the several prompts of one HTTP request, or for the rounds of one answer (`are_rounds`).

    The prompt of a round holds those of the rounds before it: only the last one's counts.
    """
    first, last = completed[0], completed[-1]
    if len(completed) == 1:
        return first
    prompts = [last] if are_rounds else completed
    usages, timings = [one.usage for one in completed], [one.timings for one in completed]
    of_prompts = [one.timings for one in prompts]
    fits = [one.fit for one in prompts]
    return Completed(
        usage=replace(
            last.usage,
            **_sums([one.usage for one in prompts], "prompt_tokens", "cached_tokens"),
            **_sums(usages, "completion_tokens", "reasoning_tokens"),
            **_sums(usages, "accepted_prediction_tokens", "rejected_prediction_tokens"),
        ),
        timings=Timings(
            **_sums(of_prompts, "cache_n", "prompt_n", "prompt_ms"),
            **_sums(timings, "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "saved_ms"),
            ttft_ms=first.timings.ttft_ms if are_rounds else min(one.ttft_ms for one in timings),
            queue_ms=first.timings.queue_ms if are_rounds else max(one.queue_ms for one in timings),
        ),
        lookup=_merge_lookups([one.lookup for one in prompts]),
        fit=replace(
            max(fits, key=lambda fit: fit.predicted_bytes),  # the plan that was predicted to need most
            **_sums(fits, "truncated_tokens", "truncated_messages", "recalled"),
            evictions=tuple(eviction for one in completed for eviction in one.fit.evictions),
        ),
        answered_by=prompts[0].answered_by,
        hygiene=tuple(dict.fromkeys(name for one in completed for name in one.hygiene)),
    )


def _sums(values: Sequence[object], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(value, name) for value in values) for name in names}


def _merge_lookups(lookups: Sequence[LookupRecord]) -> LookupRecord:
    """The reason and the divergence are those of the first prompt that missed something."""
    if len(lookups) == 1:
        return lookups[0]
    missed = next((one for one in lookups if one.reason is not MissReason.NONE), lookups[0])
    return LookupRecord(
        **_sums(lookups, "prompt_tokens", "hot_tokens", "warm_tokens", "cold_tokens", "remote_tokens"),
        **_sums(lookups, "moved_tokens", "repaired_tokens", "load_ms"),
        is_approximate=any(one.is_approximate for one in lookups),
        reason=missed.reason,
        divergence=missed.divergence,
    )
