"""Models, health, stats, llama.cpp's endpoints, the OpenAPI document, unknown routes."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from emberkeep import __version__
from helpers.scripted_server import ScriptedBackend


def test_models_are_listed(backend: ScriptedBackend, client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    entry = http.get("/v1/models").json()["data"][0]
    assert entry.pop("status")["value"] == "loaded"
    assert entry == {
        "id": "org/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "emberkeep",
        "context_length": 4096,
        "max_model_len": 4096,
        "details": {"quantization": "Q4_1"},
        "aliases": [],
    }


def test_a_model_is_found_by_a_name_with_a_slash(
    backend: ScriptedBackend, client: openai.OpenAI, http: httpx.Client
) -> None:
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    told = http.get("/v1/models/org/tiny").json()
    assert (told["id"], told["max_model_len"]) == ("org/tiny", 4096)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_health_and_stats(backend: ScriptedBackend, http: httpx.Client) -> None:
    told = {"status": "ok", "backend": "scripted", "model": "org/tiny", "backend_connected": True}
    assert http.get("/health").json() == told
    assert http.get("/v1/stats").json() == {"requests": 0}


def test_tokenize_and_back(backend: ScriptedBackend, http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"content": "ab"}).json() == {"tokens": [97, 98]}
    with_bos = http.post("/tokenize", json={"content": "a", "add_special": True}).json()
    assert with_bos == {"tokens": [1, 97]}
    nulls = {"content": "a", "add_special": None, "parse_special": None, "with_pieces": None}
    assert http.post("/tokenize", json=nulls).json() == {"tokens": [97]}
    pieces = http.post("/tokenize", json={"content": "a", "with_pieces": True}).json()
    assert pieces == {"tokens": [{"id": 97, "piece": "a"}]}
    cut = http.post("/tokenize", json={"content": "\u00e9", "with_pieces": True}).json()
    assert cut == {"tokens": [{"id": 233, "piece": [233]}]}
    assert http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"content": "ab"}


def test_a_number_in_a_query_is_a_text_and_the_last_one_counts(http: httpx.Client) -> None:
    assert http.get("/v1/requests?limit=x&limit=7&offset=0").json()["data"] == []


def test_apply_template(backend: ScriptedBackend, http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "t"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert http.post("/apply-template", json=body).json() == {"prompt": "t\nuser: hi"}
    told = http.post("/apply-template", json={**body, "chat_template_kwargs": {"ends": True}}).json()
    assert told == {"prompt": "t\nuser: hi\nassistant:"}
    bare = {**body, "chat_template_kwargs": {"ends": True}, "add_generation_prompt": False}
    assert http.post("/apply-template", json=bare).json() == {"prompt": "t\nuser: hi"}


def test_the_openapi_document_describes_every_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "ChatBody" in document["components"]["schemas"]
    assert "/v1/chat/completions" in document["paths"]
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= set(document["components"]["schemas"])
    assert {"ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "TemplateBody"} <= used


def test_an_unknown_path_has_the_error_shape_and_the_way_out(http: httpx.Client) -> None:
    for path in ("/nowhere", "/docs"):
        response = http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert path in response.json()["error"]["message"]
        assert "/openapi.json" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/benchmarks", "/v1/benchmarks/20261119T000000-load"])
def test_a_path_that_was_removed_says_what_to_use_instead(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 410
    assert "emberkeep bench NAME --json FILE" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/health", "GET, HEAD"),
        ("PUT", "/v1/cache", "DELETE, GET, HEAD"),
        ("POST", "/v1/memory/facts/x", "DELETE, GET, HEAD, PUT"),
        ("POST", "/v1/cache/0123456789ab", "DELETE, GET, HEAD"),
        ("GET", "/v1/cache/pin", "POST"),
        ("DELETE", "/v1/cache/gc", "POST"),
    ],
)
def test_another_method_is_told_which_one_works(http: httpx.Client, method: str, path: str, allowed: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == f"{method} does not work on {path}: use {allowed}."


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/tiny", "/v1/stats", "/health"])
def test_a_slash_at_the_end_makes_no_difference(backend: ScriptedBackend, http: httpx.Client, path: str) -> None:
    assert http.get(f"{path}/").json() == http.get(path).json()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/v1/chat/completions/", json=body).status_code == 200


def test_the_root_tells_what_this_is_and_where_to_go(http: httpx.Client) -> None:
    pointer = http.get("/").json()
    assert (pointer["name"], pointer["version"]) == ("Emberkeep", __version__)
    assert http.get(pointer["docs"]).json()["paths"]
    assert http.get(f"{pointer['api']}/models").status_code == 200
