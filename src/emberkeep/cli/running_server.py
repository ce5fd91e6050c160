"""A server that runs on this machine, asked over HTTP: only it knows what it has in RAM and in the engine."""

from __future__ import annotations

from typing import Any

import httpx

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.server.presence import server_urls
from emberkeep.types.request import Json

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
