"""Ollama's client manages the models of `emberkeep serve`: loaded and unloaded, copied, pulled, deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from helpers.gguf_builders import tiny_llama
from helpers.model_file_server import ServedRepo, serving_repo
from helpers.server_process import serve
from helpers.several_models import install

pytestmark = pytest.mark.slow

ASK = {"raw": True, "options": {"num_predict": 2, "temperature": 0}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    weights = tiny_llama(tmp_path / "remote.gguf", seed=3).read_bytes()
    with serving_repo(ServedRepo("owner/small-GGUF", {"small-Q4_K_M.gguf": weights})) as repo:
        monkeypatch.setitem(os.environ, "HF_ENDPOINT", repo.url)
        yield repo


def names(listed: ollama.ListResponse | ollama.ProcessResponse) -> list[str]:
    return sorted((model.model or "").removesuffix(":latest") for model in listed.models)


def test_models_come_and_go_while_the_server_runs(tmp_path: Path, hub: ServedRepo) -> None:
    data = tmp_path / "data"
    install(data, "first", "second")
    with serve("first", data, "--models", "all", "--ctx", "256", "--parallel", "1") as server:
        client = ollama.Client(server.url)
        assert (names(client.list()), names(client.ps())) == (["first", "second"], ["first"])

        assert client.generate("second").done_reason == "load"
        assert names(client.ps()) == ["first", "second"]
        assert client.generate("second:latest", "hello", **ASK).eval_count == 2
        assert client.generate("second", keep_alive=0).done_reason == "unload"
        assert names(client.ps()) == ["first"]

        client.copy("second", "third:v1")
        assert client.generate("third:v1", "hello", keep_alive="10m", **ASK).eval_count == 2
        (kept,) = (model for model in client.ps().models if model.model == "third-v1:latest")
        assert kept.expires_at is not None

        assert [part.status for part in client.pull("hf.co/owner/small-GGUF", stream=True)][-1] == "success"
        client.delete("third:v1")
        assert names(client.list()) == ["first", "second", "small-q4_k_m"]
        assert "third-v1" not in names(client.ps())
        with pytest.raises(ollama.ResponseError, match="model 'third:v1' not found"):
            client.generate("third:v1", "hello", **ASK)
