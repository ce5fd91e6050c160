"""`/expert-stats` and `/expert-tracking`, over a real engine with tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from emberkeep.runtime.served_models import open_backend, open_models
from emberkeep.types.request import Json
from helpers import tiny_gguf
from helpers.scripted_server import running
from helpers.several_models import serving

PROMPT = [40 + index % 7 for index in range(50)]
TEXT = "tell me more than sixteen tokens about state"


@contextmanager
def served(model: Path, data: Path) -> Iterator[httpx.Client]:
    config = Config(model=str(model), data_dir=data, parallel=4)
    backend = open_backend(config)
    try:
        with running(backend, config) as server, httpx.Client(base_url=server.url, timeout=20) as client:
            yield client
    finally:
        asyncio.run(backend.close())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("dense")
    with served(tiny_gguf.dense(folder / "tiny.gguf"), folder) as client:
        yield client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("moe")
    with served(tiny_gguf.moe(folder / "moe.gguf"), folder) as client:
        yield client


@pytest.fixture
def mixture(server: httpx.Client) -> httpx.Client:
    track(server, enabled=False, reset=True)
    return server


def track(client: httpx.Client, **body: Json) -> Json:
    response = client.post("/expert-tracking", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stats(client: httpx.Client) -> Json:
    return client.get("/expert-stats").json()


def complete(client: httpx.Client, prompt: Json, *, max_tokens: int = 12, **more: Json) -> Json:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def nothing_counted() -> dict[str, Json]:
    ours = {"enabled": True, "experts": 8, "experts_used": 2}
    others = {"tracking_enabled": True, "n_expert": 8, "n_expert_used": 2, "total_tokens": 0}
    return {**ours, **others, "layers": []}


def test_counts_and_frequencies_per_layer(mixture: httpx.Client) -> None:
    assert track(mixture, enabled=True) == nothing_counted()
    complete(mixture, PROMPT, max_tokens=0, cache_prompt=False)
    counts = [0] * 8
    for token in PROMPT:
        for expert in tiny_gguf.chosen_experts(token, layer=0):
            counts[expert] += 1
    frequencies = [count / len(PROMPT) for count in counts]
    activations = [
        {"expert": expert, "count": count, "frequency": count / (2 * len(PROMPT))}
        for expert, count in enumerate(counts)
    ]
    layer = {"layer": 0, "tokens": len(PROMPT), "counts": counts, "frequencies": frequencies}
    layers = [{**layer, "activations": activations}]
    assert stats(mixture) == {**nothing_counted(), "total_tokens": len(PROMPT), "layers": layers}


def test_total_tokens_are_those_of_the_layer_that_saw_most(mixture: httpx.Client) -> None:
    track(mixture, enabled=True)
    complete(mixture, PROMPT, cache_prompt=False)
    counted = stats(mixture)
    first, last = counted["layers"]
    assert (first["layer"], last["layer"]) == (0, 1)
    assert counted["total_tokens"] == first["tokens"] > last["tokens"] > 0
    for layer in (first, last):
        assert sum(entry["frequency"] for entry in layer["activations"]) == pytest.approx(1, abs=1e-5)
        assert sum(layer["frequencies"]) == pytest.approx(2, abs=1e-5)
        assert sum(layer["counts"]) == 2 * layer["tokens"]


def test_off_counts_nothing_and_keeps_what_was_counted(mixture: httpx.Client) -> None:
    track(mixture, enabled=True)
    complete(mixture, PROMPT, max_tokens=0, cache_prompt=False)
    before = track(mixture, enabled=False)
    assert not before["enabled"]
    complete(mixture, PROMPT, max_tokens=0, cache_prompt=False)
    assert stats(mixture) == before
    assert before["layers"][0]["tokens"] == len(PROMPT)


def test_a_reset_needs_no_switch(mixture: httpx.Client) -> None:
    track(mixture, enabled=True)
    complete(mixture, PROMPT, max_tokens=0, cache_prompt=False)
    assert track(mixture, reset=True) == nothing_counted()


def test_answers_are_the_same_and_stored_state_is_reused(mixture: httpx.Client) -> None:
    before = complete(mixture, TEXT)
    track(mixture, enabled=True)
    tracked = complete(mixture, TEXT)
    track(mixture, enabled=False)
    after = complete(mixture, TEXT)
    assert before["choices"] == tracked["choices"] == after["choices"]
    for resumed in (tracked, after):
        reused = resumed["emberkeep"]["reused"]
        assert reused["hot"] == 0
        assert sum(reused.values()) == resumed["usage"]["prompt_tokens"] - 1


def test_no_request_fails_because_of_a_switch(mixture: httpx.Client) -> None:
    prompts = [f"{TEXT}, for the reader with the number {number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, mixture, prompt) for prompt in prompts[:8]]
        switched = [pool.submit(track, mixture, enabled=number % 2 == 0) for number in range(4)]
        asked += [pool.submit(complete, mixture, prompt) for prompt in prompts[8:]]
        assert all(future.result()["choices"][0]["finish_reason"] for future in asked)
        assert sorted(future.result()["enabled"] for future in switched) == [False, False, True, True]


def test_the_same_switch_twice_is_harmless(mixture: httpx.Client) -> None:
    assert track(mixture, enabled=True) == track(mixture, enabled=True)


def test_a_model_without_experts_says_so(dense: httpx.Client) -> None:
    responses = [dense.get("/expert-stats"), dense.post("/expert-tracking", json={"enabled": True})]
    for response in responses:
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert "not a mixture of experts" in error["message"]


def test_a_mixture_that_is_not_loaded_is_loaded_for_it(tmp_path: Path) -> None:
    for make, name in ((tiny_gguf.dense, "dense"), (tiny_gguf.moe, "mixture")):
        pull(str(make(tmp_path / f"{name}.gguf")), ModelLibrary(tmp_path / "models"), name=name)
    config = Config(data_dir=tmp_path, model="dense", models=("all",))
    with serving(config, open_models(config)) as client:
        counted = client.post("/expert-tracking?model=mixture", json={"enabled": True})
        assert counted.json() == nothing_counted()
        assert client.get("/expert-stats?model=mixture").json()["enabled"]
        assert "not a mixture" in client.get("/expert-stats").json()["error"]["message"]
