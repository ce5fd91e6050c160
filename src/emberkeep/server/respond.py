"""From requests to an HTTP response: all at once, or as a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from fastapi import Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from emberkeep.api.answer import Answer, Frames
from emberkeep.api.errors import Failure, failure_of
from emberkeep.api.request import INT32_MAX
from emberkeep.backend.base import Backend
from emberkeep.errors import EmberkeepError
from emberkeep.server.account import account_of
from emberkeep.server.feed import ClientGone, Feed, ReadTooSlowly, closing
from emberkeep.types import Event, Finished, Json, ReasoningDelta, Request, TextDelta, ToolCallDelta

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 1000
"""Items that are listed at a time."""
Limit = Annotated[int, Query(ge=1, le=PAGE)]
Offset = Annotated[int, Query(ge=0, le=INT32_MAX)]


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")


def list_response(name: str, items: Iterable[Json], **more: Json) -> Response:
    """An object with a list under `name`, which may be long: each item is written by itself, so that other threads
    go on in between."""
    written = ", ".join(map(json.dumps, items))
    rest = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in more.items())
    return Response(f"{{{json.dumps(name)}: [{written}]{rest}}}", media_type="application/json")


def page_response(
    items: Sequence[T], to_json: Callable[[T], Json], limit: int, offset: int, **more: Json
) -> Response:
    shown = items[offset : offset + limit]
    has_more = offset + len(shown) < len(items)
    return list_response("data", map(to_json, shown), object="list", has_more=has_more, **more)


def failure_response(failure: Failure) -> Response:
    return _FailureResponse(failure)


class _FailureResponse(Response):
    """Enters itself into the request's account, wherever on the way to the backend it was made."""

    media_type = "application/json"

    def __init__(self, failure: Failure) -> None:
        super().__init__(json.dumps(failure.json()).encode(), failure.status, failure.headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account_of(scope).failure = self._failure
        await super().__call__(scope, receive, send)


async def gather(http: HttpRequest, backend: Backend, requests: Sequence[Request]) -> Answer:
    """Waits for the whole answer. Raises what the backend raises, and ClientGone."""
    answer = Answer(sum(request.n for request in requests))
    whole = [replace(request, in_pieces=False) for request in requests]
    async with _feed(http, backend, whole) as feed:
        while batch := await feed.take():
            answer.add(batch)
    return answer


async def stream(
    http: HttpRequest, backend: Backend, requests: Sequence[Request], new_frames: Callable[[], Frames]
) -> EventStream:
    """Waits for the first event, so that an error before it still gets its HTTP status.

    `new_frames` is called then: before it, nobody knows which of several backends answers.
    """
    feed = _feed(http, backend, requests)
    try:
        return EventStream(feed, await feed.take(), new_frames())
    except BaseException:
        await feed.close()
        raise


class EventStream(Response):
    """Server-sent events. Owns the feed."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, first: list[Event], frames: Frames) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with self._feed:
            try:
                await self._write(send)
            except ClientGone:
                pass
            except ReadTooSlowly as slow:
                await send(_part(slow.failure.frame(), last=True))
            except Exception as error:
                if not isinstance(error, EmberkeepError):
                    log.exception("A stream failed.")
                account_of(scope).broken_off = True
                await send(_part(failure_of(error).frame(), last=True))

    async def _write(self, send: Send) -> None:
        batch = self._first
        while True:
            parts = [self._frames.frame(event) for event in batch]
            if self._feed.ended:
                parts.append(self._frames.end())
                await send(_part(b"".join(parts), last=True))
                return
            await send(_part(b"".join(parts), last=False))
            batch = await self._feed.take()


def _part(body: bytes, *, last: bool) -> dict[str, Json]:
    return {"type": "http.response.body", "body": body, "more_body": not last}


def _feed(http: HttpRequest, backend: Backend, requests: Sequence[Request]) -> Feed:
    account = account_of(http.scope)
    account.prompts = len(requests)
    return Feed(_sources(backend, requests), http.receive, account.bills, http.app.state.limits)


def _sources(backend: Backend, requests: Sequence[Request]) -> list[AsyncIterator[Event]]:
    """One per prompt, with the choices numbered through."""
    first, *others = (backend.generate(request) for request in requests)
    return [first, *(_renumbered(other, (i + 1) * requests[0].n) for i, other in enumerate(others))]


async def _renumbered(source: AsyncIterator[Event], offset: int) -> AsyncIterator[Event]:
    async with closing(source):
        async for event in source:
            if isinstance(event, (TextDelta, ReasoningDelta, ToolCallDelta, Finished)):
                yield replace(event, index=event.index + offset)
            else:
                yield event
