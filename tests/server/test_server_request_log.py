"""The line that every request leaves in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.errors import ContextExceeded, DeadlineExceeded
from emberkeep.server.app import create_app
from emberkeep.server.http_server import warmup
from emberkeep.server.request_log import RequestLog
from emberkeep.types.events import TextDelta
from helpers.scripted_server import HANG, ScriptedBackend, says

LOGGER = "emberkeep.server.request_log"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
FIGURES = "12 prompt tokens, 8 reused, first token after 21 ms, 3 tokens at 100.0/s"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged so far."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]


def call(method: str, path: str, script: list[Any] | None = None, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        app = RequestLog(
            create_app(Models(ScriptedBackend(script or ())), Config(api_key=options.pop("key", None)))
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_tells_what_it_cost(lines: Callable[[], list[str]], stream: bool) -> None:
    call("POST", CHAT, json={**BODY, "stream": stream})
    assert lines() == [f"POST {CHAT} 200: {FIGURES}"]


def test_several_prompts_are_added_up(lines: Callable[[], list[str]]) -> None:
    call("POST", "/v1/completions", json={"prompt": ["a", "b"]})
    assert len(lines()) == 1
    assert lines()[0].startswith("POST /v1/completions 200: 24 prompt tokens, 16 reused, ")


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/v1/models", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("PUT", CHAT, {}, 405),
        ("GET", "/v1/models", {"key": "secret"}, 401),
        ("POST", CHAT, {"json": {"messages": []}}, 400),
        ("POST", CHAT, {"script": [ContextExceeded(9, 8)], "json": BODY}, 400),
    ],
)
def test_other_requests_tell_their_status(
    lines: Callable[[], list[str]], method: str, path: str, options: dict[str, Any], status: int
) -> None:
    call(method, path, **options)
    assert lines() == [f"{method} {path} {status}"]


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("PUT", "/v1/memory/facts/diagnosis", "/v1/memory/facts/..."),
        ("GET", "/v1/memory/conversations/diagnosis%20of%20ann", "/v1/memory/conversations/..."),
        ("GET", "/v1/memory/facts", "/v1/memory/facts"),
    ],
)
def test_names_that_users_gave_are_not_told(
    lines: Callable[[], list[str]], method: str, path: str, told: str
) -> None:
    call(method, path, json={"value": "x"})
    assert lines() == [f"{method} {told} 404"]


def test_a_stream_that_fails_is_told_from_one_that_ends(lines: Callable[[], list[str]]) -> None:
    call("POST", CHAT, [TextDelta(0, "Hel"), DeadlineExceeded("Too late.")], json={**BODY, "stream": True})
    assert lines() == [f"POST {CHAT} 200: broken off"]


def test_a_client_that_leaves_is_named_as_the_reason(lines: Callable[[], list[str]]) -> None:
    backend = ScriptedBackend([TextDelta(0, "Hel"), HANG, *says("lo")])
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    messages = iter([{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "server": ("localhost", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    asyncio.run(RequestLog(create_app(Models(backend), Config()))(scope, receive, send))
    assert lines() == [f"POST {CHAT} 499: the client left"]


def test_no_path_can_forge_a_line_and_no_query_is_told(lines: Callable[[], list[str]]) -> None:
    call("GET", "/x%0aGET%20/forged?key=canary")
    assert lines() == ["GET /x%0AGET%20/forged 404"]


def test_health_checks_are_told_at_debug_only(
    lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    call("GET", "/health")
    assert lines() == []
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    call("GET", "/health")
    assert lines() == ["GET /health 200"]


def test_the_warmup_leaves_no_line(lines: Callable[[], list[str]]) -> None:
    config = Config()
    asyncio.run(warmup(create_app(Models(ScriptedBackend()), config), config))
    assert lines() == []
