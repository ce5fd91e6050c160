"""A start: what is said and imported before it, and a server that answers though its model is not there yet."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models
from emberkeep.cli.model_setup import ProgressLine
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ConfigError, EmberkeepError, EngineError, ModelBroken
from emberkeep.models.spec import Reporter, Silent
from emberkeep.runtime import served_models
from emberkeep.runtime.parts import ModelParts
from emberkeep.runtime.served_models import EarlyOpening, begin_models
from emberkeep.server.app import create_app
from emberkeep.server.http_server import warmup
from emberkeep.server.lifecycle import banner, bind, serve
from helpers.scripted_backend import fake_backend
from helpers.scripted_server import ScriptedBackend
from helpers.several_models import serving

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
WAIT_S = 60


class Gate:
    """A model that is half loaded until it may be whole."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.half, self.go_on = threading.Event(), threading.Event()
        self.error: EmberkeepError | None = None

    def prepare(self, reporter: Reporter) -> None:
        reporter.progress("Checking", 1, None)

    def open(self, config: Config, parts: ModelParts, report: Callable[[str, int, int], None]) -> Backend:
        report("Loading small", 1, 2)
        self.half.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return fake_backend(config, FakeEngine(), name="small", parts=parts)


@pytest.fixture(params=["alone", "with others"])
def gate(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    config = Config(data_dir=tmp_path, **({"model": "small"} if request.param == "alone" else {}))
    gate = Gate(config)
    monkeypatch.setattr(served_models, "open_backend", gate.open)
    yield gate
    gate.go_on.set()


def test_health_says_how_far_it_is_and_requests_wait(gate: Gate) -> None:
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models) as client, ThreadPoolExecutor(1) as pool:
        assert gate.half.wait(WAIT_S)
        told = client.get("/health")
        assert told.status_code == 503
        assert told.json()["status"] == "loading"
        assert told.json()["progress"] == 0.5
        assert told.json()["step"].startswith("Loading ")
        assert told.json()["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        answer = pool.submit(client.post, "/v1/chat/completions", json=HELLO)
        while not models.default.status.waiting:
            pass
        assert not answer.done()
        gate.go_on.set()
        assert answer.result(WAIT_S).json()["model"] == "small"
        assert client.get("/health").json()["status"] == "ok"
        assert models.starting is None


def test_what_is_done_is_said_from_the_first_moment(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    began = threading.Event()

    def open_slowly(config: Config, parts: object, report: object) -> Backend:
        began.set()
        assert gate.go_on.wait(WAIT_S)
        return fake_backend(config, FakeEngine(), name="small")

    monkeypatch.setattr(served_models, "open_backend", open_slowly)
    begin_models(gate.config, lambda _: None, ProgressLine(output, is_changing=False))
    assert began.wait(WAIT_S)
    assert output.getvalue().startswith("Loading ")


def test_a_stream_is_told_how_far_it_is(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.backend.on_demand._PROGRESS_S", 0.01)
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models) as client:
        assert gate.half.wait(WAIT_S)
        with client.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert "is being loaded, 50%" in next(line for line in lines if line)
            gate.go_on.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("error", [ModelBroken("it is broken"), EngineError("it does not fit")])
def test_a_model_that_cannot_be_loaded_is_the_failure_of_the_server(gate: Gate, error: EmberkeepError) -> None:
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models) as client, ThreadPoolExecutor(1) as pool:
        assert gate.half.wait(WAIT_S)
        answer = pool.submit(client.post, "/v1/chat/completions", json=HELLO)
        while not models.default.status.waiting:
            pass
        gate.error = error
        gate.go_on.set()
        assert str(error) in answer.result(WAIT_S).text
        assert models.failure() is error
        told = client.get("/health")
        assert (told.status_code, told.json()["status"]) == (503, "failed")


def test_a_server_that_is_told_to_end_does_not_wait_for_its_model(gate: Gate) -> None:
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models):
        assert gate.half.wait(WAIT_S)
    assert not gate.go_on.is_set()
    assert models.starting is not None
    assert models.failure() is None


def test_what_is_remembered_of_conversations_is_there_before_the_model(gate: Gate) -> None:
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models) as client, ThreadPoolExecutor(1) as pool:
        assert gate.half.wait(WAIT_S)
        assert client.get("/v1/memory/stats").status_code == 200
        answer = pool.submit(client.post, "/v1/responses", json={"input": "hello", "max_output_tokens": 16})
        while not models.default.status.waiting:
            pass
        gate.go_on.set()
        id = answer.result(WAIT_S).json()["id"]
        assert client.get(f"/v1/responses/{id}").status_code == 200


