"""Embedding and reranking models behind `emberkeep serve`, asked by the official OpenAI client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from helpers import tiny_bert
from helpers.server_process import ServerProcess, serve

pytestmark = pytest.mark.slow

TEXTS = ["The cat sat on the mats.", "sitting 42!", "the mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.bert_folder(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module", params=["llamacpp", "hf"])
def model(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder if request.param == "hf" else tiny_bert.bert_gguf(folder.with_suffix(".gguf"), folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(model: Path, data: Path) -> Iterator[ServerProcess]:
    with serve(model, data) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def sentence_vector(folder: Path, text: str) -> np.ndarray:
    """As sentence-transformers computes it."""
    network, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return np.asarray(states / states.norm())


def test_vectors_are_those_of_the_model(client: openai.OpenAI, folder: Path) -> None:
    found = client.embeddings.create(model="tiny-bert", input=TEXTS)
    for each, text in zip(found.data, TEXTS, strict=True):
        assert np.dot(each.embedding, sentence_vector(folder, text)) > 0.9999
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)


def test_what_was_computed_is_known_after_a_restart(model: Path, data: Path, server: ServerProcess) -> None:
    body = {"input": "known after a restart"}
    first = server.http.post(f"{server.url}/v1/embeddings", json=body).json()
    server.stop()
    with serve(model, data) as restarted:
        again = restarted.http.post(f"{restarted.url}/v1/embeddings", json=body).json()
        restarted.stop()
    assert again["data"] == first["data"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": again["usage"]["prompt_tokens"]}


def test_a_cross_encoder_ranks(tmp_path: Path) -> None:
    folder = tiny_bert.bert_folder(tmp_path / "tiny-rank", pooling=tiny_bert.RANK)
    path = tiny_bert.bert_gguf(tmp_path / "tiny-rank.gguf", folder, pooling=tiny_bert.RANK)
    body = {"query": "the cat", "documents": TEXTS, "top_n": 2}
    with serve(path, tmp_path / "data") as server:
        answer = server.http.post(f"{server.url}/v1/rerank", json=body).json()
        server.stop()
    scores = [each["relevance_score"] for each in answer["results"]]
    assert len(scores) == 2
    assert 1 > scores[0] >= scores[1] > 0


def test_a_chat_models_own_states_are_given_where_they_are_asked_for(smollm2: Path, tmp_path: Path) -> None:
    with serve(smollm2, tmp_path, "--pooling", "mean") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            texts = ["A cat sat on the mat.", "A kitten lies on the rug.", "Inflation rose by two percent in May."]
            data = client.embeddings.create(model="default", input=texts).data
            cat, kitten, money = (each.embedding for each in data)
            messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
            answer = client.chat.completions.create(model="default", messages=messages, max_tokens=4)
        server.stop()
    assert np.dot(cat, kitten) > np.dot(cat, money)
    assert answer.choices[0].message.content
