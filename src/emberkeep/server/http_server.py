"""uvicorn, within limits: a server that drains before it stops, and connections that count what they are sent.

uvicorn's protocol takes heads of any size, waits for them without end, and queues any number of pipelined
requests. `HttpConnection` counts, and looks at its clocks now and then: what is too much is refused in OpenAI's
error shape where an answer is possible, and cut off where it is not.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import field
from http import HTTPStatus
from typing import Any, Literal

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from emberkeep.api.errors import Failure
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.server.limits import Limits
from emberkeep.server.middleware import OPEN_PATHS, AccessLog, Drain, failure_response
from emberkeep.values import dataclass

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""Longer than the idle time of usual client pools, so that it is the client who closes an idle connection."""
LAST_WORDS_S = 1
"""After the drain: time to tell cut-off requests why."""


def uvicorn_config(
    app: ASGIApp, config: Config, connections: Connections, *, lifespan: Literal["on", "off"] = "off"
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,
        http=type("BoundedConnection", (HttpConnection,), {"shared": connections}),  # it takes a class
        ws="none",
        lifespan=lifespan,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


class Server(uvicorn.Server):
    """Still listens while it drains, so that new requests get a 503 instead of a closed port."""

    def __init__(self, app: Starlette, config: Config) -> None:
        metrics = app.state.metrics
        connections = Connections(app.state.limits, metrics.refused)
        super().__init__(uvicorn_config(AccessLog(app, metrics.observe), config, connections))
        self.hurry = asyncio.Event()
        self.listening = asyncio.Event()
        self._drain: Drain = app.state.drain
        self._drain_s = config.drain_s
        self._deadline = 0.0
        self._app = app
        self._settings = config
        self._failure: Callable[[], EmberkeepError | None] = lambda: None

    def watch(self, failure: Callable[[], EmberkeepError | None]) -> None:
        """Stop when `failure` tells why there can never be an answer again."""
        self._failure = failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await warmup(self._app, self._settings)
        await super().startup(sockets)
        gc.freeze()  # all that is there now stays
        gc.enable()
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Not here: signals must also be handled while the backend closes."""
        yield

    def stop(self) -> None:
        """The first call begins the drain, the second one ends it. Call it in the loop's thread."""
        if self._drain.draining:
            self.should_exit = self.force_exit = True
            self.hurry.set()
            return
        self._drain.begin()
        self._deadline = time.monotonic() + self._drain_s
        if self._drain.running:
            count, limit = self._drain.running, self._drain_s
            log.info("Finishing %d running request(s), up to %g s; stop again to quit now.", count, limit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain.running and not self.force_exit:
            count, limit = self._drain.running, self._drain_s
            log.warning("Cutting off %d request(s) that did not finish within %g s.", count, limit)
        await self._cut_off()
        await super().shutdown(sockets)

    async def _cut_off(self) -> None:
        """Cancel what still runs. If uvicorn did it, the log would have an error."""
        running = list(self.server_state.tasks)
        for task in running:
            task.cancel()
        if running:
            _, deaf = await asyncio.wait(running, timeout=LAST_WORDS_S)
            if deaf:  # clients that do not read their last words
                for connection in self.server_state.connections:
                    connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if not self._drain.draining and self._failure() is not None:
            self.stop()
        over = self._drain.running == 0 or time.monotonic() >= self._deadline
        if self._drain.draining and over:
            self.should_exit = True
        return await super().on_tick(counter)


async def warmup(app: ASGIApp, config: Config) -> None:
    """One request before the first, so that what the web framework does lazily is done.

    It is a chat without messages, which is refused before it reaches the backend.
    """
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    if config.api_key is not None:
        headers.append((b"authorization", f"Bearer {config.api_key}".encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", config.port),
    }
    received: Iterator[Message] = iter(
        [{"type": "http.request", "body": b'{"messages": []}', "more_body": False}, {"type": "http.disconnect"}]
    )

    async def receive() -> Message:
        return next(received)

    await app(scope, receive, _nowhere)


async def _nowhere(message: Message) -> None:
    pass


# ── one connection ──

_ERROR = "invalid_request_error"
_BAD_HTTP = Failure(400, _ERROR, "This is not valid HTTP/1.1: check what was sent.", "bad_http")
_SLOW_HEAD = Failure(
    408, _ERROR, "The request's headers did not arrive in time: send them at once.", "head_timeout"
)
_LONG_TARGET = Failure(414, _ERROR, "The path and query are too long: send less.", "target_too_long")
_LARGE_HEAD = Failure(431, _ERROR, "The headers are too large or too many: send fewer.", "headers_too_large")
_TINY_PARTS = Failure(400, _ERROR, "The body comes in too many tiny chunks: send larger ones.", "tiny_chunks")
_PIPELINED = Failure(429, _ERROR, "Too many requests were sent ahead: wait for answers.", "too_many_pipelined")
_TINY_BYTES = 64
_WARN_EVERY_S = 60.0
_CROWDED = Failure(
    503,
    "overloaded",
    "Too many connections are open: try again in a moment.",
    "overloaded",
    headers={"Retry-After": "1", "Connection": "close"},
)


@dataclass(slots=True)
class Connections:
    """What all connections of one server share. Belongs to the event loop's thread."""

    limits: Limits = field(default_factory=Limits)
    on_refusal: Callable[[Failure], None] = lambda failure: None
    """Gets what was refused before it reached the application."""
    unfinished: OrderedDict[HttpConnection, None] = field(default_factory=OrderedDict)
    """Connections whose client has not sent all of a request, the one that waits longest first."""
    warn_at: float = 0.0


class HttpConnection(HttpToolsProtocol):
    shared = Connections()

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = self.shared.limits
        self._served = self.app
        self._cycles: deque[RequestResponseCycle] = deque()
        """Requests that were not answered yet; the first one runs."""
        self._unfinished_bytes = 0
        """Of a head, or of trailers, which the parser does not tell of until they are complete."""
        self._body_parts = 0
        self._body_bytes = 0
        self._head_since: float | None = None
        """When the current request's head began; None while there is none."""
        self._in_body = False
        self._got_further = False
        """The latest data ended a head or added to a body."""
        self._is_deaf = False
        """The request was refused: further data is ignored."""
        self._failure = _BAD_HTTP
        self._close_at: float | None = None
        self._unread: tuple[float, int] | None = None
        """Since when the client has been watched reading, and how many bytes were left for it then."""
        self._check_s = min(1.0, self._limits.head_s / 4, self._limits.stalled_s / 4, self._limits.linger_s / 4)
        self._check_timer: asyncio.TimerHandle | None = None

    # ── the connection ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._check_timer = self.loop.call_later(self._check_s, self._check)
        if len(self.connections) > self._limits.connections:
            self._make_room()
        self.shared.unfinished[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.unfinished.pop(self, None)
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.pipeline.clear()
        # uvicorn tells the request that came last; the one that runs is the first.
        for cycle in self._cycles:
            _disconnect(cycle)
        self._cycles.clear()
        # uvicorn leaves the timer of a connection that was reset, and the timer keeps the connection.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        if self.shared.unfinished:
            oldest, _ = self.shared.unfinished.popitem(last=False)
            self._refuse_crowd()
            oldest.transport.abort()
        elif len(self.connections) > self._limits.connections + self._limits.spare_connections:
            self._refuse_crowd()
            self.transport.abort()

    async def _turn_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, in place of the application."""
        if scope["path"] in OPEN_PATHS:
            await self._served(scope, receive, send)
        else:
            self._refuse_crowd()
            await failure_response(_CROWDED)(scope, receive, send)

    def _refuse_crowd(self) -> None:
        self.shared.on_refusal(_CROWDED)
        now = self.loop.time()
        if self.shared.warn_at <= now:
            self.shared.warn_at = now + _WARN_EVERY_S
            log.warning("%d connections are open: some are closed or refused.", len(self.connections))

    # ── what comes in ──

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        if self._head_since is None and not self._in_body:
            self._head_since = self.loop.time()
        self._got_further = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._failure)
            return
        if not self._got_further:
            self._count_unfinished(len(data))

    def _read_without_upgrade(self, rest: bytes) -> None:
        """WebSockets and HTTP/2 are not spoken here, and who asks for them is answered without. The parser would
        not see the body: it gets the request again, without that wish."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is nothing but such a wish
            self._refuse(_BAD_HTTP)
            return
        self.parser = httptools.HttpRequestParser(self)
        headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        self._unfinished_bytes = 0
        self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, self.url, headers, rest))

    def _count_unfinished(self, size: int) -> None:
        """Count bytes that the parser has not reported: it reports a header only when it is complete."""
        self._unfinished_bytes += size
        is_large = self._unfinished_bytes > self._limits.target_bytes + self._limits.header_bytes
        if is_large or (self._in_body and self._has_large_headers()):
            self._refuse(_LARGE_HEAD)

    def _has_large_headers(self) -> bool:
        """Trailers, which follow a chunked body, are among them."""
        size = sum([len(name) + len(value) + 4 for name, value in self.headers])
        return size > self._limits.header_bytes or len(self.headers) > self._limits.headers

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.target_bytes:
            self._give_up(_LONG_TARGET)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._has_large_headers():
            self._give_up(_LARGE_HEAD)
        if len(self._cycles) > self._limits.pipelined:
            self._give_up(_PIPELINED)
        self._in_body = self._got_further = True
        self._unfinished_bytes = self._body_parts = self._body_bytes = 0
        self._head_since = None
        is_crowded = len(self.connections) > self._limits.connections
        self.app = self._turn_away if is_crowded else self._served
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if len(self._cycles) > 1:
            # uvicorn would stop reading, and not notice that the client leaves while its first request runs.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._got_further = True
        self._body_parts += 1
        self._body_bytes += len(body)
        if self._body_parts > self._limits.body_parts + self._body_bytes // _TINY_BYTES:
            self._give_up(_TINY_PARTS)
        if len(self._cycles) > 1 and self.flow.read_paused:  # a large one
            self._give_up(_PIPELINED)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._unfinished_bytes = 0
        self._in_body = False
        self._got_further = True
        if self._cycles:
            self.shared.unfinished.pop(self, None)
        else:  # the answer was faster than the rest of the question
            self._close_at = None

    def _give_up(self, failure: Failure) -> None:
        """Call it in a callback of the parser, which stops there."""
        self._failure = failure
        raise _GivenUp

    # ── what goes out ──

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        if not self._cycles:
            self.shared.unfinished[self] = None
            if self._head_since is not None:
                self._head_since = self.loop.time()
            if self._in_body:
                self._close_at = self.loop.time() + self._limits.linger_s
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = None

    def _watch_reading(self) -> None:
        self._unread = self.loop.time(), self.transport.get_write_buffer_size()

    def _refuse(self, failure: Failure) -> None:
        """Refuse the request. An answer that is being sent is completed first, and is the last one here."""
        log.debug("Refused a request: %s", failure.message)
        self.shared.on_refusal(failure)
        self._is_deaf = True
        self.flow.resume_reading()
        self.pipeline.clear()
        while len(self._cycles) > 1:
            self._cycles.pop()
        if self._cycles and (self._cycles[0].response_started or not self._cycles[0].more_body):
            self._cycles[0].keep_alive = False
            return
        if self._cycles:  # the rest of its body will not be understood
            _disconnect(self._cycles.pop())
        self._close_at = self.loop.time() + self._limits.linger_s
        self.transport.write(_raw(failure))
        if self.transport.can_write_eof():
            # Closing now would reset the connection, and the client might never read why.
            self.transport.write_eof()

    # ── the clocks ──

    def _check(self) -> None:
        now = self.loop.time()
        if (self._close_at is not None and now >= self._close_at) or self._has_stalled(now):
            self.transport.abort()
        elif self._head_since is not None and not self._cycles and now - self._head_since > self._limits.head_s:
            self._head_since = None
            self._end_slow_head()
        self._check_timer = self.loop.call_later(self._check_s, self._check)

    def _end_slow_head(self) -> None:
        if self._unfinished_bytes:
            self._refuse(_SLOW_HEAD)
        else:
            self.transport.abort()  # nothing was asked

    def _has_stalled(self, now: float) -> bool:
        """Whether the client reads too slowly. While it is behind, nothing more is written to it."""
        if self._unread is None:
            if self.transport.is_closing():
                self._watch_reading()
            return False
        since, before = self._unread
        if now - since < self._limits.stalled_s:
            return False
        left = self.transport.get_write_buffer_size()
        if before - left < self._limits.read_bytes_per_s * self._limits.stalled_s:
            log.debug("Let go of a client that did not read its answer.")
            return True
        self._watch_reading()
        return False


class _GivenUp(Exception):
    """Ends the parser; the failure is kept with the connection."""


def _disconnect(cycle: RequestResponseCycle) -> None:
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _raw(failure: Failure) -> bytes:
    body = json.dumps(failure.json()).encode()
    head = (
        f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
