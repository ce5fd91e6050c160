"""The choices of one request: tokens in on the engine's thread, events out for the task that reads them; and the
permits that say how many requests there may be.

Events are handed over once per step, all together, just before the engine computes and lets go of the interpreter:
the readers then work while it computes, and neither waits for the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from emberkeep.chat.output import TextStream
from emberkeep.errors import EmberkeepError, Overloaded, RateLimited
from emberkeep.sched.sequence_state import Ending, EndReason
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Progress,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from emberkeep.values import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """One choice has ended."""

    index: int
    ending: Ending
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Full:
    """The context of one choice is full: it waits for room."""

    index: int


Item = Event | Ended | Full | EmberkeepError


@dataclass(slots=True)
class ScoredEcho:
    """A prompt that is told with the log probabilities of its tokens, when all of them are known."""

    text: str
    logprobs: list[TokenLogprob]
    """At first of the first token, which has none."""


class Choice:
    """The output of a sequence: tokens in, events out. Lives on the engine's thread."""

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
        events, stop = self._stream.push(token, logprob)
        for event in events:
            self._channel.put(event, wake=self._in_pieces)
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
        events = self._stream.finish(cut=ending.reason is EndReason.LENGTH)
        self._over()
        for event in events:
            self._channel.put(event)
        self._channel.put(Finished(self._index, self._finish_reason(ending), self._stream.stop))
        self._channel.put(Ended(self._index, ending, self._stream.reasoning_tokens))

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


async def until_completed(channel: Channel[Item], choices: int) -> AsyncIterator[Event | Full]:
    """The events of all choices, with `Completed` at the end. Raises what a choice failed with."""
    endings: list[Ended] = []
    while len(endings) < choices:
        item = await channel.take()
        if isinstance(item, EmberkeepError):
            raise item
        if isinstance(item, Ended):
            endings.append(item)
        else:
            yield item
    yield _completed(sorted(endings, key=lambda ended: ended.index))


def _completed(endings: list[Ended]) -> Completed:
    first = endings[0].ending
    sampled = sum(ended.ending.sampled_tokens for ended in endings)
    drafted = sum(ended.ending.drafted_tokens for ended in endings)
    accepted = sum(ended.ending.accepted_tokens for ended in endings)
    reused = first.lookup.cached_tokens
    return Completed(
        usage=Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sampled,
            cached_tokens=reused,
            reasoning_tokens=sum(ended.reasoning_tokens for ended in endings),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=drafted - accepted,
        ),
        timings=Timings(
            cache_n=reused,
            prompt_n=first.prompt_tokens - reused,
            prompt_ms=first.prompt_ms,
            predicted_n=sampled,
            predicted_ms=max(ended.ending.decode_ms for ended in endings),
            ttft_ms=first.ttft_ms,
            queue_ms=first.queue_ms,
            draft_n=drafted,
            draft_n_accepted=accepted,
            saved_ms=first.saved_ms,
        ),
        lookup=first.lookup,
        slot=first.slot,
    )


# ── from the engine's thread to the event loop ──


class Outbox:
    """The channels that have something new. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._fresh: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
        self._fresh.setdefault(loop, []).append(ready)

    def flush(self) -> None:
        """Wake every reader: one wake-up per event loop. Cheap when there is nothing new."""
        while self._fresh:
            loop, events = next(iter(self._fresh.items()))
            with suppress(RuntimeError):  # the event loop is closed, and with it the reader
                loop.call_soon_threadsafe(_set_all, events)
            del self._fresh[loop]  # not before: should that fail, it is tried again


class Channel(Generic[T]):
    """Made by the task that reads it; written to by the engine's thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()

    def put(self, item: T, *, wake: bool = True) -> None:
        """Add an item. The reader gets it at the next flush, or with the next item that wakes it."""
        self._items.append(item)
        if wake:
            self._outbox.add(self._loop, self._ready)

    async def take(self) -> T:
        """The next item, in order."""
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


_RETRY_AFTER_S = 2


class Permits:
    """Safe to use from any thread. Requests that name no user are those of one user."""

    def __init__(self, limit: int, per_user: int | None = None) -> None:
        self._limit = limit
        self._per_user = per_user
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._lock = threading.Lock()

    def acquire(self, user: str, choices: int | None = None) -> Permit:
        """For a request of `user` with that many choices; None: until it is released.

        Raises RateLimited, Overloaded.
        """
        with self._lock:
            self._check(user)
            self._held += 1
            self._held_by[user] += 1
        return Permit(self, user, choices)

    def give_back(self, permit: Permit) -> None:
        """Twice is harmless: a request may end while its last choice ends on the engine's thread."""
        with self._lock:
            if not permit.is_held:
                return
            permit.is_held = False
            self._held -= 1
            self._held_by[permit.user] -= 1
            if not self._held_by[permit.user]:
                del self._held_by[permit.user]

    def _check(self, user: str) -> None:
        if self._per_user is not None and self._held_by[user] >= self._per_user:
            raise RateLimited(
                f"Requests of one user are limited to {self._per_user} at a time: "
                "try again when one of them is done.",
                retry_after=_RETRY_AFTER_S,
            )
        if self._held >= self._limit:
            raise Overloaded(
                f"{self._held} requests are being served or waiting already: try again in a moment.",
                retry_after=_RETRY_AFTER_S,
            )


class Permit:
    """Released when every choice is over, however slowly its client reads, or when the request ends."""

    def __init__(self, permits: Permits, user: str, choices: int | None) -> None:
        self.user = user
        self.is_held = True
        self._permits = permits
        self._choices = choices

    def choice_over(self) -> None:
        """Called by one thread at a time."""
        if self._choices is None:
            return
        self._choices -= 1
        if self._choices == 0:
            self.release()

    def release(self) -> None:
        self._permits.give_back(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
