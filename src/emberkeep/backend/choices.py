"""The choices of one request: tokens in on the engine's thread, events out for the one who asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from emberkeep.backend.channel import Channel
from emberkeep.backend.places import Place
from emberkeep.chat.output import TextStream
from emberkeep.errors import EmberkeepError
from emberkeep.sched.job import Ending, EndReason
from emberkeep.types import Completed, Event, Finished, FinishReason, Progress, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Ended:
    """One choice is over."""

    index: int
    ending: Ending
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Full:
    """The context of one choice is full: it waits for room."""

    index: int


Item = Event | Ended | Full | EmberkeepError


class Choice:
    """A job's consumer: tokens in, events out. Lives on the engine's thread."""

    def __init__(
        self,
        index: int,
        stream: TextStream,
        channel: Channel[Item],
        place: Place,
        *,
        in_pieces: bool,
        grows_to: int | None = 0,
    ) -> None:
        """`grows_to`: as long as its answer has fewer tokens, more room may be made for it. None: always."""
        self._in_pieces = in_pieces
        self._grows_to = grows_to
        self._tokens = 0
        self._index = index
        self._stream = stream
        self._channel = channel
        self._place = place
        self.is_over = False

    def progress(self, progress: Progress) -> None:
        if self._index == 0:
            self._channel.put(progress)

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        self._tokens += 1
        events, stop = self._stream.push(token, logprob)
        for event in events:
            self._channel.put(event, wake=self._in_pieces)
        return stop

    def kept_tokens(self) -> int:
        return self._stream.text_kept_tokens

    def full(self) -> bool:
        """A job's `on_full`."""
        if self._grows_to is not None and self._tokens >= self._grows_to:
            return False
        self._channel.put(Full(self._index))
        return True

    def ended(self, ending: Ending) -> None:
        events = self._stream.finish(cut=ending.reason is EndReason.LENGTH)
        self._over()
        for event in events:
            self._channel.put(event)
        self._channel.put(Finished(self._index, self._finish_reason(ending)))
        self._channel.put(Ended(self._index, ending, self._stream.reasoning_tokens))

    def failed(self, error: EmberkeepError) -> None:
        self._over()
        self._channel.put(error)

    def _over(self) -> None:
        """Once: what failed to be told is told again, as a failure."""
        if not self.is_over:
            self.is_over = True
            self._place.choice_over()

    def _finish_reason(self, ending: Ending) -> FinishReason:
        if self._stream.saw_tool_calls:
            return FinishReason.TOOL_CALLS
        return FinishReason.LENGTH if ending.reason is EndReason.LENGTH else FinishReason.STOP


async def until_completed(channel: Channel[Item], choices: int) -> AsyncIterator[Event | Full]:
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
    reused = first.lookup.cached_tokens
    return Completed(
        usage=Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sampled,
            cached_tokens=reused,
            reasoning_tokens=sum(ended.reasoning_tokens for ended in endings),
        ),
        timings=Timings(
            cache_n=reused,
            prompt_n=first.prompt_tokens - reused,
            prompt_ms=first.prompt_ms,
            predicted_n=sampled,
            predicted_ms=max(ended.ending.decode_ms for ended in endings),
            ttft_ms=first.ttft_ms,
            queue_ms=first.queue_ms,
        ),
        lookup=first.lookup,
    )
