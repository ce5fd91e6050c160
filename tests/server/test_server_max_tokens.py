"""The longest answer that a server gives, whatever its clients ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from emberkeep.types.events import Completed
from emberkeep.types.request import Message, Request
from helpers.conversing import Harbour, ScriptedEngine
from helpers.remote_model import ScriptedProvider, remote, said
from helpers.scripted_backend import read_events

LONG = "The tide comes in at noon, and every boat that lies in the harbour rises with it."
HELLO = [{"role": "user", "content": "Hello"}]
MOST = 8


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=2048)


@pytest.fixture
def http(tmp_path: Path, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with Harbour(tmp_path, engine, max_tokens=MOST) as harbour:
        app = create_app(Models(harbour.backend), Config(data_dir=tmp_path))
        with TestClient(app, base_url="http://127.0.0.1") as client:
            yield client


def chat_told(answer: Any) -> tuple[str, int]:
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


def message_told(answer: Any) -> tuple[str, int]:
    return answer["stop_reason"], answer["usage"]["output_tokens"]


def response_told(answer: Any) -> tuple[str, int]:
    return answer["incomplete_details"]["reason"], answer["usage"]["output_tokens"]


def ollama_told(answer: Any) -> tuple[str, int]:
    return answer["done_reason"], answer["eval_count"]


DOORS = [
    ("/v1/chat/completions", {"messages": HELLO}, ["max_tokens", "max_completion_tokens"], chat_told, "length"),
    ("/v1/completions", {"prompt": "Hello"}, ["max_tokens"], chat_told, "length"),
    ("/v1/responses", {"input": "Hello"}, ["max_output_tokens"], response_told, "max_output_tokens"),
    ("/api/chat", {"messages": HELLO, "model": "default", "stream": False}, [], ollama_told, "length"),
]


@pytest.mark.parametrize(
    ("path", "body", "told", "reason"),
    [
        (path, {**body, **given}, told, reason)
        for path, body, fields, told, reason in DOORS
        for given in ({}, *({field: 100} for field in fields), *({field: -1} for field in fields))
    ],
)
def test_no_answer_is_longer_and_each_says_so(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any], told: Any, reason: str
) -> None:
    engine.will_say(LONG)
    answer = http.post(path, json=body).json()
    assert told(answer) == (reason, MOST)
    assert answer["emberkeep"]["clamped_max_tokens"] == MOST


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_was_clamped_has_not_filled_the_context(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.will_say(LONG)
    answer = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 100, "stream": stream})
    if stream:
        assert '"stop_reason":"max_tokens"' in answer.text
        assert f'"clamped_max_tokens":{MOST}' in answer.text
    else:
        assert message_told(answer.json()) == ("max_tokens", MOST)
        assert answer.json()["emberkeep"]["clamped_max_tokens"] == MOST


def test_who_asks_for_less_gets_that(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.will_say(LONG)
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3}).json()
    assert chat_told(answer) == ("length", 3)
    assert "clamped_max_tokens" not in answer["emberkeep"]


def test_services_elsewhere_are_asked_for_no_more() -> None:
    provider = ScriptedProvider(lambda request: said("Yes."))
    backend = remote(provider, most_tokens=MOST, max_tokens=100)
    asked = Request(messages=(Message("user", "Hello"),))
    for limit in (None, 100, 3):
        *_, completed = read_events(backend, Request(messages=asked.messages, max_tokens=limit))
        assert isinstance(completed, Completed)
        assert completed.fit.clamped_to == (None if limit == 3 else MOST)
    assert [request.max_tokens for request in provider.asked] == [MOST, MOST, 3]
