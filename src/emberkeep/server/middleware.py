"""What every request passes on its way to the routes, the outermost first, and the record that it leaves behind.

A local server is reachable from every web page the user visits. A page cannot forge `Host` (which defeats DNS
rebinding) or `Origin` (which defeats cross-site requests), so both must be known.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from enum import StrEnum
from time import monotonic
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import Failure, Refused, error_shape, failure_of
from emberkeep.config.settings import Config
from emberkeep.errors import Overloaded
from emberkeep.logs import request_id
from emberkeep.server.limits import Limits
from emberkeep.types.events import Completed, merge_usage
from emberkeep.values import dataclass

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/v1/health"})
LOOPBACK = ("localhost", "127.0.0.1", "::1")
RETRY_AFTER_S = 5.0


# ── the record ──

_RECORD = "emberkeep.record"
_TAKEN_ON = frozenset({"server_error", "upstream_error", "deadline"})
"""Types of failures that do not count as refusals."""


class RequestOutcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"  # an error of ours, or of a service that was asked, or time ran out
    CANCELLED = "cancelled"  # the client left before the end
    REFUSED = "refused"  # by what was asked, by who asked, or for want of room


@dataclass(slots=True)
class RequestRecord:
    """What one HTTP request asked for, what came of it, and what it cost: kept with its scope, filled in along its
    way."""

    id: str = field(default_factory=lambda: f"req_{os.urandom(12).hex()}")
    """What the client called it, or a name of ours."""
    prompts: int = 0
    completed: list[Completed] = field(default_factory=list)
    """One for every prompt that was answered."""
    failure: Failure | None = None
    """What the client got in place of an answer."""
    broken_off: bool = False
    """An answer that had begun ended with an error."""

    @property
    def outcome(self) -> RequestOutcome | None:
        """Asked when the request has ended; None when it wanted no answer of the model and went well."""
        if self.broken_off or (self.failure and self.failure.type in _TAKEN_ON):
            return RequestOutcome.FAILED
        if self.failure:
            return RequestOutcome.REFUSED
        if len(self.completed) < self.prompts:
            return RequestOutcome.CANCELLED
        return RequestOutcome.FINISHED if self.prompts else None


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope.setdefault(_RECORD, RequestRecord())
    return record


def failure_response(failure: Failure) -> Response:
    return _FailureResponse(failure)


class _FailureResponse(Response):
    """Enters itself into the request's record, wherever on the way to the backend it was made."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(status_code=failure.status)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In the shape that the clients of this path expect."""
        record = record_of(scope)
        record.failure = self._failure
        told = error_shape(scope["path"]).body(self._failure, record.id)
        answer = Response(json.dumps(told).encode(), self.status_code, self._failure.headers, "application/json")
        await answer(scope, receive, send)


# ── a line in the log, and the metrics ──

_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Asked by machines every few seconds: told at the level debug."""
_BEFORE_NAMES = ("/v1/memory/facts/", "/v1/memory/conversations/")
"""Paths after which a user's text follows, which is not logged."""


class AccessLog:
    """ASGI. One line per request, written when it has ended; nothing is added to one whose line is not logged.

    `observe` gets the record of every request, and how long it took.
    """

    def __init__(
        self, app: ASGIApp, observe: Callable[[RequestRecord, float], None] = lambda record, seconds: None
    ) -> None:
        self.app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, begin = record_of(scope), monotonic()
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        exchange = _Exchange(receive, send) if log.isEnabledFor(level) else None
        try:
            if exchange is None:
                await self.app(scope, receive, send)
            else:
                await self.app(scope, exchange.receive, exchange.send)
        finally:
            self._observe(record, monotonic() - begin)
            if exchange is not None:
                log.log(level, "%s", _line(scope, exchange, record))


