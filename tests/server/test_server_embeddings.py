"""Embeddings over HTTP: OpenAI's shape, llama-server's, and ranks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
import numpy as np
import openai
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.embedding import TokenInput
from emberkeep.server.app import create_app
from emberkeep.server.routes import embeddings as embedding_routes
from emberkeep.types.request import Json, Pooling
from helpers.on_demand_models import FakeEmbeddingEngine, embedding_backend, embedding_on_demand, unit
from helpers.scripted_server import ScriptedBackend

T = TypeVar("T")

WIDTH = 8


@pytest.fixture(scope="module")
def engine() -> FakeEmbeddingEngine:
    return FakeEmbeddingEngine(dimension=WIDTH, context=32)


@pytest.fixture(scope="module")
def ranker() -> FakeEmbeddingEngine:
    return FakeEmbeddingEngine(pooling=Pooling.RANK, context=64)


@pytest.fixture(scope="module")
def http(engine: FakeEmbeddingEngine, ranker: FakeEmbeddingEngine) -> Iterator[httpx.Client]:
    models = Models(embedding_backend(engine), [embedding_backend(ranker, "tiny-rank"), ScriptedBackend()])
    with TestClient(create_app(models, Config()), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http, max_retries=0)


def expected(engine: FakeEmbeddingEngine, text: str) -> np.ndarray:
    return unit(engine.vector(engine.framing.text(engine.vocab, text)))


# ── OpenAI's ──


def test_the_answer_has_openais_shape(http: httpx.Client, engine: FakeEmbeddingEngine) -> None:
    answer = http.post("/v1/embeddings", json={"model": "tiny-embed", "input": "shape"}).json()
    vector = answer["data"][0].pop("embedding")
    np.testing.assert_allclose(vector, expected(engine, "shape"), rtol=1e-6)
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "tiny-embed",
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}},
    }


def test_openais_own_client_reads_it_in_base64(client: openai.OpenAI, engine: FakeEmbeddingEngine) -> None:
    found = client.embeddings.create(model="tiny-embed", input=["cat", "dog"])
    assert [each.index for each in found.data] == [0, 1]
    for each, text in zip(found.data, ("cat", "dog"), strict=True):
        np.testing.assert_allclose(each.embedding, expected(engine, text), rtol=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 10


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["a", [5]], [(256, 97, 257), (5,)]),
    ],
)
def test_inputs_may_be_token_ids_and_lists_of_them(
    http: httpx.Client, engine: FakeEmbeddingEngine, given: Json, ids: list[tuple[int, ...]]
) -> None:
    answer = http.post("/v1/embeddings", json={"input": given}).json()
    vectors = [each["embedding"] for each in answer["data"]]
    np.testing.assert_allclose(vectors, [unit(engine.vector(TokenInput(each))) for each in ids], rtol=1e-5)


def test_a_text_that_was_seen_is_not_computed_again(http: httpx.Client, engine: FakeEmbeddingEngine) -> None:
    first = http.post("/v1/embeddings", json={"input": "seen before"}).json()
    steps = len(engine.steps)
    again = http.post("/v1/embeddings", json={"input": "seen before"}).json()
    assert again["data"] == first["data"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 13}
    other = http.post("/v1/embeddings", json={"input": "seen before", "user": "ann"}).json()
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len(engine.steps) == steps + 1


def test_fewer_dimensions(client: openai.OpenAI, engine: FakeEmbeddingEngine) -> None:
    (found,) = client.embeddings.create(model="tiny-embed", input="cat", dimensions=3).data
    whole = engine.vector(engine.framing.text(engine.vocab, "cat"))
    np.testing.assert_allclose(found.embedding, unit(whole[:3]), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input: is required"),
        ({"input": ""}, "input: a text is not empty"),
        ({"input": []}, "input: give a string, a list of strings, a list of token ids or a list of such lists"),
        ({"input": ["a", ""]}, "input: a text is not empty"),
        ({"input": [[]]}, "input: each of them is a string or a list of token ids that is not empty"),
        ({"input": [1, -1]}, "input: a token id is a whole number that is not negative"),
        ({"input": ["a"] * 2049}, "input: give at most 2048 of them in one request"),
        ({"input": [300]}, "input[0]: 300 is no token of tiny-embed, which has 258"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format: give 'float' or 'base64'"),
        ({"input": "a", "dimensions": 0}, "dimensions: give 1 or more"),
        ({"input": "a", "dimensions": 9}, "dimensions: tiny-embed has 8: give 8 or fewer"),
    ],
)
def test_what_cannot_be_embedded_is_refused(http: httpx.Client, body: dict[str, Json], said: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_a_text_that_is_too_long_is_refused_or_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 32 tokens") as caught:
        client.embeddings.create(model="tiny-embed", input="x" * 100)
    assert caught.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model="tiny-embed", input="x" * 100, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 32


def test_a_chat_model_says_how_to_get_one_that_embeds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="org/tiny gives no embeddings: name a model that does"):
        client.embeddings.create(model="org/tiny", input="cat")


def test_an_embedding_model_writes_no_answers(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"tiny-embed gives embeddings \(/v1/embeddings\) and writes no"
    ):
        client.chat.completions.create(model="tiny-embed", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match=r"tiny-rank ranks documents \(/v1/rerank\) and writes no"):
        client.completions.create(model="tiny-rank", prompt="Once", stream=True)


def test_everything_else_that_is_asked_of_it_has_an_answer(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/v1/stats").json()["embeddings"]["inputs"] >= 0
    assert http.get("/metrics").status_code == 200
    assert http.post("/tokenize", json={"content": "a", "add_special": True}).json() == {"tokens": [256, 97, 257]}
    assert http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"content": "ab"}
    assert http.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert http.post("/apply-template", json={"messages": []}).status_code == 400
    assert http.get("/v1/cache").status_code == 200
    warmed = http.post("/v1/warm", json={"text": "Hello"}).json()
    assert warmed["error"] == "tiny-embed writes no answers: its prompts cannot be warmed from here."


# ── llama-server's ──


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("field", ["content", "input"])
def test_llama_servers_shape(http: httpx.Client, engine: FakeEmbeddingEngine, path: str, field: str) -> None:
    answer = http.post(path, json={field: ["cat", "dog"]}).json()
    assert [each["index"] for each in answer] == [0, 1]
    np.testing.assert_allclose(answer[1]["embedding"], [expected(engine, "dog")], rtol=1e-6)


def test_its_ways_to_normalise(http: httpx.Client, engine: FakeEmbeddingEngine) -> None:
    plain = engine.vector(engine.framing.text(engine.vocab, "cat"))
    wanted = {
        -1: plain,
        0: plain / np.abs(plain).max() * 32760,
        1: plain / np.abs(plain).sum(),
        2: unit(plain),
        3: plain / (np.abs(plain) ** 3).sum() ** (1 / 3),
    }
    for norm, vector in wanted.items():
        answer = http.post("/embedding", json={"content": "cat", "embd_normalize": norm}).json()
        np.testing.assert_allclose(answer[0]["embedding"][0], vector, rtol=1e-5)


def test_without_content_it_is_refused(http: httpx.Client) -> None:
    answer = http.post("/embedding", json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "content: is required.")


# ── ranks ──

DOCUMENTS = ["a cat", "a dog", "a cow"]


def logits(ranker: FakeEmbeddingEngine) -> list[float]:
    pairs = (ranker.framing.pair(ranker.vocab, "cat?", document) for document in DOCUMENTS)
    return [float(ranker.vector(pair)[0]) for pair in pairs]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"])
def test_the_best_document_comes_first(http: httpx.Client, ranker: FakeEmbeddingEngine, path: str) -> None:
    answer = http.post(path, json={"model": "tiny-rank", "query": "cat?", "documents": DOCUMENTS}).json()
    scores = [1 / (1 + math.exp(-logit)) for logit in logits(ranker)]
    best = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == best
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([scores[i] for i in best])
    assert all(set(each) == {"index", "relevance_score"} for each in answer["results"])
    assert (answer["object"], answer["model"]) == ("list", "tiny-rank")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 36


def test_so_many_of_them_and_with_their_texts(http: httpx.Client) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    body = {
        "model": "tiny-rank",
        "query": "cat?",
        "documents": documents,
        "top_n": 2,
        "return_documents": True,
    }
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert len(results) == 2
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in results)


def test_raw_scores_are_the_models_own(http: httpx.Client, ranker: FakeEmbeddingEngine) -> None:
    body = {"model": "tiny-rank", "query": "cat?", "documents": DOCUMENTS, "raw_scores": True}
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(logits(ranker), reverse=True))


def test_texts_are_answered_in_the_shape_of_the_server_that_has_them(http: httpx.Client) -> None:
    body = {"model": "tiny-rank", "query": "cat?", "texts": DOCUMENTS, "return_text": True}
    ranks = http.post("/rerank", json=body).json()
    assert len(ranks) == 3
    assert all(set(each) == {"index", "score", "text"} for each in ranks)


def test_the_texts_that_are_shown_are_those_that_were_ranked(http: httpx.Client) -> None:
    body = {"model": "tiny-rank", "query": "cat?", "texts": ["no"], "documents": DOCUMENTS, "return_text": True}
    ranks = http.post("/rerank", json=body).json()
    assert [each["text"] for each in ranks] == [DOCUMENTS[each["index"]] for each in ranks]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"documents": ["a"]}, "query: is required"),
        ({"query": "a"}, "documents: is required"),
        ({"query": "a", "documents": []}, "documents: give 1 or more entries"),
        ({"query": "a", "documents": [5]}, "documents[0]: give a text"),
        ({"query": "a", "documents": [{}]}, "documents[0]: give a text"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n: give 1 or more"),
        ({"query": "a", "documents": ["b" * 99], "truncate": False}, "documents[0] has 103 tokens"),
    ],
)
def test_what_cannot_be_ranked_is_refused(http: httpx.Client, body: dict[str, Json], said: str) -> None:
    answer = http.post("/v1/rerank", json={"model": "tiny-rank", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_a_model_that_embeds_does_not_rank_and_the_other_way_round(http: httpx.Client) -> None:
    ranks = http.post("/v1/rerank", json={"model": "tiny-embed", "query": "a", "documents": ["b"]})
    assert ranks.json()["error"]["message"].startswith("tiny-embed does not rank documents")
    vectors = http.post("/v1/embeddings", json={"model": "tiny-rank", "input": "a"})
    assert vectors.json()["error"]["message"].startswith("tiny-rank gives no embeddings")


# ── models that are loaded for it ──


@pytest.mark.parametrize(
    ("path", "pooling", "body"),
    [
        ("/v1/embeddings", Pooling.MEAN, {"input": "cat"}),
        ("/v1/rerank", Pooling.RANK, {"query": "cat", "documents": ["dog"]}),
    ],
)
def test_a_model_that_never_stays_loaded_answers_all_the_same(
    path: str, pooling: Pooling, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make_slowly(http: Request, make: Callable[[], T]) -> T:
        """As of a long body: time in which a model could leave."""
        await asyncio.sleep(0.02)
        return make()

    monkeypatch.setattr(embedding_routes, "make_of_body", make_slowly)
    model = embedding_on_demand(lambda: FakeEmbeddingEngine(pooling=pooling), keep_alive_s=0)
    with TestClient(create_app(Models(model), Config()), base_url="http://127.0.0.1") as client:
        answer = client.post(path, json={"model": "tiny-embed", **body})
        assert answer.status_code == 200, answer.text
