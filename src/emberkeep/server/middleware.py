"""What every request passes on its way to the routes, and its limits.

A local server is reachable from every web page the user visits. A page cannot forge `Host` (which defeats DNS
rebinding) or `Origin` (which defeats cross-site requests), so both must be known.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import Failure, Refused, error_shape, failure_of
from emberkeep.config.settings import DRAIN_S, Config
from emberkeep.errors import Overloaded
from emberkeep.server.request_log import OPEN_PATHS, FailureResponse, record_of
from emberkeep.values import dataclass

log = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
RETRY_AFTER_S = 5.0


# ── who may talk to the server ──

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_NO_KEY = Failure(
    401,
    "authentication_error",
    "The API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY.",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


class SecurityMiddleware:
    """ASGI. Host, Origin and API key are checked before anything else happens.

    Refuses in OpenAI's error shape; answers preflights of allowed origins itself.
    """

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK, config.host, *config.allow))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allow if "://" in origin)
        self._key = config.api_key.encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, answer = Headers(scope=scope), self._app
        try:
            self._check_host(headers, scope)
            if origin := self._check_origin(headers):
                send = _with_cors(send, origin)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                answer = _preflight(headers)
            elif not _is_open(scope["path"], headers) and not self._has_key(headers):
                answer = FailureResponse(_NO_KEY)
        except Refused as refused:
            answer = FailureResponse(refused.failure)
        await answer(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        name = _host_name(headers.getlist("host"))
        # The address that was dialled is no name, so it cannot have been rebound.
        dialled = (scope.get("server") or ("",))[0]
        if name not in self._hosts and name != dialled:
            raise _forbidden(
                f"The Host {(name or '')[:100]!r} is not served here: use the server's own address, or name it in "
                "allow (needed where a container reaches the server as host.docker.internal)."
            )

    def _check_origin(self, headers: Headers) -> str | None:
        """The origin, if it is a foreign one that is allowed; None if no CORS headers are needed."""
        origins = headers.getlist("origin")
        if not origins:
            return None
        origin = origins[0].lower()
        if len(origins) == 1 and origin in self._origins:
            return origins[0]
        if len(origins) == 1 and origin in [
            f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")
        ]:
            return None
        raise _forbidden("This web page may not use the server: add its origin to allow.")

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


def _preflight(headers: Headers) -> Response:
    allowed = {"Access-Control-Allow-Methods": "GET, POST, PUT, DELETE", "Access-Control-Max-Age": "600"}
    if names := headers.get("access-control-request-headers"):
        allowed["Access-Control-Allow-Headers"] = names
    return Response(status_code=204, headers=allowed)


def _with_cors(send: Send, origin: str) -> Send:
    async def with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return with_cors


# ── a courtesy ──


class PathMiddleware:
    """ASGI. HEAD works wherever GET does, and a slash at the end makes no difference.

    The web server itself leaves out the body of an answer to HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            # A changed copy: a redirect would cost clients that do not follow it their answer.
            scope = {**scope, "method": method, "path": _without_slashes(scope)}
        await self._app(scope, receive, send)


def _without_slashes(scope: Scope) -> str:
    """An encoded slash (%2F) at the end belongs to the name that is asked for."""
    path: str = scope["path"]
    sent: bytes = scope.get("raw_path") or path.encode()
    return path[: len(path) - (len(sent) - len(sent.rstrip(b"/")))] or "/"


# ── how many requests, how much of each, and for how long ──

_ERROR = "invalid_request_error"
_TOO_SLOW = Failure(408, _ERROR, "The body did not arrive in time: send it again, faster.", "body_timeout")
_CHANGING = ("POST", "PUT", "DELETE")


def _overload(message: str, **headers: str) -> Failure:
    return Failure(503, "overloaded", message, "overloaded", headers={"Retry-After": "1", **headers})


_NO_ROOM = _overload("Too many large requests are here at once: try again in a moment.")
CROWDED = _overload("Too many connections are open: try again in a moment.", Connection="close")


class Drain:
    """New work is refused while running requests may finish. Shared by the server, which begins it, and the gate,
    which keeps count."""

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


