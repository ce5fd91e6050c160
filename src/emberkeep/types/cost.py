"""What a request cost, and why not less."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


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
    """How long the answer may become: as long as asked for, or as memory lasts."""
    predicted: int
    """The peak of the device's memory, in bytes."""
    beyond: int
    """The part of it that is not always there."""


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
    """Cutting the state: the engine's own work."""


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


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what was stored: the token index and the text on both sides."""

    token_index: int
    stored_text: str
    prompt_text: str
    where: str = ""
    """The part of the request that stands there (`message 3 (user)`), where that is known."""


class MissReason(StrEnum):
    """Why no more was reused."""

    NONE = "none"  # everything stored for this prompt was reused
    NEW = "new"  # nothing is stored for what follows
    DIVERGED = "diverged"  # stored text goes on differently
    EDITED = "edited_message"  # the same, inside a message that was stored with another text
    TOOLS = "changed_tools"  # the same, inside the definitions of tools
    EVICTED = "evicted"  # it was stored, and its room was needed
    EXPIRED = "expired"  # it was stored, outlived its TTL, and was removed
    REMOVED = "removed"  # somebody removed it
    OTHER_USER = "other_user"  # it is stored, for another user
    OTHER_MODEL = "other_model"  # it is stored, for another model or engine
    NO_SNAPSHOT = "no_snapshot"  # this model's state can be resumed only where it was snapshotted
    CORRUPT = "corrupt"  # a stored chunk failed verification
    GONE = "gone"  # a stored chunk disappeared between lookup and load
    CHEAPER = "cheaper_to_recompute"  # loading was predicted to take longer
    REMOTE = "remote"  # the model runs elsewhere, where what is reused is not ours to know
    DISABLED = "disabled"  # the request asked for fresh evaluation


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """What one request reused, from where, and why not more."""

    prompt_tokens: int = 0
    hot_tokens: int = 0
    warm_tokens: int = 0
    cold_tokens: int = 0
    moved_tokens: int = 0
    """Taken from other places, or moved up where something was cut out: approximate."""
    repaired_tokens: int = 0
    """How many of them were evaluated again, through most of the layers."""
    wide_tokens: int = 0
    """Of the reused ones, how many were computed in steps of many rows; those of few rows round differently."""
    reproducible_tokens: int = 0
    """The first so many of the reused ones: evaluated again, alone and in steps of many rows, they have the very
    bytes that were stored."""
    is_approximate: bool = False
    """The answer rests on state that was moved or quantised, by this request or before it."""
    load_ms: float = 0.0
    cut_ms: float = 0.0
    """What the engine needed to cut out what left the context."""
    reason: MissReason = MissReason.NEW
    divergence: Divergence | None = None

    @property
    def reused_tokens(self) -> int:
        return self.hot_tokens + self.warm_tokens + self.cold_tokens

    @property
    def cached_tokens(self) -> int:
        """Reused where they were computed, or moved."""
        return self.reused_tokens + self.moved_tokens

    @property
    def narrow_tokens(self) -> int:
        """Of the reused ones, how many were computed in steps of few rows, or nobody knows in which."""
        return self.reused_tokens - self.wide_tokens


def expectation(reused: int, wide: int, reproducible: int) -> str:
    """What a fresh evaluation of reused tokens may be expected to give."""
    if not reused:
        return "Nothing was reused."
    if reproducible == reused:
        return f"All {reused:,} tokens can be reproduced to the bit."
    return (
        f"{reproducible:,} of {reused:,} tokens can be reproduced to the bit ({wide:,} computed in wide steps, "
        f"{reused - wide:,} in narrow ones); of the others a fresh evaluation gives the same but for rounding."
    )
