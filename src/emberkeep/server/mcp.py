"""MCP over HTTP: the SDK's application behind the same checks as every other request."""

from __future__ import annotations

import signal
import sys

import uvicorn

from emberkeep.config import Config, check_exposure
from emberkeep.mcp.server import HTTP_PATH, McpHost
from emberkeep.server.bodies import BodyBounds
from emberkeep.server.connection import Connections, bounded
from emberkeep.server.drain import Drain
from emberkeep.server.lifecycle import KEEP_ALIVE_S, LAST_WORDS_S
from emberkeep.server.limits import Limits, affordable
from emberkeep.server.listener import bind
from emberkeep.server.presence import reachable_url
from emberkeep.server.security import SecurityMiddleware
from emberkeep.signals import ending_signals


def serve_mcp(host: McpHost, config: Config) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP. Raises EmberkeepError when it cannot start."""
    check_exposure(config)
    limits = Limits(connections=affordable(config.connections))
    settings = uvicorn.Config(
        SecurityMiddleware(BodyBounds(host.http_app(), Drain(), limits), config),
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,
        http=bounded(Connections(limits)),
        ws="none",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    with bind(config.host, config.port) as listener:
        url = reachable_url(config.host, listener.getsockname()[1])
        server = uvicorn.Server(settings)
        for number in ending_signals():
            signal.signal(number, server.handle_exit)
        print(f"MCP is ready at {url}{HTTP_PATH}\n  stop   Ctrl-C", file=sys.stderr, flush=True)
        server.run(sockets=[listener])
