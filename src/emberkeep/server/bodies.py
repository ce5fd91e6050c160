"""Bodies: how large, how slow, and how many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import Failure, Refused
from emberkeep.server.drain import Drain, stopping
from emberkeep.server.limits import Limits
from emberkeep.server.respond import failure_response

_ERROR = "invalid_request_error"
_TOO_SLOW = Failure(408, _ERROR, "The body did not arrive in time: send it again, faster.", "body_timeout")
_PACKED = Failure(415, _ERROR, "The body is compressed: send it without Content-Encoding.", "compressed_body")
_NO_ROOM = Failure(
    503,
    "overloaded",
    "Too many large requests are here at once: try again in a moment.",
    "overloaded",
    headers={"Retry-After": "1"},
)


class BodyBounds:
    """ASGI. `receive` raises Refused where a body is too much, and gives no more of it."""

    def __init__(self, app: ASGIApp, drain: Drain, limits: Limits) -> None:
        self.app = app
        self._room = _Room(limits, drain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(self._room, scope["headers"], receive)
        try:
            await self.app(scope, body.receive, send)
        except Refused as refused:  # by an application that knows no Refused
            await failure_response(refused.failure)(scope, receive, send)
        finally:
            self._room.held -= body.size


class _Room:
    """What all bodies share."""

    def __init__(self, limits: Limits, drain: Drain) -> None:
        self.limits = limits
        self.drain = drain
        self.held = 0
        """Bytes of bodies whose requests have not ended."""


class _Body:
    """Of one request, as far as it has come."""

    def __init__(self, room: _Room, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> None:
        self.size = 0
        self._room = room
        self._headers = headers
        self._receive = receive
        self._begin: float | None = None
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises Refused."""
        if self._is_whole:
            return await self._receive()
        if self._begin is None:
            self._begin = asyncio.get_running_loop().time()
            self._check_headers()
        message = await self._in_time(self._begin)
        self._add(len(message.get("body", b"")))
        self._is_whole = not message.get("more_body")
        return message

    def _check_headers(self) -> None:
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._room.limits.body_bytes:
                raise self._too_large()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Refused(_PACKED)

    async def _in_time(self, begin: float) -> Message:
        limits, drain = self._room.limits, self._room.drain
        try:
            async with asyncio.timeout_at(begin + limits.body_s + self.size / limits.body_bytes_per_s) as limit:
                with drain.waiting(limit):
                    return await self._receive()
        except TimeoutError:
            raise stopping() if drain.draining else Refused(_TOO_SLOW) from None

    def _add(self, size: int) -> None:
        self.size += size
        self._room.held += size
        if self.size > self._room.limits.body_bytes:
            raise self._too_large()
        if self._room.held > self._room.limits.bodies_bytes:
            raise Refused(_NO_ROOM)

    def _too_large(self) -> Refused:
        message = f"The body is larger than {self._room.limits.body_bytes >> 20} MiB: send less."
        return Refused(Failure(413, _ERROR, message, "body_too_large"))
