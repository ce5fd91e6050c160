"""`emberkeep serve` with two models and memory for one: they take turns, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.cli.main import app
from emberkeep.config.settings import Config
from emberkeep.types.request import Json
from helpers.commands import Commands
from helpers.server_process import ServerProcess, serve
from helpers.several_models import install, with_memory_for_one

pytestmark = pytest.mark.slow

PROMPT = "ships wait at the pier until the tide comes in, and pay with coins. " * 6
SETTINGS = ("--ctx", "1024", "--parallel", "1")


def start(data_dir: Path, memory: int) -> ServerProcess:
    return serve("first", data_dir, *SETTINGS, "--models", "all", "--model-memory", str(memory))


def reused(server: ServerProcess, model: str) -> int:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    answer: Json = server.http.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["model"] == model
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def loaded(server: ServerProcess) -> list[str]:
    listed = server.http.get(f"{server.url}/v1/models").json()["data"]
    return [model["id"] for model in listed if model["status"]["value"] == "loaded"]


def test_two_models_take_turns_and_go_on_from_what_they_stored_after_a_restart_too(tmp_path: Path) -> None:
    install(tmp_path, "first", "second")
    memory = with_memory_for_one(Config(data_dir=tmp_path, ctx=1024, parallel=1)).model_memory or 0
    with start(tmp_path, memory) as server:
        assert [reused(server, name) for name in ("first", "second")] == [0, 0]
        for name in ("first", "second", "first"):
            assert reused(server, name) > 256
            assert loaded(server) == [name]
        server.stop()
    commands, where = Commands(app), ("--data-dir", str(tmp_path))
    with start(tmp_path, memory) as server:
        for name in ("second", "first"):
            assert reused(server, name) > 256
        assert "first" in commands.ok("ps", *where)
        assert "finishes what runs, and ends" in commands.ok("stop", *where)
        assert server.exit_code() == 0
