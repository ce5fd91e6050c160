"""The choices of one request: how their tokens are drawn, tokens in on the engine's thread, and events out for the
task that reads them.

Tokens are handed over once per step, all together, just before the engine computes and lets go of the interpreter:
the readers then work while it computes, and neither waits for the other. A reader makes text of all tokens that
have come; only where text may end an answer (a stop string) the engine's thread does, token by token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from emberkeep.backend.limits import Permit
from emberkeep.chat.output import TextStream, open_reasoning
from emberkeep.chat.prompt import Prompt
from emberkeep.errors import EmberkeepError
from emberkeep.latest import Latest
from emberkeep.sched.lifetimes import explained
from emberkeep.sched.sampler_chain import Breakers, Chain, ChainedSampler, find_breakers
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence_state import Ending, EndReason
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Progress,
    TextDelta,
    TokenLogprob,
    Usage,
)
from emberkeep.types.models import Vocab
from emberkeep.types.request import Request, Sampling
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.chat.grammar import Constraint

_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Ended:
    """One choice has ended."""

    index: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Full:
    """The context of one choice is full: it waits for room."""

    index: int


Sampled = tuple[int, int, TokenLogprob | None]
"""The index of a choice, and a token of it."""
Item = Event | Sampled | Ended | Full | EmberkeepError


@dataclass(slots=True)
class ScoredEcho:
    """A prompt that is told with the log probabilities of its tokens, when all of them are known."""

    text: str
    logprobs: list[TokenLogprob]
    """At first of the first token, which has none."""


class Choice:
    """The output of a sequence: tokens in, on the engine's thread; events out, on the reader's (`read` and
    `finish`)."""

    def __init__(
        self,
        index: int,
        stream: TextStream,
        channel: Channel[Item],
        permit: Permit,
        *,
        in_pieces: bool,
        grows_to: int | None = 0,
        echo: ScoredEcho | None = None,
    ) -> None:
        """`grows_to`: as long as its answer has fewer tokens, more room may be made for it. None: always.
        `echo`: what comes before its first token."""
        self._echo = echo
        self._in_pieces = in_pieces
        self._grows_to = grows_to
        self._tokens = 0
        self._index = index
        self._stream = stream
        self._channel = channel
        self._permit = permit
        self.is_over = False

    def progress(self, progress: Progress) -> None:
        if self._index == 0:
            self._channel.put(progress)

    def scored(self, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        assert self._echo is not None
        self._echo.logprobs[start:] = logprobs

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        if self._echo is not None:
            self._tell_echo(self._echo)
        self._tokens += 1
        is_first = self._tokens == 1
        if not self._stream.may_stop:
            self._channel.put((self._index, token, logprob), wake=self._in_pieces, can_wait=not is_first)
            return False
        events, stop = self._stream.push(token, logprob)
        for event in events:
            self._channel.put(event, wake=self._in_pieces, can_wait=not is_first)
        return stop

    def kept_tokens(self) -> int:
        return self._stream.text_kept_tokens

    def full(self) -> bool:
        """The context is full: ask for more room, if more can be made."""
        if self._grows_to is not None and self._tokens >= self._grows_to:
            return False
        self._channel.put(Full(self._index))
        return True

    def ended(self, ending: Ending) -> None:
        if self._echo is not None:
            self._tell_echo(self._echo)
        self._over()
        self._channel.put(Ended(self._index, ending))

    def read(self, tokens: Iterable[Sampled]) -> list[Event]:
        """The events of its next tokens, where nothing in its text may end it."""
        return self._stream.push_together([(token, logprob) for _, token, logprob in tokens])

    def finish(self, ending: Ending) -> list[Event]:
        """The last events: the engine's thread is done with it."""
        events = self._stream.finish(cut=ending.reason is EndReason.LENGTH)
        return [*events, Finished(self._index, self._finish_reason(ending), self._stream.stop)]

    @property
    def reasoning_tokens(self) -> int:
        return self._stream.reasoning_tokens

    def _tell_echo(self, echo: ScoredEcho) -> None:
        self._echo = None
        self._channel.put(TextDelta(self._index, echo.text, tuple(echo.logprobs)))

    def failed(self, error: EmberkeepError) -> None:
        self._over()
        self._channel.put(error)

    def _over(self) -> None:
        """Note the end. Twice is harmless: if `ended` fails, `failed` is called after it."""
        if not self.is_over:
            self.is_over = True
            self._permit.choice_over()

    def _finish_reason(self, ending: Ending) -> FinishReason:
        if self._stream.saw_tool_calls:
            return FinishReason.TOOL_CALLS
        is_cut = ending.reason is EndReason.LENGTH or (self._stream.is_cut and self._stream.stop is None)
        return FinishReason.LENGTH if is_cut else FinishReason.STOP


async def until_completed(channel: Channel[Item], choices: Sequence[Choice]) -> AsyncIterator[Event | Full]:
    """The events of all choices, with `Completed` at the end. Raises what a choice failed with."""
    endings: dict[int, Ending] = {}
    while len(endings) < len(choices):
        for item in _read(await channel.take(), choices):
            if isinstance(item, EmberkeepError):
                raise item
            if isinstance(item, Ended):
                endings[item.index] = item.ending
            else:
                yield item
    yield _completed([endings[index] for index in range(len(choices))], choices)


def _read(items: Iterable[Item], choices: Sequence[Choice]) -> list[Event | Ended | Full | EmberkeepError]:
    """What has come, with what each choice makes of it. Never raises."""
    try:
        return list(_together(items, choices))
    except Exception as error:
        return [explained(error)]


