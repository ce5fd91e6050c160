"""The model of a running server, for a chat that would load the same one."""

from __future__ import annotations

from collections.abc import Mapping, Set
from time import sleep
from typing import Any

from emberkeep.backend.base import ModelCard
from emberkeep.backend.running import RunningModel
from emberkeep.cli.console import complain, console
from emberkeep.cli.running_server import LOADING, RunningServer, connection, find_server
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.runtime.chain import LOCAL, backend_names
from emberkeep.runtime.memory import open_memory_or_none

_OF_A_CHAT = {
    *("model", "data_dir", "log_level"),
    *("tools", "enable_tools", "disable_tools", "tools_from", "tools_root"),
}
"""Settings that a chat keeps to, whoever has loaded its model."""
_POLL_S = 0.1


def find_running_model(config: Config, flags: Set[str]) -> RunningModel | None:
    """The configured model, or the server's own where none is named; None where no server here has it, or `flags`
    are given that only a model of the chat's own can keep to. Blocks while the server loads it."""
    if flags - _OF_A_CHAT or backend_names(config)[0] != LOCAL:
        return None
    server = find_server(config, is_patient=True)
    if server is None:
        return None
    try:
        health = _when_loaded(server)
        card = _card(server, config.model or health["model"])
    except NoSuchEntry:  # it serves others
        return None
    except EmberkeepError as error:
        complain(f"{error} This chat loads the model itself.")
        return None
    finally:
        server.close()
    return RunningModel(card, connection(server.url, config.api_key), open_memory_or_none(config))


def _when_loaded(server: RunningServer) -> Mapping[str, Any]:
    """Raises EmberkeepError where it ends before that."""
    health = server.health()
    with console(stderr=True).status(f"The server at {server.url} loads its model ..."):
        while health.get("status") == LOADING:
            sleep(_POLL_S)
            health = server.health()
    if not health:
        raise EmberkeepError(f"The server at {server.url} has just ended.")
    return health


def _card(server: RunningServer, name: str) -> ModelCard:
    """Raises NoSuchEntry where it does not serve a model of this name that runs here."""
    listed: Any = server.ask("GET", "/v1/models")
    found = next((one for one in listed["data"] if name in (one["id"], *one["aliases"])), None)
    if found is None or not found["status"]["local"]:
        raise NoSuchEntry(f"The server at {server.url} does not serve {name}.")
    with console(stderr=True).status(f"The server at {server.url} loads {found['id']} ..."):
        loaded: Any = server.ask("POST", "/models/load", json={"model": found["id"]}, timeout=None)
    props: Any = server.ask("GET", "/props", params={"model": found["id"]})
    context, caps = loaded["model"]["context_length"] or 0, props["chat_template_caps"]
    return ModelCard(found["id"], found["created"], context, calls_tools=caps["supports_tools"])
