from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from emberkeep.config.settings import Config
from helpers.scripted_server import Running, ScriptedBackend, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(ScriptedBackend(), Config()) as server:
        yield server


@pytest.fixture
def backend(server: Running) -> ScriptedBackend:
    server.backend.reset()
    return server.backend


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