def _together(items: Iterable[Item], choices: Sequence[Choice]) -> Iterator[Event | Ended | Full | EmberkeepError]:
    tokens: list[list[Sampled]] = [[] for _ in choices]
    for item in (*items, None):
        if isinstance(item, tuple):
            tokens[item[0]].append(item)
            continue
        for choice, sampled in zip(choices, tokens, strict=True):
            if sampled:
                yield from choice.read(sampled)
                sampled.clear()
        if isinstance(item, Ended):
            yield from choices[item.index].finish(item.ending)
        if item is not None:
            yield item


def _completed(endings: Sequence[Ending], choices: Sequence[Choice]) -> Completed:
    first = endings[0]
    each = [ending.timings for ending in endings]
    timings = replace(
        first.timings,
        predicted_n=sum(one.predicted_n for one in each),
        predicted_ms=max(one.predicted_ms for one in each),
        draft_n=sum(one.draft_n for one in each),
        draft_n_accepted=sum(one.draft_n_accepted for one in each),
    )
    usage = Usage(
        prompt_tokens=first.lookup.prompt_tokens,
        completion_tokens=timings.predicted_n,
        cached_tokens=timings.cache_n,
        reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
        accepted_prediction_tokens=timings.draft_n_accepted,
        rejected_prediction_tokens=timings.draft_n - timings.draft_n_accepted,
    )
    return Completed(usage, timings, first.lookup, slot=first.slot)


# ── how tokens are drawn ──

MakeSampler = Callable[[int, Prompt], Sampler]
"""The sampler of a choice, by its index."""


class Samplers:
    """The samplers of one vocabulary's choices; remembers the latest that took long to make. Safe to use from
    several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._breakers = Latest[tuple[str, ...], Breakers](_REMEMBERED)

    def of_request(self, request: Request, constraint: Constraint | None) -> MakeSampler:
        """Blocks for tens of milliseconds where a request wants what no other wanted."""
        chosen = self.with_ids(request.sampling)
        breakers = self._find_breakers(chosen.dry_sequence_breakers) if chosen.uses_dry else {}

        def of_choice(index: int, prompt: Prompt) -> Sampler:
            settings = chosen
            if settings.seed is not None:
                settings = replace(settings, seed=settings.seed + index)  # choices of one request draw differently
            reasoning = open_reasoning(prompt.written.tail) if request.prompt is None else None
            matcher = constraint.matcher(reasoning) if constraint else None
            if not settings.needs_chain and not request.logprobs_as_drawn:
                return Sampler(settings, matcher, request.top_logprobs, request.forced)
            return ChainedSampler(
                Chain(settings, self._vocab, prompt.tokens, breakers),
                settings,
                matcher,
                request.top_logprobs,
                request.forced,
                as_drawn=request.logprobs_as_drawn,
            )

        return of_choice

    def with_ids(self, settings: Sampling) -> Sampling:
        """Replace texts that are biased by their tokens."""
        if not settings.text_bias and not settings.ignore_eos:
            return settings
        bias = dict(settings.logit_bias)
        for text, by in settings.text_bias:
            for token in self._vocab.tokenize(text, parse_special=False):
                bias[token] = bias.get(token, 0.0) + by
        bias |= dict.fromkeys(self._vocab.eog, float("-inf")) if settings.ignore_eos else {}
        return replace(settings, logit_bias=bias)

    def _find_breakers(self, texts: tuple[str, ...]) -> Breakers:
        found = self._breakers.get(texts)
        if found is None:
            found = self._breakers[texts] = find_breakers(texts, self._vocab)
        return found


T = TypeVar("T")


# ── from the engine's thread to the event loop ──


_PER_READER_S = 300e-6
"""Readers are woken one by one, not faster than this: each takes a part of it, and many at once would leave the
engine's thread no time."""


class Outbox:
    """The channels that have something new. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._fresh: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        """Those that have waited longest come first."""
        self._urgent: set[asyncio.Event] = set()
        self._woken_until = 0.0
        """On the monotonic clock: as many readers were woken as could be until then."""

    def add(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Event, *, can_wait: bool) -> None:
        self._fresh[ready] = loop
        if not can_wait:
            self._urgent.add(ready)

    def flush(self, hurry: bool) -> None:
        """Wake readers: one wake-up per event loop. Cheap when there is nothing new. Unless in a `hurry`, only as
        many as there is time for: tokens that go on with an answer may wait for those of the next step."""
        if not self._fresh:
            return
        now = monotonic()
        count = int((now - self._woken_until) / _PER_READER_S)
        if hurry or count >= len(self._fresh):
            chosen, self._woken_until = list(self._fresh), now
        else:
            chosen = [*dict.fromkeys([*self._urgent, *islice(self._fresh, count)])]
            self._woken_until += count * _PER_READER_S
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for ready in chosen:
            by_loop.setdefault(self._fresh[ready], []).append(ready)
        for loop, events in by_loop.items():
            with suppress(RuntimeError):  # the event loop is closed, and with it the reader
                loop.call_soon_threadsafe(_set_all, events)
            for ready in events:  # not before: should that fail, it is tried again
                del self._fresh[ready]
                self._urgent.discard(ready)


class Channel(Generic[T]):
    """Made by the task that reads it; written to by the engine's thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()

    def put(self, item: T, *, wake: bool = True, can_wait: bool = False) -> None:
        """Add an item. The reader gets it at the next flush, or with the next item that wakes it."""
        self._items.append(item)
        if wake:
            self._outbox.add(self._loop, self._ready, can_wait=can_wait)

    async def take(self) -> list[T]:
        """Everything that has come, in order; waits for something."""
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return [self._items.popleft() for _ in range(len(self._items))]


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
