"""Requests that do not fit: refused with numbers, or cut to what does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.engine.base import Footprint
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.request import Json
from helpers.cache_server import SYSTEM, Served, served, user

FIXED = 1_000_000
ROOM = 100_000
SMALL = Footprint("cuda:0", FIXED + ROOM, FIXED, 10, 50, 0.05, 200)
TIGHT = {"memory_margin": 0.0}


def small_engine(**shape: int) -> FakeEngine:
    engine = FakeEngine(**shape)
    engine.footprint = SMALL
    return engine


def refused(site: Served, path: str = "/v1/completions", **body: Json) -> Json:
    response = site.client.post(path, json=body)
    assert response.status_code == 413, response.text
    return response.json()["error"]


def ids(count: int) -> list[int]:
    return [40 + number % 50 for number in range(count)]


def turns(count: int) -> list[Json]:
    said = []
    for number in range(count):
        said += [
            user(f"Question {number}: what is the tide?"),
            {"role": "assistant", "content": f"Tide {number}."},
        ]
    return said


# ── refusing ──


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_cannot_fit_is_a_413_with_numbers_and_nothing_is_evaluated(
    tmp_path: Path, stream: bool
) -> None:
    with served(tmp_path, small_engine(), **TIGHT) as site:
        error = refused(site, prompt=ids(3000), max_tokens=4, stream=stream)
        assert (error["type"], error["code"]) == ("invalid_request_error", "prompt_too_large")
        assert error["prompt_tokens"] == 3000
        assert error["predicted_peak_mb"] > error["free_mb"] == (FIXED + ROOM) / 1e6
        assert f"send at most {error['suggested_max_tokens']:,} tokens" in error["message"]
        assert site.engine.evaluated_tokens == 0
        assert site.client.get("/v1/stats").json()["planning"]["refused"] == 1


def test_the_suggested_prompt_fits_and_one_token_more_does_not(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(), **TIGHT) as site:
        most = refused(site, prompt=ids(3000), max_tokens=4)["suggested_max_tokens"]
        assert refused(site, prompt=ids(most + 1), max_tokens=4)["suggested_max_tokens"] == most
        site.post("/v1/completions", prompt=ids(most), max_tokens=4)


def test_a_longer_prompt_gets_smaller_slices_and_the_answer_says_so(tmp_path: Path) -> None:
    slices: list[int] = []
    engine = small_engine()
    engine.on_evaluate = lambda batch: slices.extend(len(rows.tokens) for rows in batch)
    with served(tmp_path, engine, **TIGHT) as site:
        plan = site.post("/v1/completions", prompt=ids(200), max_tokens=4)["emberkeep"]["plan"]
        assert plan["prefill_slice"] == 512
        slices.clear()
        plan = site.post("/v1/completions", prompt=ids(1500)[::-1], max_tokens=4)["emberkeep"]["plan"]
        assert (plan["prefill_slice"], plan["kv_bits"]) == (256, 16)
        assert FIXED < plan["predicted_bytes"] <= FIXED + ROOM
        assert max(slices) <= 256


def test_an_answer_without_a_limit_ends_where_memory_does(tmp_path: Path) -> None:
    endless = {"logit_bias": {str(token): -100 for token in FakeEngine().vocab.eog}}
    engine = FakeEngine()
    engine.footprint = replace(SMALL, per_context_token=300, per_pair=0)
    with served(tmp_path, engine, **TIGHT) as site:
        answer = site.post("/v1/completions", prompt=ids(60), temperature=0, max_tokens=-1, **endless)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == (ROOM - 200 - 10) // 300


def test_a_prompt_longer_than_the_context_is_still_a_400(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(context=512), **TIGHT) as site:
        response = site.client.post("/v1/completions", json={"prompt": ids(600)})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_without_planning_everything_is_tried(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(), memory_margin=None) as site:
        assert site.post("/v1/completions", prompt=ids(3000), max_tokens=4)["emberkeep"]["plan"] is None
        assert site.client.get("/v1/stats").json()["planning"]["enabled"] is False


def test_a_prefix_that_cannot_fit_is_not_warmed(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(), too_long="truncate", **TIGHT) as site:
        refused(site, "/v1/warm", text="The tide. " * 400)


# ── truncating ──


def test_the_oldest_turns_leave_a_chat_that_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(tmp_path, FakeEngine(context=1024), too_long="truncate") as site:
        with caplog.at_level(logging.INFO, "emberkeep.backend"):
            answer = site.chat(SYSTEM, *turns(40), user("And now?"))
        detail = answer["emberkeep"]
        assert detail["truncated_messages"] % 2 == 0
        assert 0 < detail["truncated_messages"] < 80
        assert answer["usage"]["prompt_tokens"] <= 1024 - 4
        assert any("left out of a prompt" in line for line in caplog.messages)
        (entry,) = (entry for entry in site.entries() if entry["kind"] == "conversation")
        text = site.client.get(f"/v1/cache/{entry['id']}").json()["text"]
        assert "Question 0:" not in text
        assert all(kept in text for kept in (SYSTEM["content"], "Question 39:", "And now?"))
        rendered = site.post("/apply-template", messages=[SYSTEM, *turns(40), user("And now?")])["prompt"]
        whole = site.post("/tokenize", content=rendered)
        assert detail["truncated_tokens"] == len(whole["tokens"]) - answer["usage"]["prompt_tokens"]
        assert site.client.get("/v1/stats").json()["planning"]["truncated"] == 1


def test_turns_of_a_chat_that_is_cut_are_one_conversation(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(context=1024), too_long="truncate") as site:
        for count in (40, 44):
            assert site.chat(SYSTEM, *turns(count), user("And now?"))["emberkeep"]["truncated_messages"]
        conversations = [entry for entry in site.entries() if entry["kind"] == "conversation"]
        assert [entry["turns"] for entry in conversations] == [2]


def test_a_raw_prompt_loses_its_beginning(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(context=512), too_long="truncate") as site:
        prompt = ids(700)
        answer = site.post("/v1/completions", prompt=prompt, max_tokens=12, echo=True, temperature=0)
        assert answer["emberkeep"]["truncated_tokens"] == 200
        assert answer["emberkeep"]["truncated_messages"] == 0
        alone = site.post("/v1/completions", prompt=prompt[200:], max_tokens=12, echo=True, temperature=0)
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


def test_what_memory_cannot_hold_is_cut_too(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(), too_long="truncate", **TIGHT) as site:
        answer = site.post("/v1/completions", prompt=ids(3000), max_tokens=4)
        assert 0 < answer["emberkeep"]["truncated_tokens"] < 3000
        assert answer["emberkeep"]["plan"]["prefill_slice"] == 32


def test_what_must_not_leave_and_does_not_fit_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(context=512), too_long="truncate") as site:
        body = {"messages": [*turns(3), user("The tide. " * 200)]}
        assert site.client.post("/v1/chat/completions", json=body).status_code == 400
    with served(tmp_path, small_engine(), too_long="truncate", **TIGHT) as site:
        body = {"messages": [*turns(3), user("The tide. " * 500)]}
        refused(site, "/v1/chat/completions", **body)


def test_an_answer_gets_room_when_a_prompt_is_cut(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(context=512), too_long="truncate") as site:
        for asked, room in ((-1, 128), (100, 100), (4000, 256)):
            answer = site.post("/v1/completions", prompt=ids(700), max_tokens=asked)
            assert answer["usage"]["prompt_tokens"] == 512 - room


# ── what is told ──


def test_the_planning_is_in_the_stats(tmp_path: Path) -> None:
    with served(tmp_path, small_engine(), memory_margin=0.05) as site:
        stats = site.client.get("/v1/stats").json()
    assert stats["planning"]["enabled"] is True
    assert stats["planning"]["margin"] == 0.05
    assert stats["planning"]["footprint"] == {
        "device": "cuda:0",
        "capacity": FIXED + ROOM,
        "fixed": FIXED,
        "per_step_token": 10,
        "per_context_token": 50,
        "per_pair": 0.05,
        "per_logits_row": 200,
        "in_ram": 0,
    }
    assert stats["planning"]["suggested_margin"] is None
