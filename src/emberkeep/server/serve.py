"""`emberkeep serve`: take the port, open the model, answer until told to stop."""

from __future__ import annotations

import errno
import logging
import socket
import sys

from emberkeep.backend.base import Backend
from emberkeep.config import Config, check_exposure
from emberkeep.errors import EmberkeepError
from emberkeep.runtime import open_backend
from emberkeep.server.app import create_app
from emberkeep.server.lifecycle import Server, run_until_stopped


def serve(config: Config) -> None:
    """Blocks until SIGINT or SIGTERM. Raises EmberkeepError when it cannot start."""
    check_exposure(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    with bind(config.host, config.port) as listener:
        backend = open_backend(config)
        print(banner(config, backend, listener), file=sys.stderr, flush=True)
        run_until_stopped(Server(create_app(backend, config), config), backend, listener)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that come while the model loads wait in its backlog."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise EmberkeepError(_why_not(error, host, port)) from error


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: stop the other server or choose --port."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights: choose --port above 1023."
    return f"{host} is not an address of this machine: choose another --host."


def banner(config: Config, backend: Backend, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    card = backend.card
    return (
        f"Emberkeep is ready at http://{host}:{listener.getsockname()[1]}/v1\n"
        f"  model  {card.id}, {card.context:,} tokens of context\n"
        f"  data   {config.data_dir}\n"
        f"  stop   Ctrl-C"
    )
