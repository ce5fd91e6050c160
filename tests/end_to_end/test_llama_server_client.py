"""What programs that were written for llama-server send, against `emberkeep serve` with the real default model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.server_process import STEADY, serve

pytestmark = pytest.mark.slow

PROMPT = "The three primary colours are"
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 12, "speculation": False}
WHOLE = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word"),
    *("tokens_cached", "timings"),
}


@pytest.fixture(scope="module")
def http(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    data_dir = tmp_path_factory.mktemp("data")
    with (
        serve(smollm2, data_dir, "--ctx", "2048", "--parallel", "2", *STEADY) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def complete(http: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    answer = http.post("/completion", json={"prompt": prompt, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_completion_has_every_field_and_its_figures_agree(http: httpx.Client) -> None:
    told = complete(http, return_tokens=True)
    assert told.keys() >= WHOLE
    assert (told["stop"], told["stop_type"], told["tokens_predicted"], len(told["tokens"])) == (
        True,
        "limit",
        12,
        12,
    )
    tokens = http.post("/tokenize", json={"content": PROMPT}).json()["tokens"]
    assert told["tokens_evaluated"] == len(tokens)
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"content": told["content"]}


def test_a_stream_is_the_answer_in_pieces(http: httpx.Client) -> None:
    complete(http)
    body = {"prompt": PROMPT, **GREEDY, "stream": True, "timings_per_token": True, "return_progress": True}
    with http.stream("POST", "/completion", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        sent = [json.loads(line[len("data: ") :]) for line in answer.iter_lines() if line.startswith("data: ")]
    *parts, last = [part for part in sent if "prompt_progress" not in part]
    assert "".join(part["content"] for part in parts) == complete(http)["content"]
    assert not any(part["stop"] for part in parts)
    assert all("timings" in part for part in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")


def test_a_text_tokens_and_both_together_are_the_same_prompt(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": PROMPT}).json()["tokens"]
    complete(http)
    said = complete(http)["content"]
    assert complete(http, tokens)["content"] == said
    assert complete(http, [*tokens[:2], PROMPT[len(detokenize(http, tokens[:2])) :]])["content"] == said
    assert [each["content"] for each in complete_all(http, [PROMPT, tokens])] == [said, said]


def detokenize(http: httpx.Client, tokens: list[int]) -> str:
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["content"])


def complete_all(http: httpx.Client, prompts: list[Any]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = http.post("/completion", json={"prompt": prompts, **GREEDY}).json()
    return told


def test_probabilities_are_those_of_a_distribution(http: httpx.Client) -> None:
    (first, *_) = complete(http, n_probs=5, n_predict=2)["completion_probabilities"]
    top = first["top_logprobs"]
    assert len(top) == 5
    assert top[0]["id"] == first["id"]
    assert sorted(top, key=lambda each: -each["logprob"]) == top
    assert 0 < sum(math.exp(each["logprob"]) for each in top) <= 1
    (drawn, *_) = complete(http, n_probs=5, n_predict=2, post_sampling_probs=True)["completion_probabilities"]
    assert drawn["prob"] == pytest.approx(1.0)


def test_a_grammar_and_a_schema_bind_the_answer(http: httpx.Client) -> None:
    grammar = 'root ::= " red" | " blue"'
    assert complete(http, grammar=grammar)["content"] in (" red", " blue")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    told = json.loads(complete(http, "A number as JSON: ", json_schema=schema, n_predict=64)["content"])
    assert list(told) == ["n"]


@pytest.mark.parametrize(
    "samplers",
    [
        {"repeat_penalty": 1.3, "repeat_last_n": 32},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"mirostat": 2, "mirostat_tau": 4.0},
        {"dynatemp_range": 0.5, "top_n_sigma": 1.0},
        {"samplers": ["top_k", "temperature"], "top_k": 5},
        {"ignore_eos": True, "min_p": 0.1, "min_keep": 2},
    ],
    ids=lambda samplers: next(iter(samplers)),
)
def test_every_sampler_draws_the_same_with_the_same_seed(http: httpx.Client, samplers: dict[str, Any]) -> None:
    fields = {"temperature": 0.9, "seed": 7, "n_predict": 24, **samplers}
    first, second = complete(http, **fields), complete(http, **fields)
    assert first["content"] == second["content"] != ""
    settings = first["generation_settings"]
    assert all(settings[name] == pytest.approx(value) for name, value in samplers.items())


def test_props_slots_and_adapters_tell_of_the_server(http: httpx.Client) -> None:
    props = http.get("/props").json()
    slots = http.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(props["total_slots"]))
    assert "<|im_start|>" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert http.get("/lora-adapters").json() == []
    assert http.post("/lora-adapters", json=[]).json() == {"success": True}


def test_a_slot_is_saved_restored_and_erased(http: httpx.Client) -> None:
    told = complete(http, "What rests in a slot is stored anyway, so that saving it pins it. " * 12)
    slot = told["id_slot"]
    saved = http.post(f"/slots/{slot}?action=save", json={"filename": "a.bin"}).json()
    assert saved["n_saved"] > 0
    assert http.post(f"/slots/{slot}?action=restore", json={"filename": "a.bin"}).json()["n_restored"] > 0
    assert http.post(f"/slots/{slot}?action=erase").json()["n_erased"] > 0
    assert http.post(f"/slots/{slot}?action=forget").status_code == 400
