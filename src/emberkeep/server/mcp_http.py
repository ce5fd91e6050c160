"""MCP over HTTP: the SDK's application behind the same checks as every other request."""

from __future__ import annotations

import signal
import sys

import uvicorn

from emberkeep.config import Config, check_exposure
from emberkeep.mcp.server import HTTP_PATH, McpHost
from emberkeep.server.http_server import Connections, uvicorn_config
from emberkeep.server.lifecycle import bind
from emberkeep.server.limits import Limits, affordable
from emberkeep.server.middleware import BodyBounds, Drain, SecurityMiddleware
from emberkeep.server.presence import reachable_url
from emberkeep.signals import ending_signals


def serve_mcp(host: McpHost, config: Config) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP. Raises EmberkeepError when it cannot start."""
    check_exposure(config)
    limits = Limits(connections=affordable(config.connections))
    app = SecurityMiddleware(BodyBounds(host.http_app(), Drain(), limits), config)
    with bind(config.host, config.port) as listener:
        url = reachable_url(config.host, listener.getsockname()[1])
        server = uvicorn.Server(uvicorn_config(app, config, Connections(limits), lifespan="on"))
        for number in ending_signals():
            signal.signal(number, server.handle_exit)
        print(f"MCP is ready at {url}{HTTP_PATH}\n  stop   Ctrl-C", file=sys.stderr, flush=True)
        server.run(sockets=[listener])
