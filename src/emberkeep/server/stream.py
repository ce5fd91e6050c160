"""One exchange with a client: the body that it sends, the events that it gets, and noticing that it leaves.

One task per source of events reads ahead, so that a slow client never slows an engine step down, and whatever has
piled up goes out in one write. It piles up only so far: a client that does not read on in time loses its answer,
and the engine's slot with it. One more task waits for the client to leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from emberkeep.api.answer import Answer, Frames
from emberkeep.api.body import B, parse_body, parse_object
from emberkeep.api.errors import Failure, Refused, failure_of
from emberkeep.errors import EmberkeepError
from emberkeep.server.middleware import Limits
from emberkeep.server.request_log import record_of
from emberkeep.types.events import Completed, Event, Events, Finished, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.request import Json, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_BYTES = 64 << 10
"""A body of this size takes about a millisecond to parse."""
_LIMITS = Limits()
_HEADERS_AFTER_S = 2.0
_SILENCE_S = 5.0
"""A stream says then that the answer is still to come. Some clients give up after half a minute."""
_EVENT_BYTES = 256
"""An event and its frame take this, besides the text."""
_LOGPROB_BYTES = 128


class ClientGone(Exception):
    """The client has left: there is no client to answer."""


class ReadTooSlowly(Refused):
    """The client did not read its events in time."""

    def __init__(self) -> None:
        message = "The answer was not read in time, and was given up: ask again, and read it as it comes."
        super().__init__(Failure(408, "invalid_request_error", message, "read_timeout"))


# ── the body ──


async def read_body(http: HttpRequest, model: type[B]) -> B:
    """Raises Refused, RequestError or InvalidField."""
    raw = await http.body()
    return await make_of_body(http, lambda: parse_body(model, raw))


async def read_object(http: HttpRequest) -> dict[str, Json]:
    """A body of which more than one kind is accepted. Raises Refused or RequestError."""
    raw = await http.body()
    return await make_of_body(http, lambda: parse_object(raw))


async def make_of_body(http: HttpRequest, make: Callable[[], T]) -> T:
    """The result of `make`, which parses the body; a large one in a thread, so that streams do not wait."""
    is_large = len(await http.body()) > _LARGE_BYTES
    return await asyncio.to_thread(make) if is_large else make()


# ── the answer ──


class Answers(Protocol):
    """A backend, or what is put in front of one."""

    def generate(self, request: Request) -> Events: ...


async def gather(http: HttpRequest, backend: Answers, requests: Sequence[Request]) -> Answer:
    """Waits for the whole answer. Raises what the backend raises, and ClientGone."""
    answer = Answer(sum(request.n for request in requests))
    whole = [request.decided(in_pieces=False) for request in requests]
    async with _feed(http, backend, whole) as feed:
        while batch := await feed.take():
            answer.add(batch)
    return answer


async def stream(
    http: HttpRequest, backend: Answers, requests: Sequence[Request], new_frames: Callable[[], Frames]
) -> EventStream:
    """Waits for the first event, so that an error before it still gets its HTTP status; but not for long, because
    some clients give up on a server that sends no headers.

    `new_frames` is called then: before it, it is not known which of several backends answers.
    """
    feed = _feed(http, backend, requests)
    try:
        return EventStream(feed, await feed.take_within(_HEADERS_AFTER_S), new_frames())
    except BaseException:
        await feed.close()
        raise


class EventStream(Response):
    """An answer as it comes, in the frames of its API. Owns the feed."""

    def __init__(self, feed: Feed, first: list[Event], frames: Frames) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=frames.media_type
        )
        del self.headers["content-length"]
        self._feed = feed
        self._first = first
        self._frames = frames
        self._is_silent = True
        """Nothing was written for a while."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with self._feed:
            idling = asyncio.create_task(self._fill_silence(send))
            try:
                last = await self._write(send)
            except ClientGone:
                last = None
            except Exception as error:
                last = self._failed(scope, error)
            finally:
                idling.cancel()
            if last is not None:
                await send(_part(last, last=True))

    async def _write(self, send: Send) -> bytes:
        """Returns the last bytes, which are not sent yet."""
        batch = self._first
        while True:
            shown = b"".join([self._frames.frame(event) for event in batch])
            if self._feed.ended:
                return shown + self._frames.end()
            if shown:
                self._is_silent = False
                await send(_part(shown, last=False))
            batch = await self._feed.take()

    async def _fill_silence(self, send: Send) -> None:
        while True:
            await asyncio.sleep(_SILENCE_S)
            if self._is_silent and (filler := self._frames.idle()):
                await send(_part(filler, last=False))
            self._is_silent = True

    def _failed(self, scope: Scope, error: Exception) -> bytes:
        record = record_of(scope)
        if not isinstance(error, EmberkeepError):
            log.exception("A stream failed.", exc_info=error)
        record.broken_off = record.broken_off or not isinstance(error, ReadTooSlowly)
        return self._frames.failure(failure_of(error), record.id)