@pytest.mark.parametrize("gate", ["alone"], indirect=True)
def test_a_user_is_not_said_to_be_forgotten_before_the_model_is_there(gate: Gate) -> None:
    gate.go_on.set()
    with serving(gate.config, begin_models(gate.config, gate.prepare, Silent())) as client:
        assert client.post("/v1/chat/completions", json={**HELLO, "user": "ann"}).status_code == 200
    gate.go_on.clear()
    gate.half.clear()
    models = begin_models(gate.config, gate.prepare, Silent())
    with serving(gate.config, models) as client, ThreadPoolExecutor(1) as pool:
        assert gate.half.wait(WAIT_S)
        removed = pool.submit(client.delete, "/v1/cache", params={"user_id": "ann"})
        while not models.default.status.waiting and not removed.done():
            pass
        gate.go_on.set()
        assert removed.result(WAIT_S).json()["removed"]["entries"] == 1


def test_the_only_model_of_a_server_is_not_unloaded(gate: Gate) -> None:
    gate.go_on.set()
    models = begin_models(replace(gate.config, model="small"), gate.prepare, Silent())
    with serving(gate.config, models) as client:
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        told = client.post("/api/generate", json={"model": "small", "keep_alive": 0})
        assert told.status_code in (200, 400)
        assert models.default.is_loaded


def test_a_model_is_opened_anew_after_the_first_time() -> None:
    opened: list[int] = []

    def open_it(report: object) -> Backend:
        opened.append(1)
        return ScriptedBackend()

    opening = EarlyOpening(open_it)
    opening(lambda *_: None)
    assert len(opened) == 1
    opening(lambda *_: None)
    assert len(opened) == 2


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_warmup_reaches_the_route_but_not_the_backend(key: str | None) -> None:
    sent: list[object] = []

    async def listen(message: object) -> None:
        sent.append(message)

    config = Config(api_key=key)
    backend = ScriptedBackend()
    asyncio.run(warmup(create_app(Models(backend), config), config, listen))
    start, body = sent
    assert isinstance(start, dict)
    assert isinstance(body, dict)
    assert start["status"] == 400
    assert b"messages" in body["body"]


# ── what is imported before the first answer: its user waits for it ──

NOT_NEEDED = {
    *("fastapi", "httpx", "huggingface_hub", "jinja2", "jsonpath", "jsonschema", "llguidance", "mcp"),
    *("prometheus_client", "prompt_toolkit", "ray", "rich", "torch", "transformers", "valkey"),
    *("anthropic", "openai"),
    *("emberkeep.bench", "emberkeep.cluster", "emberkeep.mcp", "emberkeep.tools"),
    *("emberkeep.library.arguments", "emberkeep.library.emberkeep", "emberkeep.models.pull"),
    *("emberkeep.chat.grammar", "emberkeep.engine.hf.engine"),
    *("emberkeep.api.anthropic_messages", "emberkeep.api.embeddings", "emberkeep.api.llama_server"),
    *("emberkeep.api.ollama_body", "emberkeep.api.responses_body"),
    *("emberkeep.server.routes.cache", "emberkeep.server.metrics", "emberkeep.server.openapi"),
}
"""Each of these is imported when the first request, or a setting, wants it."""

PROGRAM = """
import asyncio, sys
import emberkeep.cli.serve
import emberkeep.server.lifecycle, emberkeep.runtime.local_model, emberkeep.engine.llamacpp.engine
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server, warmup

class Backend:
    card = None

config = Config()
asyncio.run(warmup(create_app(Models(Backend()), config), config))
print(*sys.modules)
"""


def test_a_server_imports_only_what_it_serves() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "emberkeep.api.openai_chat" in imported
    assert NOT_NEEDED & imported == set()


# ── before it serves ──


def _never(config: Config, reporter: object) -> None:
    raise AssertionError("nothing is fetched for a server that cannot start")


def test_the_world_is_not_let_in_without_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        serve(Config(host="0.0.0.0"), prepare=_never, reporter=ProgressLine(io.StringIO(), is_changing=False))


def test_a_taken_port_is_noticed_before_the_model_is_opened() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(EmberkeepError, match="in use"):
        config = Config(model="/nowhere/none.gguf", port=taken.getsockname()[1])
        serve(config, prepare=_never, reporter=ProgressLine(io.StringIO(), is_changing=False))


def test_the_banner_tells_where_what_and_how_to_stop() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        text = banner(Config(port=0, data_dir=Path("/data")), ScriptedBackend(), listener)
    assert f"http://127.0.0.1:{port}/v1" in text
    assert "org/tiny" in text
    assert "4,096" in text
    assert "/data" in text
    assert "Ctrl-C" in text
