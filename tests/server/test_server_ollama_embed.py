"""Embeddings through Ollama's two endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from helpers.on_demand_models import FakeEmbeddingEngine, embedding_backend, embedding_on_demand, unit
from helpers.waiting import eventually

MODEL = "tiny-embed"


@pytest.fixture(scope="module")
def engine() -> FakeEmbeddingEngine:
    return FakeEmbeddingEngine(dimension=8, context=32)


@pytest.fixture(scope="module")
def http(engine: FakeEmbeddingEngine) -> Iterator[httpx.Client]:
    app = create_app(Models(embedding_backend(engine)), Config())
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def raw(engine: FakeEmbeddingEngine, text: str) -> np.ndarray:
    return engine.vector(engine.framing.text(engine.vocab, text))


def test_each_input_has_its_vector(http: httpx.Client, engine: FakeEmbeddingEngine) -> None:
    answer = http.post("/api/embed", json={"model": MODEL, "input": ["cat", "dog"]}).json()
    for vector, text in zip(answer["embeddings"], ("cat", "dog"), strict=True):
        np.testing.assert_allclose(vector, unit(raw(engine, text)), rtol=1e-6)
    assert (answer["model"], answer["prompt_eval_count"]) == (MODEL, 10)
    assert answer["total_duration"] > 0


def test_fewer_dimensions_can_be_asked_for(http: httpx.Client) -> None:
    answer = http.post("/api/embed", json={"model": MODEL, "input": "cat", "dimensions": 4}).json()
    assert len(answer["embeddings"][0]) == 4


def test_a_long_text_is_cut_unless_it_must_not_be(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "x" * 100}
    assert http.post("/api/embed", json=body).status_code == 200
    refused = http.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400
    assert set(refused.json()) == {"error"}


def test_the_older_endpoint_gives_vectors_as_the_model_makes_them(
    http: httpx.Client, engine: FakeEmbeddingEngine
) -> None:
    answer = http.post("/api/embeddings", json={"model": MODEL, "prompt": "cat"}).json()
    np.testing.assert_allclose(answer["embedding"], raw(engine, "cat"), rtol=1e-6)


def test_a_model_that_is_to_be_unloaded_at_once_embeds_before() -> None:
    model = embedding_on_demand(FakeEmbeddingEngine, keep_alive_s=300)
    with TestClient(create_app(Models(model), Config()), base_url="http://127.0.0.1") as client:
        for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            answer = client.post(path, json={"model": MODEL, field: "cat", "keep_alive": 0})
            assert answer.status_code == 200, answer.text
            assert eventually(lambda: not model.is_loaded)


def test_a_model_that_embeds_says_so(http: httpx.Client) -> None:
    assert http.post("/api/show", json={"model": MODEL}).json()["capabilities"] == ["embedding"]


def test_a_model_that_only_embeds_does_not_chat(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/api/chat", json=asked)
    assert answer.status_code == 400
    assert isinstance(answer.json()["error"], str)
