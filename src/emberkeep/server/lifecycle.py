"""`emberkeep serve`: take the port, open the model, answer until told to stop, then drain and close.

`emberkeep mcp serve` over HTTP stands behind the same checks.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Protocol

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.library.installation import declared_prefixes
from emberkeep.logs import begin_logging
from emberkeep.models.early_load import loaded_early
from emberkeep.server.presence import announce, check_exposure, reachable_url
from emberkeep.signals import ending_signals

if TYPE_CHECKING:
    from emberkeep.backend.base import Backend
    from emberkeep.mcp.server import McpHost
    from emberkeep.models.spec import ClosingReporter, Reporter
    from emberkeep.server.http_server import Server
    from emberkeep.types.events import Loading

log = logging.getLogger(__name__)

_START_SWITCH_S = 0.0005
"""How long a thread keeps Python's lock from others during the start: who loads the model often needs it for a
moment, and would wait ten times as long for who imports."""

HURRY_S = 5.0
"""After the second signal: time for the backend to write what it has."""


def serve(config: Config, *, prepare: Callable[[Config, Reporter], None], reporter: ClosingReporter) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP. Raises EmberkeepError when it cannot start.

    `prepare` makes sure that the model is here; a thread calls it once the address is known to be ours, and loads
    the model then. Meanwhile requests wait. `reporter` shows how far it is, and is closed when the model is there.
    """
    check_exposure(config)
    prefixes = declared_prefixes(config)
    begin_logging(config.log_level, is_server=True)
    with bind(config.host, config.port) as listener, ExitStack() as until_the_end:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_START_SWITCH_S)
        until_the_end.enter_context(loaded_early(config))
        # Imported while the model is being loaded.
        from emberkeep.backend.base import keep_warm
        from emberkeep.runtime.served_models import begin_models

        models = begin_models(config, partial(prepare, config), reporter)
        keep_warm(models.default, prefixes)
        from emberkeep.server.app import create_app
        from emberkeep.server.http_server import Server

        url = reachable_url(config.host, listener.getsockname()[1])
        until_the_end.enter_context(announce(config.data_dir, url))

        def on_ready() -> None:
            sys.setswitchinterval(usual)
            reporter.close()
            print(banner(config, models.default, listener), file=sys.stderr, flush=True)

        run_until_stopped(Server(create_app(models, config), config), models, listener, on_ready)
        if models.starting is not None:
            # Told to end before the model was there. Python would end under the feet of the thread that loads it.
            until_the_end.close()
            reporter.close()
            os._exit(0)


def serve_mcp(host: McpHost, config: Config) -> None:
    """MCP over HTTP. Blocks until SIGINT, SIGTERM or SIGHUP. Raises EmberkeepError when it cannot start."""
    import uvicorn

    from emberkeep.mcp.server import HTTP_PATH
    from emberkeep.server.http_server import uvicorn_config
    from emberkeep.server.middleware import Drain, Limits, RequestGate, SecurityMiddleware, affordable

    check_exposure(config)
    limits = Limits(connections=affordable())
    app = SecurityMiddleware(RequestGate(host.http_app(), Drain(), limits), config)
    with bind(config.host, config.port) as listener:
        url = reachable_url(config.host, listener.getsockname()[1])
        server = uvicorn.Server(uvicorn_config(app, config, limits, lifespan="on"))
        for number in ending_signals():
            signal.signal(number, server.handle_exit)
        print(f"MCP is ready at {url}{HTTP_PATH}\n  stop   Ctrl-C", file=sys.stderr, flush=True)
        server.run(sockets=[listener])


def banner(config: Config, backend: Backend, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    card, address = backend.card, f"http://{host}:{listener.getsockname()[1]}"
    return (
        f"Emberkeep is ready at {address}/v1\n"
        f"  page   {reachable_url(config.host, listener.getsockname()[1])}\n"
        f"  model  {card.id}, {card.context:,} tokens of context\n"
        f"  data   {config.data_dir}\n"
        f"  stop   Ctrl-C"
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that come while the model loads wait in its backlog. Raises EmberkeepError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise EmberkeepError(_why_not(error, host, port)) from error
    # Connections inherit it. asyncio, unlike uvloop, would not set it, and answers would wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: stop the other server or choose --port."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights: choose --port above 1023."
    return f"{host} is not an address of this machine: choose another --host."


class ModelsOfServer(Protocol):
    """All models, or what stands in for them."""

    @property
    def starting(self) -> Loading | None:
        """None once it can answer."""

    async def ready(self) -> None:
        """Returns when it can answer."""

    async def start(self) -> None: ...

    def failure(self) -> EmberkeepError | None: ...

    async def close(self) -> None: ...


def run_until_stopped(
    server: Server, models: ModelsOfServer, listener: socket.socket, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP, then drains and closes the models. Call it in the main thread.

    `on_ready` is called once requests are answered without delay. Raises the failure of a model that will never
    answer again, so that a supervisor starts the process anew.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(server, models, listener, on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


async def _run(
    server: Server, models: ModelsOfServer, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    def stop() -> None:
        server.stop()
        if models.starting is not None:
            server.stop()  # who waits for the model would wait too long

    with _signals(stop):
        try:
            await models.start()
            server.watch(models.failure)
            # A task of its own: nothing but it wakes up at uvicorn's ticks.
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            telling = asyncio.create_task(_tell_when_ready(server, models, on_ready))
            await serving
            telling.cancel()
        finally:
            if models.failure() is not None:
                server.hurry.set()  # what is broken may not be able to close
            await _close(models, server.hurry)
    if failure := models.failure():
        raise failure


async def _tell_when_ready(server: Server, models: ModelsOfServer, on_ready: Callable[[], None]) -> None:
    await server.listening.wait()
    await models.ready()
    on_ready()


async def _close(models: ModelsOfServer, hurry: asyncio.Event) -> None:
    closing = asyncio.ensure_future(models.close())
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((closing, hurried), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((closing,), timeout=HURRY_S)
    hurried.cancel()
    if not closing.done():
        # Stored state survives this as it survives a crash; waiting for engine threads may take for ever.
        log.warning("%s", models.failure() or "Stopped before everything was written.")
        os._exit(1)
    closing.result()


@contextmanager
def _signals(stop: Callable[[], None]) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()

    def stop_soon(*_: object) -> None:
        loop.call_soon_threadsafe(stop, context=Context())  # not that of the request that runs just now

    before = {sig: signal.signal(sig, stop_soon) for sig in ending_signals()}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
