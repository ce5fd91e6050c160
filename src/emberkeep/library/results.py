"""What a generation gave and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from emberkeep.types import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Result:
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | None
    """None: stopped before the end."""
    total_ms: float
    """Wall clock, as the caller saw it."""
    usage: Usage
    timings: Timings
    lookup: LookupRecord
    tokens: tuple[int, ...]
    """The sampled ids behind `text`."""

    @property
    def ttft_ms(self) -> float:
        return self.timings.ttft_ms

    @property
    def kv_reuse_ratio(self) -> float:
        """The part of the prompt that was not evaluated again, from 0 to 1."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class WarmResult:
    tokens: int
    cached_tokens: int
    """How many of them were stored before."""
    ms: float
    error: str | None = None
    """Why it is not ready after all."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The same greedy request answered with stored state and by fresh evaluation."""

    cached: Result
    fresh: Result

    @property
    def equal(self) -> bool:
        return self.first_difference is None and self.cached.text == self.fresh.text

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs."""
        return _first_difference(self.cached.tokens, self.fresh.tokens)

    @property
    def agreement(self) -> float:
        """The part of the answer before the first difference, from 0 to 1."""
        if self.first_difference is None:
            return 1.0
        return self.first_difference / max(len(self.cached.tokens), len(self.fresh.tokens))

    @property
    def reused_tokens(self) -> int:
        return self.cached.usage.cached_tokens


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


class Collector:
    """Adds up the events of one choice; `result` may be asked for at any moment."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[int] = []
        self._calls: dict[int, ToolCall] = {}
        self._finish_reason: FinishReason | None = None
        self._completed = Completed(Usage(), Timings(), LookupRecord())

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text=text, tokens=tokens):
                self._text.append(text)
                self._tokens.extend(tokens)
            case ReasoningDelta(text=text):
                self._reasoning.append(text)
            case ToolCallDelta():
                self._add_call(event)
            case Finished(reason=reason):
                self._finish_reason = reason
            case Completed():
                self._completed = event

    def _add_call(self, delta: ToolCallDelta) -> None:
        call = self._calls.get(delta.call_index, ToolCall("", "", ""))
        self._calls[delta.call_index] = ToolCall(
            call.id or delta.id or "", call.name or delta.name or "", call.arguments + delta.arguments
        )

    def result(self) -> Result:
        return Result(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls[index] for index in sorted(self._calls)),
            finish_reason=self._finish_reason,
            total_ms=1e3 * (time.perf_counter() - self._started),
            usage=self._completed.usage,
            timings=self._completed.timings,
            lookup=self._completed.lookup,
            tokens=tuple(self._tokens),
        )
