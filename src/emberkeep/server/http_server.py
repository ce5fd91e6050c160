"""uvicorn, within limits: a server that drains before it stops, and connections that end when their client takes
too much or lets us wait too long.

uvicorn's protocol takes heads of any size and waits for them, and for readers, without end. `BoundedConnection`
adds one counter and one timer to it. Bodies are bounded by `middleware.RequestGate`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Literal

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from emberkeep import garbage
from emberkeep.api.errors import Failure
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.server.middleware import CROWDED, Drain, Limits
from emberkeep.server.request_log import RequestLog

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""Longer than the idle time of usual client pools, so that it is the client who closes an idle connection."""
LAST_WORDS_S = 1
"""After the drain: time to tell cut-off requests why."""
_SWITCH_S = 0.0002
"""So long a thread may go on in Python while another one waits. With 5 ms, Python's own, the engine's thread waits
for the loop all the time when many requests come at once."""

OnRefusal = Callable[[Failure], None]
"""Gets what was refused before it reached the application."""


def uvicorn_config(
    app: ASGIApp,
    config: Config,
    limits: Limits,
    on_refusal: OnRefusal = lambda failure: None,
    *,
    lifespan: Literal["on", "off"] = "off",
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "error",
        access_log=False,
        http=partial(BoundedConnection, limits, on_refusal),  # type: ignore[arg-type]  # it only calls it
        ws="none",
        lifespan=lifespan,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


class Server(uvicorn.Server):
    """Still listens while it drains, so that new requests get a 503 instead of a closed port."""

    def __init__(self, app: Starlette, config: Config) -> None:
        metrics = app.state.metrics
        wrapped = RequestLog(app, metrics.observe)
        super().__init__(uvicorn_config(wrapped, config, app.state.limits, metrics.refused))
        self.hurry = asyncio.Event()
        self.listening = asyncio.Event()
        self._drain: Drain = app.state.drain
        self._drain_s = app.state.limits.drain_s
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
        garbage.begin()
        sys.setswitchinterval(_SWITCH_S)
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
            _, unread = await asyncio.wait(running, timeout=LAST_WORDS_S)
            if unread:  # clients that do not read their last words
                for connection in self.server_state.connections:
                    connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if not self._drain.draining and self._failure() is not None:
            self.stop()
        is_over = self._drain.running == 0 or time.monotonic() >= self._deadline
        if self._drain.draining and is_over:
            self.should_exit = True
        return await super().on_tick(counter)


async def _nowhere(message: Message) -> None:
    pass


async def warmup(app: ASGIApp, config: Config, send: Send = _nowhere) -> None:
    """One request before the first, so that what the web framework does lazily is done.

    It is a chat without messages, which is refused before it reaches the backend.
    """
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if config.api_key is not None:
        headers.append((b"authorization", f"Bearer {config.api_key}".encode()))
    path = {"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b""}
    scope: Scope = {"type": "http", "method": "POST", "scheme": "http", "http_version": "1.1", "headers": headers}
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"messages": []}', "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    await app({**scope, **path}, receive, send)


# ── one connection ──

_ERROR = "invalid_request_error"
_BAD_HTTP = Failure(400, _ERROR, "This is not valid HTTP/1.1: check what was sent.", "bad_http")
_SLOW_HEAD = Failure(
    408, _ERROR, "The request's headers did not arrive in time: send them at once.", "head_timeout"
)
_LARGE_HEAD = Failure(431, _ERROR, "The path or the headers are too large: send less.", "headers_too_large")


class BoundedConnection(HttpToolsProtocol):
    """One client. Belongs to the event loop's thread.

    Bytes are counted where the parser is fed, because it tells of a header only when it is complete. The timer
    runs while it is the client's turn (`_patience`), and ends the connection.
    """

    def __init__(self, limits: Limits, on_refusal: OnRefusal, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._on_refusal = on_refusal
        self._failure = _BAD_HTTP
        self._unread = 0
        """Bytes of a head, or of trailers, that the parser has not told of yet."""
        self._in_body = False
        self._is_deaf = False
        """What comes is ignored: the request before it is the last one here."""
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = self.loop.time()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_waiting(self) -> bool:
        """The client has not sent all of a request."""
        return not self.transport.is_closing() and (not self._is_answering or self.cycle.more_body)

    def _patience(self) -> float | None:
        """How many seconds the client has for what it has to do next; None: it is our turn."""
        if self.flow.write_paused or self.transport.is_closing():
            return self._limits.stalled_s + self.transport.get_write_buffer_size() / self._limits.bytes_per_s
        if self._is_answering:
            return None
        if self._is_deaf or self._in_body:
            return self._limits.linger_s
        return self._limits.head_s if self._unread or self.cycle is None else KEEP_ALIVE_S

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._patience()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        is_head = not (self.flow.write_paused or self._is_deaf or self._in_body or self.transport.is_closing())
        if is_head and self._unread:
            self._refuse(_SLOW_HEAD)
        else:
            self.transport.abort()

    def _refuse(self, failure: Failure) -> None:
        """An answer that is being given is completed first. Either way it is the last one here."""
        self._on_refusal(failure)
        self._is_deaf = True
        self.flow.resume_reading()
        if self._is_answering and (self.cycle.response_started or not self.cycle.more_body):
            self.cycle.keep_alive = False
            return
        if self._is_answering:  # the rest of its body will not be understood
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        self.transport.write(_raw(failure))
        # Closing now would reset the connection, and the client might never read why.
        self.transport.write_eof()
        self._set_timer()

    def _make_room(self) -> None:
        """A flood of connections that ask nothing pushes out itself."""
        others = [one for one in self.connections if one is not self and one._is_waiting]  # type: ignore[union-attr]
        if others:
            min(others, key=lambda one: one._waiting_since).transport.abort()  # type: ignore[union-attr]
        elif len(self.connections) > self._limits.connections + self._limits.spare_connections:
            self.transport.abort()
        else:
            return
        self._on_refusal(CROWDED)
        warn_of_crowd(self._limits.connections, int(self.loop.time() // 60))

    # ── asyncio's callbacks ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        begins_head = not self._unread
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_deaf:
                self._refuse(self._failure)
        else:
            if self._unread > self._limits.head_bytes:
                self._refuse(_LARGE_HEAD)
            elif begins_head and self._unread:
                self._set_timer()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """WebSockets and HTTP/2 are not spoken here, and who asks for them (Java's client always does) is answered
        without. The parser would not see the body: it gets the request again, without that wish."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is nothing but such a wish
            self._refuse(_BAD_HTTP)
            return
        self.parser = httptools.HttpRequestParser(self)
        headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        self._unread = 0
        self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, self.url, headers, rest))

    # ── the parser's and the answer's ──

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > self._limits.head_bytes
        ):
            self._failure = _LARGE_HEAD
            raise ValueError  # ends the parser
        if self._is_answering:  # sent ahead, which hardly any client does, and each may have to send again
            self._is_deaf, self.cycle.keep_alive = True, False
            raise ValueError
        self._unread, self._in_body = 0, True
        super().on_headers_complete()
        self._set_timer()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unread = 0

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._unread, self._in_body = 0, False
        if not self._is_answering:  # the answer was faster than the rest of the question
            self._set_timer()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self._waiting_since = self.loop.time()
        self._set_timer()


@lru_cache(maxsize=1)  # once a minute: a flood would fill the log
def warn_of_crowd(limit: int, minute: int) -> None:
    log.warning("%d connections are open: those that have waited longest are closed.", limit)


def _raw(failure: Failure) -> bytes:
    body = json.dumps(failure.json()).encode()
    head = (
        f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
