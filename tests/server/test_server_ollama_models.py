"""Ollama's endpoints about models, with a library of their own, through Ollama's SDK."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.config.settings import Config
from emberkeep.models.library import ModelLibrary, ModelRecord
from helpers.gguf_builders import tiny_llama
from helpers.model_file_server import ServedRepo, serving_repo
from helpers.scripted_server import ScriptedBackend, running
from helpers.tiny_gguf import dense
from helpers.waiting import PATIENCE_S

RECORD = ModelRecord("hf:owner/tiny-GGUF:F32", "ab" * 32, 4096, "F32", 1_700_000_000)


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    library = ModelLibrary(tmp_path / "data" / "models")
    library.install("tiny-f32", tiny_llama(library.workspace("x") / "w.gguf"), RECORD)
    return library


@pytest.fixture
def url(library: ModelLibrary) -> Iterator[str]:
    backend = ScriptedBackend()
    details = {"architecture": "llama", "layers": 4, "gpu_layers": 2, "weights_sha256": "cd" * 32}
    backend.card = ModelCard("tiny-f32", 1_700_000_000, 512, details=details)
    with running(backend, Config(data_dir=library.root.parent)) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(url)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    weights = tiny_llama(tmp_path / "remote.gguf", seed=3).read_bytes()
    with serving_repo(ServedRepo("owner/small-GGUF", {"small-Q4_K_M.gguf": weights})) as repo:
        monkeypatch.setenv("HF_ENDPOINT", repo.url)
        yield repo


# ── what there is ──


def test_tags_tell_of_each_model_what_it_is(client: ollama.Client) -> None:
    (tag,) = client.list().models
    assert tag.model == "tiny-f32:latest"
    assert (tag.size, tag.digest) == (4096, "cd" * 32)
    assert tag.modified_at is not None and int(tag.modified_at.timestamp()) == RECORD.pulled_at
    assert tag.details is not None
    assert tag.details.model_dump() == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": tag.details.parameter_size,
        "quantization_level": "F32",
    }
    assert tag.details.parameter_size and tag.details.parameter_size[-1] in "KMB"


def test_a_loaded_model_tells_its_context_and_where_it_lies(client: ollama.Client) -> None:
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length, loaded.size, loaded.size_vram) == (
        "tiny-f32:latest",
        512,
        4096,
        2048,
    )
    assert loaded.expires_at is not None


def test_show_tells_the_metadata_of_the_file(client: ollama.Client) -> None:
    shown = client.show("tiny-f32")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] > 0
    assert shown.modelinfo["general.parameter_count"] > 0
    assert "tokenizer.chat_template" not in shown.modelinfo
    assert shown.parameters == "num_ctx 512"
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelfile is not None and shown.modelfile.startswith("FROM hf:owner/tiny-GGUF:F32\n")


@pytest.mark.parametrize("name", ["tiny-f32:latest", "tiny:f32", "hf.co/owner/tiny-GGUF:F32"])
def test_a_model_is_found_by_what_users_of_ollama_call_it(client: ollama.Client, name: str) -> None:
    assert client.show(name).details is not None
    assert client.chat(name, [{"role": "user", "content": "hi"}]).model == name


def test_what_is_known_only_by_its_card_is_told_too(library: ModelLibrary) -> None:
    library.remove("tiny-f32")
    with running(ScriptedBackend(), Config(data_dir=library.root.parent)) as server:
        client = ollama.Client(server.url)
        (tag,) = client.list().models
        assert (tag.model, tag.size) == ("org/tiny:latest", 0)
        shown = client.show("org/tiny")
        assert shown.modelinfo == {"general.architecture": "unknown", "unknown.context_length": 4096}


# ── removing and copying ──


def test_a_model_is_deleted(client: ollama.Client, library: ModelLibrary) -> None:
    assert client.delete("tiny-f32").status == "success"
    assert not library.list()
    with pytest.raises(ollama.ResponseError, match="model 'tiny-f32' not found"):
        client.delete("tiny-f32")


def test_a_copy_shares_its_bytes(client: ollama.Client, library: ModelLibrary) -> None:
    assert client.copy("tiny-f32", "mine:v2").status == "success"
    original, copied = library.get("tiny-f32"), library.get("mine-v2")
    assert copied.path.samefile(original.path)
    assert copied.record == original.record


def test_a_copy_needs_a_source_and_a_usable_name(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'none' not found"):
        client.copy("none", "mine")
    with pytest.raises(ollama.ResponseError, match="destination: use lower-case letters") as caught:
        client.copy("tiny-f32", "user/mine")
    assert caught.value.status_code == 400


# ── pulling ──


def test_a_pull_tells_its_progress_line_by_line(
    client: ollama.Client, hub: ServedRepo, library: ModelLibrary
) -> None:
    told = list(client.pull("hf.co/owner/small-GGUF:Q4_K_M", stream=True))
    statuses = [line.status for line in told]
    assert (statuses[0], statuses[-2:]) == ("pulling manifest", ["writing manifest", "success"])
    size = len(hub.files["small-Q4_K_M.gguf"])
    done = [line for line in told if line.completed == size]
    assert done and all(line.total == size and (line.digest or "").startswith("sha256:") for line in done)
    assert "verifying sha256 digest" in statuses
    assert library.get("small-q4_k_m").path.stat().st_size == size


def test_a_pull_without_a_stream_ends_with_success(client: ollama.Client, hub: ServedRepo) -> None:
    assert client.pull("hf.co/owner/small-GGUF").status == "success"  # Q4_K_M is what Ollama takes
    assert hub.downloads == ["small-Q4_K_M.gguf"]


def test_a_pull_ends_when_its_client_leaves(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def fetch_for_ever(spec: str, library: ModelLibrary, reporter: Any) -> None:
        begun.set()
        try:
            while True:
                reporter.progress("Fetching", 1, 2)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr("emberkeep.server.routes.ollama_models._fetch", fetch_for_ever)
    address = httpx.URL(url)
    body = json.dumps({"model": "hf.co/owner/small-GGUF", "stream": False}).encode()
    with socket.create_connection((address.host, address.port or 0)) as client:
        head = f"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert begun.wait(PATIENCE_S)
    assert ended.wait(PATIENCE_S)


def test_what_is_here_is_not_pulled_again(client: ollama.Client) -> None:
    assert [line.status for line in client.pull("tiny-f32", stream=True)] == ["pulling manifest", "success"]


def test_a_pull_that_fails_says_so_in_its_last_line(url: str, hub: ServedRepo) -> None:
    body = {"model": "hf.co/owner/small-GGUF:Q8_0"}
    lines = [json.loads(line) for line in httpx.post(f"{url}/api/pull", json=body).text.splitlines()]
    assert lines[-1]["error"].startswith("There is no Q8_0 in hf:owner/small-GGUF")
    whole = httpx.post(f"{url}/api/pull", json={**body, "stream": False})
    assert (whole.status_code, "There is no Q8_0" in whole.json()["error"]) == (500, True)


@pytest.mark.parametrize("name", ["llama3.2", "/etc/passwd", "http://127.0.0.1/secret.gguf", "../x.gguf"])
def test_clients_cannot_have_files_and_addresses_fetched(url: str, name: str) -> None:
    answer = httpx.post(f"{url}/api/pull", json={"name": name})
    assert answer.status_code == 404
    assert answer.json()["error"].startswith(f"model '{name}' not found: pull smollm2-135m or hf.co/")


def test_a_name_is_needed(url: str) -> None:
    assert httpx.post(f"{url}/api/pull", json={}).json() == {"error": "model: is required."}


def test_show_tells_whether_the_model_thinks(library: ModelLibrary) -> None:
    weights = dense(library.workspace("y") / "w.gguf", template="{% if enable_thinking %}{% endif %}")
    library.install("tiny-f32", weights, replace(RECORD, pulled_at=1))
    backend = ScriptedBackend()
    backend.card = ModelCard("tiny-f32", 0, 512)
    with running(backend, Config(data_dir=library.root.parent)) as server:
        assert ollama.Client(server.url).show("tiny-f32").capabilities == ["completion", "tools", "thinking"]
