"""A server that runs on this machine, asked over HTTP: only it knows what it has in RAM and in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Set
from time import sleep
from typing import TYPE_CHECKING, Any

import httpx

from emberkeep.cli.console import complain, console
from emberkeep.config.settings import Config, TooLong
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.server.presence import server_urls
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.backend.base import ModelCard
    from emberkeep.backend.running import RunningModel

OK, LOADING = "ok", "loading"
_HEALTH_S = 3.0
"""A server that takes longer to say that it is well is not asked for more."""
_ANSWER_S = 60.0
"""Removing may delete many files."""


class RunningServer:
    """Every method blocks, and raises EmberkeepError."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    @property
    def url(self) -> str:
        return str(self._http.base_url).rstrip("/")

    def ask(self, method: str, path: str, **more: Any) -> Json:
        """`more`: as httpx has it."""
        try:
            response = self._http.request(method, path, **more)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EmberkeepError(f"The server at {self.url} did not answer: try again.") from error
        if response.is_success:
            return answer
        raise _refusal(response.status_code, answer["error"]["message"])

    def health(self) -> dict[str, Json]:
        """Empty where it does not answer."""
        try:
            health = self._http.get("/health", timeout=_HEALTH_S).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return health if isinstance(health, dict) else {}

    def close(self) -> None:
        self._http.close()


def find_server(config: Config, *, is_patient: bool = False) -> RunningServer | None:
    """The latest server on the data folder that answers; None without one. `is_patient`: it may still load."""
    accepted = (OK, LOADING) if is_patient else (OK,)
    for url in server_urls(config.data_dir):
        server = RunningServer(httpx.Client(**connection(url, config.api_key)))
        if server.health().get("status") in accepted:
            return server
        server.close()
    return None


def require_server(config: Config) -> RunningServer:
    """Raises EmberkeepError where none runs."""
    server = find_server(config)
    if server is None:
        raise EmberkeepError("No server runs on this data folder: start one with `emberkeep serve`.")
    return server


def connection(url: str, api_key: str | None) -> dict[str, Any]:
    """Arguments of httpx's clients."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # It is on this machine: no proxy is in between, and loading certificates would take longer than the answer.
    return {"base_url": url, "headers": headers, "trust_env": False, "verify": False, "timeout": _ANSWER_S}


def _refusal(status: int, message: str) -> EmberkeepError:
    if status == 401:
        return EmberkeepError(
            "The running server wants its API key: set EMBERKEEP_API_KEY, or api_key in the file."
        )
    return NoSuchEntry(message) if status == 404 else EmberkeepError(message)


# ── its model, for a chat that would load the same one ──


_OF_A_CHAT = {
    *("model", "data_dir", "log_level"),
    *("tools", "enable_tools", "disable_tools", "tools_from", "tools_root"),
}
"""Settings that a chat keeps to, whoever has loaded its model."""
_POLL_S = 0.1


def find_running_model(config: Config, flags: Set[str]) -> RunningModel | None:
    """The configured model, or the server's own where none is named; None where no server here has it, or `flags`
    are given that only a model of the chat's own can keep to. Blocks while the server loads it."""
    # Other commands only ask the server, and need none of it.
    from emberkeep.backend.running import RunningModel
    from emberkeep.runtime.parts import open_memory_or_none
    from emberkeep.runtime.served_models import LOCAL, backend_names

    # Whether messages leave is said with each of them, but what is cut is up to who has loaded the model.
    own = _OF_A_CHAT if config.too_long == TooLong.TRUNCATE else _OF_A_CHAT | {"too_long"}
    if flags - own or backend_names(config)[0] != LOCAL:
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
    from emberkeep.backend.base import ModelCard

    listed: Any = server.ask("GET", "/v1/models")
    found = next((one for one in listed["data"] if name in (one["id"], *one["aliases"])), None)
    if found is None or not found["status"]["local"]:
        raise NoSuchEntry(f"The server at {server.url} does not serve {name}.")
    with console(stderr=True).status(f"The server at {server.url} loads {found['id']} ..."):
        loaded: Any = server.ask("POST", "/models/load", json={"model": found["id"]}, timeout=None)
    props: Any = server.ask("GET", "/props", params={"model": found["id"]})
    context, caps = loaded["model"]["context_length"] or 0, props["chat_template_caps"]
    return ModelCard(found["id"], found["created"], context, calls_tools=caps["supports_tools"])
