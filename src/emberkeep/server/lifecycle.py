"""Running until told to stop: signals, drain, and the backend's own end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from emberkeep.backend.base import Backend
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.server.connection import Connections, bounded
from emberkeep.server.drain import Drain
from emberkeep.server.metrics.requests import Metered
from emberkeep.server.rehearsal import rehearse
from emberkeep.server.request_log import RequestLog
from emberkeep.signals import ending_signals

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 65
"""Longer than the idle time of usual client pools, so that it is the client who closes an idle connection."""
LAST_WORDS_S = 1
"""After the drain: time to tell cut-off requests why."""
HURRY_S = 5.0
"""After the second signal: time for the backend to write what it has."""


class Server(uvicorn.Server):
    """Goes on listening while it drains, so that new requests hear 503 instead of a closed port."""

    def __init__(self, app: FastAPI, config: Config, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called once requests are answered without delay."""
        super().__init__(
            uvicorn.Config(
                RequestLog(Metered(app, app.state.metrics)),
                log_config=None,
                log_level="debug" if config.log_level == "debug" else "warning",
                access_log=False,
                http=bounded(Connections(app.state.limits, app.state.metrics.refused)),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        self.hurry = asyncio.Event()
        self._drain: Drain = app.state.drain
        self._drain_s = config.drain_s
        self._deadline = 0.0
        self._app = app
        self._on_ready = on_ready
        self._settings = config
        self._failure: Callable[[], EmberkeepError | None] = lambda: None

    def watch(self, backend: Backend) -> None:
        """Stop by itself when the backend will never answer again."""
        self._failure = backend.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await rehearse(self._app, self._settings)
        await super().startup(sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Not here: signals must also be heard while the backend closes."""
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
        """Left to uvicorn, this would be an error in the log."""
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


def run_until_stopped(server: Server, backend: Backend, listener: socket.socket) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP, then drains and closes the backend. Call it in the main thread.

    Raises the failure of a backend that will never answer again, so that a supervisor starts the process anew.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(server, backend, listener))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


async def _run(server: Server, backend: Backend, listener: socket.socket) -> None:
    with _signals(server.stop):
        try:
            await backend.start()
            server.watch(backend)
            await server.serve(sockets=[listener])
        finally:
            if backend.failure() is not None:
                server.hurry.set()  # what is broken may not be able to close
            await _close(backend, server.hurry)
    if failure := backend.failure():
        raise failure


async def _close(backend: Backend, hurry: asyncio.Event) -> None:
    closing = asyncio.ensure_future(backend.close())
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((closing, hurried), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((closing,), timeout=HURRY_S)
    hurried.cancel()
    if not closing.done():
        # Stored state survives this as it survives a crash; waiting for engine threads may take for ever.
        log.warning("%s", backend.failure() or "Stopped before everything was written.")
        os._exit(1)
    closing.result()


@contextmanager
def _signals(stop: Callable[[], None]) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()
    before = {sig: signal.signal(sig, lambda *_: loop.call_soon_threadsafe(stop)) for sig in ending_signals()}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
