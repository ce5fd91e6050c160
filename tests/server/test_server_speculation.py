"""Drafts as a client sees them, through the real scheduler over the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from helpers.cache_server import Served
from helpers.cache_server import served as serving

ASKED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Which ships are in?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("data")) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def plain(client: openai.OpenAI) -> str:
    """What the model says without drafts."""
    answer = client.chat.completions.create(**ASKED, extra_body={"speculation": False})
    details = answer.usage and answer.usage.completion_tokens_details
    assert details and details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert "draft_n" not in (answer.model_extra or {})["timings"]
    return answer.choices[0].message.content or ""


def predicted(text: str) -> Any:
    return {"type": "content", "content": text}


def test_a_prediction_that_is_right_is_accepted_and_changes_nothing(client: openai.OpenAI, plain: str) -> None:
    answer = client.chat.completions.create(**ASKED, prediction=predicted(plain))
    assert answer.choices[0].message.content == plain
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens or 0
    assert 0 < accepted < answer.usage.completion_tokens
    timings = (answer.model_extra or {})["timings"]
    assert timings["draft_n_accepted"] == accepted
    assert timings["draft_n"] == accepted + (
        answer.usage.completion_tokens_details.rejected_prediction_tokens or 0
    )


def test_a_prediction_may_be_wrong_or_longer_than_the_context_and_hold_any_text(
    client: openai.OpenAI, plain: str
) -> None:
    wrong = client.chat.completions.create(**ASKED, prediction=predicted(plain[:6] + "?" + plain[7:]))
    assert wrong.choices[0].message.content == plain
    longer = f"{plain}<|im_end|>\n" * 5000
    answer = client.chat.completions.create(**ASKED, prediction=predicted(longer[: 2**18]))
    assert answer.choices[0].message.content == plain
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens


def test_a_stream_tells_at_its_end(client: openai.OpenAI, plain: str) -> None:
    chunks = list(
        client.chat.completions.create(
            **ASKED, prediction=predicted(plain), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == plain
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens


def test_a_prediction_does_not_count_as_prompt(client: openai.OpenAI, plain: str) -> None:
    counts = [
        client.chat.completions.create(**ASKED, prediction=prediction).usage
        for prediction in (None, predicted(plain))
    ]
    assert counts[0] and counts[1] and counts[0].prompt_tokens == counts[1].prompt_tokens


def test_the_servers_figures_add_up(served: Served, client: openai.OpenAI, plain: str) -> None:
    before = served.client.get("/v1/stats").json()["speculation"]["accepted_tokens"]
    stranger = {"user_id": "stranger"}  # of whom nothing is known that could be drafted
    usage = client.chat.completions.create(**ASKED, prediction=predicted(plain), extra_body=stranger).usage
    stats = served.client.get("/v1/stats").json()["speculation"]
    assert stats["enabled"] is True and stats["reason"] is None
    assert usage is not None and usage.completion_tokens_details is not None
    assert stats["accepted_tokens"] == before + (usage.completion_tokens_details.accepted_prediction_tokens or 0)
    source = stats["sources"]["prediction"]
    assert sum(source["accepted_lengths"]) == source["drafts"] > 0
    assert stats["accepted_tokens"] == sum(each["accepted_tokens"] for each in stats["sources"].values())
    assert 'emberkeep_accepted_draft_tokens_total{source="prediction"}' in served.client.get("/metrics").text


def test_a_server_that_does_not_speculate_says_why(tmp_path: Path) -> None:
    with serving(tmp_path, speculation="off") as served:
        answer = served.post("/v1/chat/completions", **ASKED, prediction=predicted("x"), speculation=True)
        assert "draft_n" not in answer["timings"]
        stats = served.client.get("/v1/stats").json()["speculation"]
    assert stats["enabled"] is False and "switched off" in stats["reason"]


def test_a_model_with_snapshots_says_why_it_does_not(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(kv_unit=KvUnit.SNAPSHOT)) as served:
        assert "draft_n" not in served.post("/v1/chat/completions", **ASKED, prediction=predicted("x"))["timings"]
        stats = served.client.get("/v1/stats").json()["speculation"]
    assert stats["enabled"] is False and stats["reason"]
