"""`emberkeep serve`, `ps` and `stop`: the server, which models one that runs has loaded, and ending either."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.commands import JsonFlag, one_command, with_settings
from emberkeep.cli.console import ago, show_table, span
from emberkeep.cli.model_setup import ensure, pull_reporter
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.cli.running_server import RunningServer

EXAMPLES = """\b
Examples:
  emberkeep serve --model mine --port 9000     a model that was pulled before
  emberkeep serve --warm system.txt            with this system prompt ready before the first request
  emberkeep serve --server-tools safe --enable-tools memory,read_file
  emberkeep serve --model mine --models all    loads all others when they are asked for, too
  emberkeep serve --backend gpt,local          a model of `emberkeep api list`, the one here if it is down
"""


@with_settings(
    *("model", "backend", "ctx", "parallel", "host", "port", "api_key", "data_dir", "ram_budget", "disk_budget"),
    *("models", "aliases", "pinned", "unload_after_s", "model_memory", "base_url", "lora", "kv_type", "pooling"),
    *("speculation", "remote", "kv_bits", "approximate", "warm", "ttl", "max_concurrent_per_user", "max_tokens"),
    *("too_long", "memory_margin", "reasoning", "recall", "tools", "server_tools", "enable_tools"),
    *("disable_tools", "tools_from", "tools_root", "engine", "threads", "mlock", "flash_attention", "device"),
    *("dtype", "quantization", "attention", "residency", "gpu_memory", "gpu_layers", "cpu_moe", "tensor_split"),
    "config",
)
def serve(config: Config) -> None:
    """Answer OpenAI-compatible requests over HTTP until stopped.

    The default model is pulled first when it is missing.
    """
    # Imported late, as in every command: `emberkeep serve --help` must not load a web framework.
    from emberkeep.server.lifecycle import serve as serve_until_stopped

    with pull_reporter() as reporter:
        serve_until_stopped(config, prepare=ensure, reporter=reporter)


# ── a server that runs ──

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
        models = server.ask("GET", "/v1/models")["data"]
        listed = [model for model in models if all_models or model["status"]["value"] != "unloaded"]
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


app = one_command(serve, epilog=EXAMPLES)
ps_app = one_command(ps)
stop_app = one_command(stop)