class _Exchange:
    """Notes the status that is sent, and whether the client leaves."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.status: int | None = None
        self.client_left = False
        self._is_sent = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = not self._is_sent  # after the last byte every client leaves
        return message

    async def send(self, message: Message) -> None:
        if self.status is None:
            self.status = message["status"]
        self._is_sent = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)


def _line(scope: Scope, exchange: _Exchange, record: RequestRecord) -> str:
    # Quoted again, so that no path can look like a line of its own; without the query, which may hold secrets.
    line = f"{scope['method']} {quote(_without_name(scope['path']))[:200]} {exchange.status}"
    if record.completed and len(record.completed) == record.prompts:
        return f"{line}: {_figures(merge_usage(record.completed))}"
    if exchange.client_left:
        return f"{line}: the client left"
    return f"{line}: broken off" if record.prompts and exchange.status == 200 else line


def _without_name(path: str) -> str:
    return next((f"{before}..." for before in _BEFORE_NAMES if path.startswith(before)), path)


def _figures(completed: Completed) -> str:
    usage, timings = completed.usage, completed.timings
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused, "
        f"first token after {timings.ttft_ms:.0f} ms, "
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s"
    )


# ── who may talk to the server ──

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NO_KEY = Failure(
    401,
    "authentication_error",
    "The API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY.",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


class RequestId:
    """ASGI. Every answer names its request, as the client called it or as we do: for logs on both sides."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, given = record_of(scope), Headers(scope=scope).get("x-request-id", "")
        if _REQUEST_ID.fullmatch(given):
            record.id = given
        request_id.set(record.id)
        name = record.id.encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                # `request-id`: Anthropic's clients look there.
                message["headers"] = [*message["headers"], (b"x-request-id", name), (b"request-id", name)]
            await send(message)

        await self.app(scope, receive, named)


