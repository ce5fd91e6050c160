"""Stopping in good order: new work is refused while what runs may finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import failure_of
from emberkeep.errors import Overloaded
from emberkeep.server.account import account_of
from emberkeep.server.respond import failure_response

RETRY_AFTER_S = 5.0


def stopping() -> Overloaded:
    return Overloaded("The server is shutting down: try again in a moment.", RETRY_AFTER_S)


class Drain:
    """Shared by the server, which begins it, and the middleware, which keeps count."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._uploads: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """What has not been asked to its end yet is new work too: it is not waited for."""
        self.draining = True
        for upload in self._uploads:
            upload.reschedule(0)

    @contextmanager
    def waiting(self, upload: asyncio.Timeout) -> Iterator[None]:
        """For a client to send more of its request; the drain ends that."""
        if self.draining:
            upload.reschedule(0)
        self._uploads.add(upload)
        try:
            yield
        finally:
            self._uploads.discard(upload)


class DrainMiddleware:
    """ASGI. Once draining, answers 503 to everything but reading (health, stats)."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._drain.draining and scope["method"] in ("POST", "PUT", "DELETE"):
            await failure_response(failure_of(stopping()))(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = _Begun(send)
        self._drain.running += 1
        try:
            await self.app(scope, receive, begun)
        except asyncio.CancelledError:
            # Only the end of the drain cancels a request: the client is owed a reason.
            await begun.give_up(scope, receive)
        finally:
            self._drain.running -= 1


class _Begun:
    """A `send` that knows how far the response got."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if self._start is None:
            self._start = message
        await self._send(message)

    async def give_up(self, scope: Scope, receive: Receive) -> None:
        error = Overloaded("The server stopped before this answer was complete: ask again.", RETRY_AFTER_S)
        failure = failure_of(error)
        account_of(scope).broken_off = True
        if self._start is None:
            await failure_response(failure)(scope, receive, self._send)
        else:
            await self._send({"type": "http.response.body", "body": failure.frame(), "more_body": False})
