"""What a generation gave and what it cost, at its end or while it is being written."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import TracebackType

from emberkeep.types import (
    Completed,
    Event,
    Eviction,
    Exchanged,
    Finished,
    FinishReason,
    Fit,
    LookupRecord,
    Message,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
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
    fit: Fit
    """The plan of its memory, and what was left out of the prompt."""
    logprobs: tuple[TokenLogprob, ...]
    """Of these, where they were asked for."""
    exchanges: tuple[Message, ...] = ()
    """What the model said and called before `text`, and the results: where tools ran here."""
    answered_by: str = ""
    """The backend that answered, if there are several."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that were added to the conversation."""
        return (*self.exchanges, Message("assistant", self.text, self.reasoning, self.tool_calls))

    @property
    def ttft_ms(self) -> float:
        return self.timings.ttft_ms

    @property
    def kv_reuse_ratio(self) -> float:
        """The part of the prompt that was not evaluated again, from 0 to 1."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        """What left the context, before the answer or while it was written."""
        return self.fit.evictions

    @property
    def recalled(self) -> int:
        """Archived turns that were put before the user's message."""
        return self.fit.recalled


@dataclass(frozen=True, slots=True)
class WarmResult:
    tokens: int
    cached_tokens: int
    """How many of them were stored before."""
    ms: float
    error: str | None = None
    """Why it is not ready after all."""


class Stream:
    """An answer while it is being written.

    Iterating gives the answer's text piece by piece; `events` gives everything that happens.

    The request starts when the stream is first read. Leaving it early (`close`, the end of a `with` block, or
    dropping it) stops the request within one step. Raises the request's EmberkeepError while it is read.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events = events
        self._collector: Collector | None = None

    def events(self) -> Iterator[Event]:
        collector = self._collector = self._collector or Collector()
        for event in self._events:
            collector.add(event)
            yield event

    def __iter__(self) -> Iterator[str]:
        return (event.text for event in self.events() if isinstance(event, TextDelta))

    @property
    def result(self) -> Result:
        """What has been read so far; complete once the stream is exhausted."""
        return (self._collector or Collector()).result()

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Collector:
    """Adds up the events of one choice; `result` may be asked for at any moment."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, ToolCall] = {}
        self._exchanges: list[Message] = []
        self._finish_reason: FinishReason | None = None
        self._completed = Completed(Usage(), Timings(), LookupRecord())

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text=text, tokens=tokens, logprobs=logprobs):
                self._text.append(text)
                self._tokens.extend(tokens)
                self._logprobs.extend(logprobs)
            case ReasoningDelta(text=text):
                self._reasoning.append(text)
            case ToolCallDelta(call_index=place):
                self._calls[place] = event.added_to(self._calls.get(place))
            case Finished(reason=reason):
                self._finish_reason = reason
            case Completed():
                self._completed = event
            case Exchanged(messages=messages):
                self._exchanges += messages
                for said in (self._text, self._reasoning, self._tokens, self._logprobs):
                    said.clear()

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
            logprobs=tuple(self._logprobs),
            fit=self._completed.fit,
            exchanges=tuple(self._exchanges),
            answered_by=self._completed.answered_by,
        )
