"""Several models behind one address: listed with their state, loaded, unloaded, measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from emberkeep.cli.main import app
from emberkeep.config.kinds import Alias
from emberkeep.config.settings import Config
from emberkeep.runtime.served_models import open_models
from emberkeep.types.request import Json
from helpers.commands import Commands
from helpers.scripted_server import ScriptedBackend, running
from helpers.several_models import install, load_fake_engines, serving, with_memory_for_one

LONG = "The tides, the winds and the harbours of this coast. " * 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data_dir = tmp_path_factory.mktemp("data")
    install(data_dir, "first", "second")
    aliases = (Alias("gpt-4o", "second"),)
    return with_memory_for_one(Config(data_dir=data_dir, model="first", models=("all",), aliases=aliases))


@pytest.fixture(scope="module")
def client(config: Config) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        load_fake_engines(patch)
        with serving(config, open_models(config)) as client:
            yield client


def ask(client: httpx.Client, model: str, **more: Json) -> httpx.Response:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": LONG}], **more}
    return client.post("/v1/chat/completions", json=body)


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in client.get("/v1/models").json()["data"]}


def test_a_request_loads_its_model_and_comes_back_to_what_was_stored(client: httpx.Client) -> None:
    client.post("/models/load", json={"model": "first"})
    assert states(client) == {"first": "loaded", "second": "unloaded"}
    answered = ask(client, "gpt-4o").json()
    assert answered["model"] == "second"
    assert states(client) == {"first": "unloaded", "second": "loaded"}
    ask(client, "first")
    again = ask(client, "second:latest").json()
    # A fake engine may evaluate sooner than anything is loaded.
    cached, reason = again["usage"]["prompt_tokens_details"]["cached_tokens"], again["emberkeep"]["reason"]
    assert cached >= 128 or reason == "cheaper_to_recompute"


def test_the_official_client_streams_from_a_model_that_is_not_loaded(client: httpx.Client) -> None:
    client.post("/models/load", json={"model": "first"})
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        chunks = sdk.chat.completions.create(
            model="second", stream=True, max_tokens=4, messages=[{"role": "user", "content": LONG}]
        )
        assert {chunk.model for chunk in chunks} == {"second"}
        assert [model.id for model in sdk.models.list()] == ["first", "second"]


def test_a_model_tells_its_state_as_llama_servers_router_does(client: httpx.Client) -> None:
    ollama.Client(host=str(client.base_url)).generate("second", keep_alive=300)
    told = client.get("/models/gpt-4o").json()
    assert told["aliases"] == ["gpt-4o"]
    assert told["status"] | {"idle_s": 0, "expires_s": 0, "memory_bytes": 0} == {
        "value": "loaded",
        "failed": False,
        "error": None,
        "memory_bytes": 0,
        "running": 0,
        "waiting": 0,
        "idle_s": 0,
        "expires_s": 0,
        "pinned": False,
        "local": True,
    }
    assert told["status"]["memory_bytes"] > 0
    assert 0 < told["status"]["expires_s"] <= 300


def test_models_are_loaded_and_unloaded(client: httpx.Client) -> None:
    for action, state in (("load", "loaded"), ("unload", "unloaded"), ("unload", "unloaded")):
        answer = client.post(f"/models/{action}", json={"model": "second"})
        assert answer.status_code == 200
        assert answer.json()["success"] is True
        assert answer.json()["model"]["status"]["value"] == state
    assert client.get("/health").json()["status"] == "ok"
    refused = client.post("/models/load", json={"model": "third"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_every_api_lists_the_names_where_one_is_not_served(client: httpx.Client, path: str, body: Json) -> None:
    refused = client.post(path, json={"model": "claude-sonnet", **body})
    assert refused.status_code == 404
    assert "use one of 'first', 'second', 'gpt-4o'" in refused.text


def test_an_unloaded_model_is_loaded_to_tokenize_or_to_show_its_cache(client: httpx.Client) -> None:
    client.post("/models/load", json={"model": "first"})
    tokens = client.post("/tokenize", json={"model": "second", "content": "hi"}).json()["tokens"]
    assert client.post("/detokenize", json={"model": "second", "tokens": tokens}).json()["content"] == "hi"
    assert states(client)["second"] == "loaded"
    ask(client, "first")
    assert client.get("/v1/cache", params={"model": "first"}).json()["data"]
    assert client.get("/v1/cache", params={"model": "third"}).status_code == 404


def test_figures_are_told_of_loaded_models_by_name(client: httpx.Client) -> None:
    ask(client, "second")
    assert client.get("/v1/stats", params={"model": "second"}).json()["scheduler"]["prompt_tokens"] > 0
    assert client.get("/v1/stats", params={"model": "first"}).json() == {"model": "first", "state": "unloaded"}
    told = client.get("/metrics").text
    assert 'emberkeep_generated_tokens_total{model="second"}' in told
    assert '_total{model="first"' not in told
    assert states(client)["first"] == "unloaded"


def test_commands_show_and_unload_what_a_server_has_loaded(client: httpx.Client, config: Config) -> None:
    ask(client, "second")
    commands, where = Commands(app), ("--data-dir", str(config.data_dir))
    shown = commands.ok("ps", *where)
    assert "second, gpt-4o" in shown
    assert "first" not in shown
    assert "first" in commands.ok("ps", "--all", *where)
    (listed,) = json.loads(commands.ok("ps", "--json", *where))
    assert listed["id"] == "second"
    assert commands.ok("stop", "second", *where) == "second is unloaded.\n"
    assert states(client)["second"] == "unloaded"
    assert "No model is loaded" in commands.ok("ps", *where)


def test_commands_need_a_server(tmp_path: Path) -> None:
    commands = Commands(app)
    for command in (("ps",), ("stop",), ("stop", "small")):
        assert "No server runs on this data folder" in commands.refused(*command, "--data-dir", str(tmp_path))


def test_a_model_that_cannot_be_loaded_is_told_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    install(tmp_path, "first", "second")
    config = Config(data_dir=tmp_path, model="first", models=("all",))
    with serving(config, open_models(replace(config))) as client:
        (tmp_path / "models" / "second" / "second.gguf").write_bytes(b"nonsense")
        refused = ask(client, "second")
        assert refused.status_code == 500
        assert "second.gguf" in refused.json()["error"]["message"]
        assert states(client) == {"first": "loaded", "second": "failed"}


def test_ollamas_clients_load_and_unload_models_and_see_when_they_expire(client: httpx.Client) -> None:
    sdk = ollama.Client(str(client.base_url))
    assert sdk.generate("second", keep_alive=3600).done_reason == "load"
    (listed,) = sdk.ps().models
    assert (listed.name, {model.model for model in sdk.list().models}) == (
        "second:latest",
        {"first:latest", "second:latest"},
    )
    left = client.get("/v1/models/second").json()["status"]["expires_s"]
    assert 3500 < left <= 3600
    assert sdk.generate("second", keep_alive=0).done_reason == "unload"
    assert not sdk.ps().models
    sdk.chat("gpt-4o", [{"role": "user", "content": LONG}], options={"num_predict": 2}, keep_alive=-1)
    assert client.get("/v1/models/second").json()["status"]["expires_s"] is None


def test_a_client_is_launched_with_a_model_that_was_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    install(tmp_path, "first", "second")
    config = Config(data_dir=tmp_path, model="first", models=("all",))
    with serving(config, open_models(config)) as client:
        shown = Commands(app).ok("launch", "claude", "-m", "second", "--print", "--data-dir", str(tmp_path))
        assert "second" in shown
        assert states(client)["second"] == "loaded"


def test_what_is_installed_is_told_whether_it_is_served_or_not(config: Config, client: httpx.Client) -> None:
    everything = client.get("/models/installed").json()
    assert [(one["id"], one["served"]) for one in everything["data"]] == [("first", True), ("second", True)]
    assert all(one["bytes"] > 0 and one["quantisation"] == "F32" for one in everything["data"])
    page = client.get("/models/installed", params={"limit": 1, "offset": 1}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["second"], False)
    with running(ScriptedBackend(), config) as alone:
        told = httpx.get(f"{alone.url}/models/installed").json()["data"]
        assert [one["served"] for one in told] == [False, False]
