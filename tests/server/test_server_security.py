"""Forged hosts, foreign pages and missing keys."""

from __future__ import annotations

import asyncio
from functools import cache

import httpx
import pytest
from starlette.applications import Starlette

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from helpers.scripted_server import ScriptedBackend

KEY = "canary-7f3a"
OWN = "127.0.0.1:8080"


@cache
def app_for(config: Config) -> Starlette:
    return create_app(Models(ScriptedBackend()), config)


def call(
    config: Config,
    headers: dict[str, str] | list[tuple[str, str]],
    method: str = "GET",
    path: str = "/v1/models",
    dialled: str = OWN,
) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app_for(config))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{dialled}") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


AUTH = {"Authorization": f"Bearer {KEY}"}
BOUND = Config(host="10.1.2.3", allow=("Box.local",), api_key=KEY)
EVERYWHERE = Config(host="0.0.0.0", api_key=KEY)
DIALLED = "192.168.1.20:8080"


@pytest.mark.parametrize(
    ("config", "host"),
    [
        *((Config(), host) for host in ("localhost", "LocalHost:1", "127.0.0.1", OWN, "[::1]:8080", "[::1]")),
        (BOUND, "10.1.2.3:9999"),
        (BOUND, "box.local:8080"),
        (EVERYWHERE, DIALLED),
    ],
)
def test_names_of_the_server_are_served(config: Config, host: str) -> None:
    assert call(config, {"Host": host, **AUTH}, dialled=DIALLED).status_code == 200


FORGED = (
    *("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io", "localhost@evil.example"),
    *("evil.example/localhost", "localhost:8080:1", "localhost:x", "192.168.1.5:8080", "0.0.0.0", "[::1", ""),
)


@pytest.mark.parametrize(
    ("config", "host"),
    [*((config, host) for config in (Config(), BOUND) for host in FORGED), (EVERYWHERE, "192.168.1.21:8080")],
)
def test_a_forged_host_is_refused(config: Config, host: str) -> None:
    for headers in ([("Host", host)], [("Host", "localhost"), ("Host", host)]):
        response = call(config, [*headers, *AUTH.items()], dialled=DIALLED)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "permission_error"
        assert "allow" in response.json()["error"]["message"]


@pytest.mark.parametrize("origin", [f"http://{OWN}", f"https://{OWN}"])
def test_the_servers_own_pages_may_call_it(origin: str) -> None:
    assert call(Config(), {"Host": OWN, "Origin": origin}).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1:8081",
        f"http://{OWN}.evil.example",
        f"ftp://{OWN}",
        "null",
        "",
    ],
)
def test_foreign_pages_may_not(method: str, origin: str) -> None:
    headers = {"Host": OWN, "Origin": origin, "Access-Control-Request-Method": "POST"}
    response = call(Config(), headers, method, "/v1/chat/completions")
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    assert "allow" in response.json()["error"]["message"]


def test_an_allowed_origin_may_call_and_read() -> None:
    config = Config(allow=("http://localhost:3000/",))
    response = call(config, {"Origin": "http://localhost:3000"})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "Origin" in response.headers["vary"]


def test_an_allowed_origin_gets_its_preflight_without_a_key() -> None:
    config = Config(allow=("http://localhost:3000",), api_key=KEY)
    headers = {
        "Origin": "http://localhost:3000",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    response = call(config, headers, "OPTIONS", "/v1/chat/completions")
    assert response.status_code == 204
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in response.headers["access-control-allow-methods"]
    denied = call(config, {"Origin": "http://localhost:3000"})
    assert denied.status_code == 401
    assert denied.headers["access-control-allow-origin"] == "http://localhost:3000"


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x"]
)
@pytest.mark.parametrize(
    "path",
    ["/", "/v1/models", "/v1/stats", "/v1/memory/facts", "/openapi.json", "/nowhere", "/health/", "//health"],
)
def test_without_the_key_nothing_is_served(authorization: str | None, path: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    response = call(Config(api_key=KEY), headers, path=path)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


def test_with_the_key_everything_is() -> None:
    assert call(Config(api_key=KEY), {"Authorization": f"bearer {KEY}"}).status_code == 200


def test_a_key_that_is_not_ascii_is_compared_not_crashed_on() -> None:
    headers = [(b"Authorization", "Bearer é".encode())]
    assert call(Config(api_key=KEY), headers).status_code == 401  # type: ignore[arg-type]
    assert call(Config(api_key="é"), headers).status_code == 200  # type: ignore[arg-type]


def test_the_root_is_guarded_like_the_rest() -> None:
    assert call(Config(), {"Host": "evil.example"}, path="/").status_code == 403
    assert call(Config(), {"Origin": "http://evil.example"}, path="/").status_code == 403
    assert call(Config(), {}, path="/").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_needs_no_key(path: str) -> None:
    assert call(Config(api_key=KEY), {}, path=path).json()["status"] == "ok"
    assert call(Config(api_key=KEY), {"Host": "evil.example"}, path=path).status_code == 403
