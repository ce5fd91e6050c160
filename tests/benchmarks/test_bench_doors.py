"""The doors that a benchmark compares are all open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from benchmarks.doors import DOORS, Door, model_ms
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from helpers.scripted_backend import fake_backend


@pytest.fixture
def http(tmp_path: Path) -> Iterator[TestClient]:
    config = Config(data_dir=tmp_path)
    backend = fake_backend(config)
    with TestClient(create_app(Models(backend), config), base_url="http://127.0.0.1") as client:
        yield client
    asyncio.run(backend.close())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
def test_every_door_answers(http: TestClient, door: Door, stream: bool) -> None:
    answer = http.post(door.path, json={**door.body("Why is the sky blue?", 4), "stream": stream})
    assert answer.status_code == 200
    assert b'"error": {' not in answer.content
    assert model_ms(answer.content) > 0