def _part(body: bytes, *, last: bool) -> dict[str, Json]:
    return {"type": "http.response.body", "body": body, "more_body": not last}


def _feed(http: HttpRequest, backend: Answers, requests: Sequence[Request]) -> Feed:
    record = record_of(http.scope)
    record.prompts = len(requests)
    return Feed(_sources(backend, requests), http.receive, record.completed, http.app.state.limits)


def _sources(backend: Answers, requests: Sequence[Request]) -> list[Events]:
    """One stream of events per prompt; all choices are numbered in one sequence."""
    first, *others = (backend.generate(request) for request in requests)
    return [first, *(_renumber(other, (i + 1) * requests[0].n) for i, other in enumerate(others))]


async def _renumber(source: Events, offset: int) -> Events:
    async with aclosing(source):
        async for event in source:
            if isinstance(event, (TextDelta, ReasoningDelta, ToolCallDelta, Finished)):
                yield replace(event, index=event.index + offset)
            else:
                yield event


class Feed:
    """The events of one HTTP request, read as they come and taken in batches.

    Starts reading at once; needs a running loop. Close it, also after an error.
    """

    def __init__(
        self,
        sources: Sequence[Events],
        receive: Receive,
        completed: list[Completed] | None = None,
        limits: Limits = _LIMITS,
    ) -> None:
        """`completed` gets the Completed of every source."""
        self._limits = limits
        self._unsent = 0
        self._taken = asyncio.Event()
        self._completed = [] if completed is None else completed
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._reading = len(sources)
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(source)) for source in sources]
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    @property
    def ended(self) -> bool:
        """Every event was taken, and no error is waiting."""
        return not self._reading and not self._events and self._error is None

    async def take(self) -> list[Event]:
        """Everything that came since the last call; waits for something; empty at the end.

        Raises, after the events that came before, what a source raised, or ClientGone.
        """
        await self._changed.wait()
        batch, self._events = self._events, []
        self._unsent = 0
        self._taken.set()
        if self._error is not None and not batch:
            raise self._error
        if self._reading and self._error is None:
            self._changed.clear()
        return batch

    async def take_within(self, seconds: float) -> list[Event]:
        """As `take`, but empty when nothing has come so soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.take()
        return []

    async def close(self) -> None:
        """Stops all work for this request and waits until it has stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self, source: Events) -> None:
        async with aclosing(source):
            try:
                await self._read_to_completed(source)
            except Exception as error:
                self._error = self._error or error
            finally:
                self._reading -= 1
                self._changed.set()

    async def _read_to_completed(self, source: Events) -> None:
        async for event in source:
            self._events.append(event)
            self._changed.set()
            self._unsent += _size(event)
            if self._unsent > self._limits.unsent_bytes:
                await self._wait_until_taken()
            if type(event) is Completed:
                self._completed.append(event)
                return
        raise RuntimeError("the backend's events ended without Completed")

    async def _wait_until_taken(self) -> None:
        """Raises ReadTooSlowly."""
        self._taken.clear()
        try:
            async with asyncio.timeout(self._limits.stalled_s):
                await self._taken.wait()
        except TimeoutError:
            raise ReadTooSlowly from None

    async def _watch(self, receive: Receive) -> None:
        await _disconnect(receive)
        self._error = ClientGone()
        self._changed.set()


def _size(event: Event) -> int:
    """About as much as it takes here and on the wire."""
    match event:
        case TextDelta():
            shown = sum(1 + len(token.top) for token in event.logprobs)
            return _EVENT_BYTES + len(event.text) + _LOGPROB_BYTES * shown
        case ReasoningDelta():
            return _EVENT_BYTES + len(event.text)
        case ToolCallDelta():
            return _EVENT_BYTES + len(event.arguments)
    return _EVENT_BYTES


# ── the client leaves ──


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Read the body before.

    Raises what `work` raises, and ClientGone.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(http.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has left; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