class SecurityMiddleware:
    """ASGI. Host, Origin and API key are checked before anything else happens.

    Refuses in OpenAI's error shape; answers preflights of allowed origins itself.
    """

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self.app = app
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK, config.host, *config.allowed_hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._key = config.api_key.encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers, scope)
            origin = self._check_origin(headers)
        except Refused as refused:
            await failure_response(refused.failure)(scope, receive, send)
            return
        await self._pass_on(scope, receive, _with_cors(send, origin) if origin else send, headers)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send)
        elif _is_open(scope["path"], headers) or self._has_key(headers):
            await self.app(scope, receive, send)
        else:
            await failure_response(_NO_KEY)(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        name = _host_name(headers.getlist("host"))
        # The address that was dialled is no name, so it cannot have been rebound.
        dialled = (scope.get("server") or ("",))[0]
        if name not in self._hosts and name != dialled:
            raise _forbidden(
                f"The Host {(name or '')[:100]!r} is not served here: use the server's own address, or name it in "
                "allowed_hosts (needed where a container reaches the server as host.docker.internal)."
            )

    def _check_origin(self, headers: Headers) -> str | None:
        """The origin, if it is a foreign one that is allowed; None if no CORS headers are needed."""
        origins = headers.getlist("origin")
        if not origins:
            return None
        origin = origins[0].lower()
        if len(origins) == 1 and origin in self._origins:
            return origins[0]
        if len(origins) == 1 and origin in _own_origins(headers["host"].lower()):
            return None
        raise _forbidden("This web page may not use the server: add its origin to allowed_origins.")

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Header bytes are read as Latin-1; this gives them back as they were sent.
        return hmac.compare_digest(given.strip().encode("latin-1"), self._key)


def _is_open(path: str, headers: Headers) -> bool:
    """For everyone: whether the server is well, and the page, which asks for the key by itself."""
    is_page = path.startswith("/page/") or (path == "/" and "text/html" in headers.get("accept", ""))
    return path in OPEN_PATHS or is_page


def _forbidden(message: str) -> Refused:
    return Refused(Failure(403, "permission_error", message, "forbidden"))


def _host_name(values: list[str]) -> str | None:
    """The name without its port; None unless there is exactly one well-formed Host."""
    match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    return match and (match[1] or match[2])


def _own_origins(host: str) -> tuple[str, str]:
    return f"http://{host}", f"https://{host}"


def _preflight(headers: Headers) -> Response:
    asked: Iterable[tuple[str, str | None]] = (
        ("Access-Control-Allow-Methods", "GET, POST, PUT, DELETE"),
        ("Access-Control-Allow-Headers", headers.get("access-control-request-headers")),
        ("Access-Control-Max-Age", "600"),
    )
    return Response(status_code=204, headers={name: value for name, value in asked if value})


def _with_cors(send: Send, origin: str) -> Send:
    async def with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return with_cors


# ── stopping in good order ──


class Drain:
    """New work is refused while running requests may finish. Shared by the server, which begins it, and the
    middleware, which keeps count."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._uploads: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """A request that has not wholly arrived yet is new work too: it is not waited for."""
        self.draining = True
        for upload in self._uploads:
            upload.reschedule(0)

    @contextmanager
    def waiting(self, upload: asyncio.Timeout) -> Iterator[None]:
        """For a block that waits for more of a request: the drain ends the wait."""
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
            await failure_response(failure_of(_shutting_down()))(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noticing(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._drain.running += 1
        try:
            await self.app(scope, receive, noticing)
        except asyncio.CancelledError:
            # Only the end of the drain cancels a request: the client is owed a reason.
            await _break_off(scope, receive, send, has_begun=has_begun)
        finally:
            self._drain.running -= 1


async def _break_off(scope: Scope, receive: Receive, send: Send, *, has_begun: bool) -> None:
    error = Overloaded("The server stopped before this answer was complete: ask again.", RETRY_AFTER_S)
    failure = failure_of(error)
    record_of(scope).broken_off = True
    if has_begun:
        frame = error_shape(scope["path"]).frame(failure, record_of(scope).id)
        await send({"type": "http.response.body", "body": frame, "more_body": False})
    else:
        await failure_response(failure)(scope, receive, send)


def _shutting_down() -> Overloaded:
    return Overloaded("The server is shutting down: try again in a moment.", RETRY_AFTER_S)


# ── two courtesies, and the last resort ──


class PathMiddleware:
    """ASGI. HEAD works wherever GET does, and a slash at the end makes no difference.

    The web server itself leaves out the body of an answer to HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            # A changed copy: a redirect would cost clients that do not follow it their answer.
            scope = {**scope, "method": method, "path": _without_slashes(scope)}
        await self.app(scope, receive, send)


def _without_slashes(scope: Scope) -> str:
    """An encoded slash (%2F) at the end belongs to the name that is asked for."""
    path: str = scope["path"]
    sent: bytes = scope.get("raw_path") or path.encode()
    return path[: len(path) - (len(sent) - len(sent.rstrip(b"/")))] or "/"


class LastResort:
    """ASGI. Logs unexpected errors; left to the framework, one would also cost the client its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            log.exception("A request failed.")
            await failure_response(failure_of(error))(scope, receive, send)


# ── bodies: how large, how slow, and how many at a time ──

_ERROR = "invalid_request_error"
_TOO_SLOW = Failure(408, _ERROR, "The body did not arrive in time: send it again, faster.", "body_timeout")
_NO_ROOM = Failure(
    503,
    "overloaded",
    "Too many large requests are here at once: try again in a moment.",
    "overloaded",
    headers={"Retry-After": "1"},
)


def _packed(encoding: bytes) -> Failure:
    named = encoding.decode("latin-1").strip()[:32]
    said = f"The body is compressed ({named}): send it without Content-Encoding."
    return Failure(415, _ERROR, said, "compressed_body")


class BodyBounds:
    """ASGI. `receive` raises Refused where a body is too much, and gives no more of it."""

    def __init__(self, app: ASGIApp, drain: Drain, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.drain = drain
        self.held = 0
        """Bytes of bodies whose requests have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(self, scope["headers"], receive)
        try:
            await self.app(scope, body.receive, send)
        except Refused as refused:  # by an application that knows no Refused
            await failure_response(refused.failure)(scope, receive, send)
        finally:
            self.held -= body.size


class _Body:
    """Of one request, as far as it has come."""

    def __init__(self, bounds: BodyBounds, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> None:
        self.size = 0
        self._bounds = bounds
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
            if name == b"content-length" and value.isdigit() and int(value) > self._bounds.limits.body_bytes:
                raise self._too_large()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Refused(_packed(value))

    async def _in_time(self, begin: float) -> Message:
        limits, drain = self._bounds.limits, self._bounds.drain
        try:
            async with asyncio.timeout_at(begin + limits.body_s + self.size / limits.body_bytes_per_s) as limit:
                with drain.waiting(limit):
                    return await self._receive()
        except TimeoutError:
            raise _shutting_down() if drain.draining else Refused(_TOO_SLOW) from None

    def _add(self, size: int) -> None:
        self.size += size
        self._bounds.held += size
        if self.size > self._bounds.limits.body_bytes:
            raise self._too_large()
        if self._bounds.held > self._bounds.limits.bodies_bytes:
            raise Refused(_NO_ROOM)

    def _too_large(self) -> Refused:
        message = f"The body is larger than {self._bounds.limits.body_bytes >> 20} MiB: send less."
        return Refused(Failure(413, _ERROR, message, "body_too_large"))
