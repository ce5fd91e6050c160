"""`emberkeep serve`: take the port, open the model, answer until told to stop."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack

from emberkeep.backend.base import Backend
from emberkeep.backend.capabilities import keep_warm
from emberkeep.config import Config, check_exposure
from emberkeep.library.warming import declared_prefixes
from emberkeep.runtime import open_backend
from emberkeep.server.app import create_app
from emberkeep.server.lifecycle import Server, run_until_stopped
from emberkeep.server.listener import bind
from emberkeep.server.presence import announced, reachable_url

_TALKATIVE = ("httpx", "httpx2")
"""They log the whole address of every request, and some services want their key in there."""


def serve(config: Config, *, install: Callable[[Config], None]) -> None:
    """Blocks until SIGINT, SIGTERM or SIGHUP. Raises EmberkeepError when it cannot start.

    `install` makes sure that the model is here; it runs once the address is known to be ours.
    """
    check_exposure(config)
    prefixes = declared_prefixes(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.WARNING)
    with bind(config.host, config.port) as listener, ExitStack() as until_the_end:
        install(config)
        backend = open_backend(config)
        keep_warm(backend, prefixes)

        def announce() -> None:
            url = reachable_url(config.host, listener.getsockname()[1])
            until_the_end.enter_context(announced(config.data_dir, url))
            print(banner(config, backend, listener), file=sys.stderr, flush=True)

        run_until_stopped(Server(create_app(backend, config), config, on_ready=announce), backend, listener)


def banner(config: Config, backend: Backend, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    card = backend.card
    return (
        f"Emberkeep is ready at http://{host}:{listener.getsockname()[1]}/v1\n"
        f"  model  {card.id}, {card.context:,} tokens of context\n"
        f"  data   {config.data_dir}\n"
        f"  stop   Ctrl-C"
    )
