"""The request before the first."""

from __future__ import annotations

import asyncio

import pytest

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from emberkeep.server.http_server import warmup
from helpers.scripted_server import ScriptedBackend


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_warmup_reaches_the_route_but_not_the_backend(key: str | None) -> None:
    sent: list[object] = []

    async def listen(message: object) -> None:
        sent.append(message)

    config = Config(api_key=key)
    backend = ScriptedBackend()
    asyncio.run(warmup(create_app(Models(backend), config), config, listen))
    start, body = sent
    assert isinstance(start, dict)
    assert isinstance(body, dict)
    assert start["status"] == 400
    assert b"messages" in body["body"]
