"""What a generation gave and what it cost, and how much one from stored state differs from a fresh evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from emberkeep.api.answer import ChoiceAnswer, likeliest
from emberkeep.errors import EmberkeepError
from emberkeep.types.cache import expectation
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


CANDIDATES = 256
"""Tokens of each distribution that are compared one by one."""

_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The same greedy request answered with stored state and by fresh evaluation."""

    cached: Result
    fresh: Result
    forced: Result | None = None
    """Stored state made to follow the fresh answer, token by token; None where not all of that is shown."""

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
        return self.first_difference / self.length

    @property
    def length(self) -> int:
        """Tokens of the longer of the two answers."""
        return max(len(self.cached.tokens), len(self.fresh.tokens))

    @property
    def forced_agreement(self) -> float | None:
        """The share of the fresh answer's tokens that are the most likely here too, each after those before it."""
        pairs = self._pairs()
        if not pairs:
            return None
        return sum(ours.top[0].token_id == theirs.token_id for ours, theirs in pairs) / len(pairs)

    @property
    def first_kl(self) -> float | None:
        """How far the distribution of the first token is from the fresh one's, in nats; see `kl`."""
        return kl(*self._pairs()[0][::-1]) if self._pairs() else None

    @property
    def mean_kl(self) -> float | None:
        """The same over the fresh answer."""
        pairs = self._pairs()
        return sum(kl(theirs, ours) for ours, theirs in pairs) / len(pairs) if pairs else None

    @property
    def reused_tokens(self) -> int:
        return self.cached.usage.cached_tokens

    @property
    def wide_tokens(self) -> int:
        """How many of the reused ones were computed in steps of many rows."""
        return self.cached.lookup.wide_tokens

    @property
    def narrow_tokens(self) -> int:
        """And in steps of few, which round differently."""
        return self.cached.lookup.reused_tokens - self.cached.lookup.wide_tokens

    @property
    def reproducible_tokens(self) -> int:
        """The first so many: evaluated again, alone and in steps of many rows, they have the very bytes that were
        stored."""
        return self.cached.lookup.reproducible_tokens

    def __str__(self) -> str:
        lookup = self.cached.lookup
        bits = expectation(lookup.reused_tokens, lookup.wide_tokens, lookup.reproducible_tokens)
        lines = [self._reuse(), bits, self._answers_agree()]
        if self.first_kl is not None and self.mean_kl is not None:
            lines.append(
                f"KL of the next token: {self.first_kl:.4f} at first, {self.mean_kl:.4f} over the answer."
            )
        return "\n".join(lines)

    def _reuse(self) -> str:
        lookup = self.cached.lookup
        moved = f", {lookup.moved_tokens:,} from other places" if lookup.moved_tokens else ""
        again = f" ({lookup.repaired_tokens:,} of these evaluated again)" if lookup.repaired_tokens else ""
        kind = "approximate" if lookup.is_approximate else "exact"
        return f"{self.reused_tokens:,} of {lookup.prompt_tokens:,} tokens were reused{moved}{again}: {kind}."

    def _answers_agree(self) -> str:
        at = self.first_difference
        same = f"all {self.length}" if at is None else f"the first {at} of {self.length}"
        forced = self.forced_agreement
        following = "" if forced is None else f"; told the fresh answer so far, {forced:.0%}"
        return f"Greedy tokens that agree: {same}{following}."

    def _pairs(self) -> list[tuple[TokenLogprob, TokenLogprob]]:
        """For each token of the fresh answer: its distribution from stored state, and from a fresh evaluation."""
        if self.forced is None:
            return []
        return list(zip(self.forced.logprobs, self.fresh.logprobs, strict=False))


@dataclass(frozen=True, slots=True)
class VerifiedPrompt:
    """One of those that were compared."""

    prompt: str
    """Its beginning, as a person recognises it."""
    report: VerifyReport | None = None
    error: EmberkeepError | None = None
    """Why it could not be compared."""

    def __str__(self) -> str:
        if self.report is None:
            return f"not compared  {self.prompt}: {self.error}"
        report, length = self.report, self.report.length
        agreed = length if report.first_difference is None else report.first_difference
        return f"{agreed:>3} of {length:<3}  {report.reused_tokens:>6,} reused  {self.prompt}"


@dataclass(frozen=True, slots=True)
class VerifySummary:
    """Several prompts, each compared by itself."""

    items: tuple[VerifiedPrompt, ...]
    """In the order in which they were given."""

    @property
    def reports(self) -> list[VerifyReport]:
        """The reports of those that could be compared."""
        return [item.report for item in self.items if item.report is not None]

    @property
    def failed(self) -> list[VerifiedPrompt]:
        return [item for item in self.items if item.report is None]

    @property
    def equal(self) -> bool:
        """All were compared, and no answer differs."""
        return not self.failed and all(report.equal for report in self.reports)

    @property
    def agreement(self) -> float | None:
        """The share of all answers' tokens before the first difference in each; None: nothing was compared."""
        return _weighted((report.agreement, report.length) for report in self.reports)

    @property
    def forced_agreement(self) -> float | None:
        """As that of a report, over all tokens for which it is known."""
        return _weighted((report.forced_agreement, len(report.fresh.tokens)) for report in self.reports)

    @property
    def mean_kl(self) -> float | None:
        """As that of a report, over all tokens for which it is known."""
        return _weighted((report.mean_kl, len(report.fresh.tokens)) for report in self.reports)

    @property
    def reused_tokens(self) -> int:
        return sum(report.reused_tokens for report in self.reports)

    def __str__(self) -> str:
        same = sum(report.equal for report in self.reports)
        total = [f"{same} of {len(self.items)} answers are equal; {self.reused_tokens:,} tokens were reused."]
        if self.agreement is not None:
            forced = self.forced_agreement
            following = "" if forced is None else f"; told the fresh answer so far, {forced:.1%}"
            total.append(f"Greedy tokens that agree: {self.agreement:.1%}{following}.")
        if self.mean_kl is not None:
            total.append(f"KL of the next token: {self.mean_kl:.4f} over all answers.")
        return "\n".join([*(f"{number:>3}  {item}" for number, item in enumerate(self.items, 1)), *total])


def _weighted(figures: Iterable[tuple[float | None, int]]) -> float | None:
    """The mean of what is known; what has no tokens counts as one."""
    known = [(figure, max(weight, 1)) for figure, weight in figures if figure is not None]
    weights = sum(weight for _, weight in known)
    return sum(figure * weight for figure, weight in known) / weights if known else None


def kl(exact: TokenLogprob, other: TokenLogprob) -> float:
    """The Kullback-Leibler divergence of two next-token distributions, in nats.

    All tokens that are not among the `CANDIDATES` of both count as one, so it is never more than the true value.
    """
    p = {token.token_id: math.exp(token.logprob) for token in exact.top}
    q = {token.token_id: math.exp(token.logprob) for token in other.top}
    shared = p.keys() & q.keys()
    pairs = [(p[token], q[token]) for token in shared]
    pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
    total = sum(a * math.log(a / max(b, _SMALLEST)) for a, b in pairs if a > _SMALLEST)
    return max(total, 0.0)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