class RequestGate:
    """ASGI. Counts the requests that run, and refuses what is too many, too much, or too late: then `receive`
    raises Refused, and gives no more of the body. Whatever the application raises becomes an answer."""

    def __init__(self, app: ASGIApp, drain: Drain, limits: Limits) -> None:
        self._app = app
        self.limits = limits
        self.drain = drain
        self.held_bytes = 0
        """What bodies take whose requests have not ended."""
        self._door = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self.drain.draining and scope["method"] in _CHANGING:
            await FailureResponse(failure_of(_shutting_down()))(scope, receive, send)
        elif self.drain.running >= self.limits.connections and scope["path"] not in OPEN_PATHS:
            await FailureResponse(CROWDED)(scope, receive, send)
        else:
            await self._run(scope, _Body(self, scope["headers"], receive), send)

    async def _run(self, scope: Scope, body: _Body, send: Send) -> None:
        self.drain.running += 1
        try:
            async with self._door:  # of many that come at once one begins at a time, and streams go on in between
                await asyncio.sleep(0)
            await self._app(scope, body.receive, send)
        except asyncio.CancelledError:
            # Only the end of the drain cancels a request: the client is owed a reason.
            await _break_off(scope, body.receive, send)
        except Exception as error:  # left to the framework, it would also cost the client its connection
            if not isinstance(error, Refused):
                log.exception("A request failed.")
            await FailureResponse(failure_of(error))(scope, body.receive, send)
        finally:
            self.drain.running -= 1
            self.held_bytes -= body.size


def _shutting_down() -> Overloaded:
    return Overloaded("The server is shutting down: try again in a moment.", RETRY_AFTER_S)


async def _break_off(scope: Scope, receive: Receive, send: Send) -> None:
    record = record_of(scope)
    record.broken_off = True
    failure = failure_of(
        Overloaded("The server stopped before this answer was complete: ask again.", RETRY_AFTER_S)
    )
    if record.status is None:
        await FailureResponse(failure)(scope, receive, send)
    else:
        frame = error_shape(scope["path"]).frame(failure, record.id)
        await send({"type": "http.response.body", "body": frame, "more_body": False})


class _Body:
    """The body of one request, as far as it has come."""

    def __init__(self, gate: RequestGate, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> None:
        self.size = 0
        self._gate = gate
        self._headers = headers
        self._receive = receive
        self._begin: float | None = None
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises Refused, and Overloaded once the server stops."""
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
            if name == b"content-length" and value.isdigit() and int(value) > self._gate.limits.body_bytes:
                raise self._too_large()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                encoding = value.decode("latin-1").strip()[:32]
                message = f"The body is compressed ({encoding}): send it without Content-Encoding."
                raise Refused(Failure(415, _ERROR, message, "compressed_body"))

    async def _in_time(self, begin: float) -> Message:
        limits, drain = self._gate.limits, self._gate.drain
        try:
            async with asyncio.timeout_at(begin + limits.body_s + self.size / limits.bytes_per_s) as limit:
                with drain.waiting(limit):
                    return await self._receive()
        except TimeoutError:
            raise _shutting_down() if drain.draining else Refused(_TOO_SLOW) from None

    def _add(self, size: int) -> None:
        self.size += size
        self._gate.held_bytes += size
        if self.size > self._gate.limits.body_bytes:
            raise self._too_large()
        if self._gate.held_bytes > self._gate.limits.bodies_bytes:
            raise Refused(_NO_ROOM)

    def _too_large(self) -> Refused:
        message = f"The body is larger than {self._gate.limits.body_bytes >> 20} MiB: send less."
        return Refused(Failure(413, _ERROR, message, "body_too_large"))


# ── limits for clients: sizes, counts and times of HTTP itself ──

MOST_CONNECTIONS = 1000
_FILES_PER_CONNECTION = 2
"""Open files that the process may have for each connection: the store, memory and tools need some too."""


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = MOST_CONNECTIONS
    """At a time. Beyond them the one whose client has kept us waiting longest gives way."""
    spare_connections: int = 32
    """On top of these: if all are busy, others are still told so, and `/health` still answers."""
    head_bytes: int = 96 << 10
    """Path, query and headers: a question to the memory has up to 4096 characters, of 12 bytes each."""
    head_s: float = 10.0
    """From the first byte of a request, or from the connection, to the end of the headers."""
    body_bytes: int = 16 << 20
    """Several times the text of the longest contexts."""
    bodies_bytes: int = 256 << 20
    """Bodies of all requests that are being received or answered."""
    body_s: float = 20.0
    stalled_s: float = 30.0
    bytes_per_s: float = 16 << 10
    """A client gets `body_s` to send a body, `stalled_s` to read what waits for it, and another second for each of
    these."""
    unsent_bytes: int = 4 << 20
    """Bytes of a stream's events that wait because the client has not read earlier ones."""
    drain_s: float = DRAIN_S
    """Time that running requests get to finish when the server stops."""
    linger_s: float = 2.0
    """Time to read a refusal while the rest of what was refused still comes."""


def affordable(connections: int = MOST_CONNECTIONS) -> int:
    """No more than half of the files that this process may open: without one, nothing is answered."""
    if sys.platform == "win32":
        return connections
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return connections
    return max(1, min(connections, files // _FILES_PER_CONNECTION))
