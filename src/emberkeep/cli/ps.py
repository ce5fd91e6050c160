"""`emberkeep ps` and `emberkeep stop`: which models a running server has loaded, and unloading them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.commands import one_command
from emberkeep.cli.console import ago, show_table, span
from emberkeep.cli.flags import JsonFlag, with_settings
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.cli.running_server import RunningServer

_COLUMNS = ("model", "state", "memory", "requests", "used", "until")


@with_settings("data_dir", "api_key", "config")
def ps(
    config: Config,
    all_models: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that are not loaded, and would be when asked for.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Which models the running server has loaded, and for how long."""
    from emberkeep.cli.running_server import require_server

    with closing(require_server(config)) as server:
        listed = [model for model in _models(server) if all_models or model["status"]["value"] != "unloaded"]
    if as_json:
        print(json.dumps(listed, indent=2))
    elif listed:
        show_table(_COLUMNS, [_row(model) for model in listed])
    else:
        print("No model is loaded: the next request loads the one that it asks for.")


@with_settings("data_dir", "api_key", "config")
def stop(
    config: Config,
    model: Annotated[str | None, typer.Argument(help="A model to unload; none: the server is stopped.")] = None,
) -> None:
    """Unload a model, when the requests that it answers are done; or stop the server.

    What a model has stored stays: it goes on from there when it is loaded again.
    """
    from emberkeep.cli.running_server import require_server

    with closing(require_server(config)) as server:
        if model is None:
            _stop_server(config, server)
            return
        server.ask("POST", "/models/unload", json={"model": model}, timeout=None)
    print(f"{model} is unloaded.")


def _stop_server(config: Config, server: RunningServer) -> None:
    """As Ctrl-C does: it finishes what runs, and writes what is not on disk yet."""
    from emberkeep.server.presence import pid_of

    pid = pid_of(config.data_dir, server.url)
    if pid is None:
        raise EmberkeepError(
            f"The process of the server at {server.url} is not known: stop it where it was started."
        )
    os.kill(pid, signal.SIGTERM)
    print(f"The server at {server.url} finishes what runs, and ends.")


def _models(server: RunningServer) -> list[Json]:
    return list(server.ask("GET", "/v1/models")["data"])


def _row(model: Json) -> list[str]:
    status = model["status"]
    is_there = status["value"] == "loaded"
    names = [model["id"], *model["aliases"]]
    return [
        ", ".join(names),
        f"{status['value']}: {status['error']}" if status["error"] else status["value"],
        readable_size(status["memory_bytes"]) if status["memory_bytes"] else "",
        _requests(status),
        ago(status["idle_s"]) if is_there else "",
        _until(status) if is_there else "",
    ]


def _requests(status: Json) -> str:
    waiting = f", {status['waiting']} waiting" if status["waiting"] else ""
    return f"{status['running']}{waiting}" if status["running"] or waiting else ""


def _until(status: Json) -> str:
    if status["pinned"]:
        return "pinned"
    return "its memory is needed" if status["expires_s"] is None else f"in {span(max(status['expires_s'], 0))}"


ps_app = one_command(ps)
stop_app = one_command(stop)
