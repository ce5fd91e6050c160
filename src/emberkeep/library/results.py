"""What a generation gave and what it cost, at its end or while it is being written."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from types import TracebackType

from emberkeep.api.answer import ChoiceAnswer, likeliest
from emberkeep.errors import EmberkeepError
from emberkeep.types.events import (
    Completed,
    Event,
    Eviction,
    Exchanged,
    Finished,
    FinishReason,
    Fit,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import Message, ToolCall
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class ResultChoice:
    """One answer of those that were asked for."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None
    """None: stopped before the end."""
    tokens: tuple[int, ...] = ()
    """The sampled ids behind `text`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """How likely each of these was, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Result:
    """`text` and what else belongs to one answer is the first choice's."""

    choices: tuple[ResultChoice, ...]
    """As many as were asked for (`n`), in order."""
    total_ms: float
    """Wall clock, as the caller saw it."""
    usage: Usage
    timings: Timings
    lookup: LookupRecord
    fit: Fit
    """The plan of its memory, and what was left out of the prompt."""
    exchanges: tuple[Message, ...] = ()
    """What the model said and called before `text`, and the results: where tools ran here."""
    answered_by: str = ""
    """The backend that answered, if there are several."""
    error: EmberkeepError | None = None
    """Why this one of a batch ended where it did. Every other call raises it."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

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

    Iterating gives the answer's text piece by piece, of several choices the first one's; `events` gives everything
    that happens.

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
        return (event.text for event in self.events() if isinstance(event, TextDelta) and event.index == 0)

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
    """Adds up the events of one request; `result` may be asked for at any moment."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._choices = {0: ChoiceAnswer()}
        self._exchanges: list[Message] = []
        self._completed = Completed(Usage(), Timings(), LookupRecord())

    def add(self, event: Event) -> None:
        match event:
            case TextDelta() | ReasoningDelta() | ToolCallDelta() | Finished():
                self._choices.setdefault(event.index, ChoiceAnswer()).add(event)
            case Completed():
                self._completed = event
            case Exchanged(messages=messages):
                self._exchanges += messages
                # Calls that were passed on are the client's.
                self._choices = {0: ChoiceAnswer(calls=self._choices[0].calls)}

    def result(self) -> Result:
        return Result(
            choices=tuple(_choice(self._choices[index]) for index in sorted(self._choices)),
            total_ms=1e3 * (time.perf_counter() - self._started),
            usage=self._completed.usage,
            timings=self._completed.timings,
            lookup=self._completed.lookup,
            fit=self._completed.fit,
            exchanges=tuple(self._exchanges),
            answered_by=self._completed.answered_by,
        )


def _choice(answer: ChoiceAnswer) -> ResultChoice:
    return ResultChoice(
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=tuple(call for _, call in sorted(answer.calls.items())),
        finish_reason=answer.finish,
        tokens=tuple(answer.tokens),
        logprobs=tuple(answer.logprobs),
    )


def keep_best(result: Result, kept: int, *, with_logprobs: bool) -> Result:
    """With the likeliest of its choices only."""
    best = likeliest(result.choices, kept)
    choices = tuple(best if with_logprobs else [replace(choice, logprobs=()) for choice in best])
    return replace(result, choices=choices)
