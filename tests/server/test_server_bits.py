"""`kv_bits`: per request and per server, what it stores, who finds it, and where it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ConfigError
from emberkeep.types.lineage import SHARED
from emberkeep.types.request import Message, Request
from helpers.cache_server import SYSTEM, Served, served, user
from helpers.scripted_backend import fake_backend

QUESTION = user("What is the tide today? " * 40)


@pytest.fixture
def sea(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as sea:
        yield sea


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, kv_bits=8) as packed:
        yield packed


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_request_in_fewer_bits_is_found_by_its_like_only(sea: Served) -> None:
    first = sea.chat(SYSTEM, QUESTION, kv_bits=8)
    assert cached(sea.chat(SYSTEM, QUESTION, kv_bits=4)) == 0
    again = sea.chat(SYSTEM, QUESTION, kv_bits=8)
    assert cached(again) == first["usage"]["prompt_tokens"] - 1
    assert cached(sea.chat(SYSTEM, QUESTION)) == 0


def test_exact_state_is_found_by_all(sea: Served) -> None:
    first = sea.chat(SYSTEM, QUESTION)
    again = sea.chat(SYSTEM, QUESTION, kv_bits=8)
    assert cached(again) == first["usage"]["prompt_tokens"] - 1
    assert again["emberkeep"]["approximate"] is False
    assert again["choices"] == first["choices"]


def test_an_answer_says_that_it_rests_on_fewer_bits(packed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fake engine is too quick to be worth waiting for.
    monkeypatch.setattr("emberkeep.kv.policy.CostModel.worth_loading", lambda self, segments: segments)
    assert packed.chat(SYSTEM, QUESTION)["emberkeep"]["approximate"] is False
    packed.chat(user("Something else."), user_id="bob")  # nothing else rests in the engine then
    assert packed.chat(SYSTEM, QUESTION)["emberkeep"]["approximate"] is True


def test_sixteen_bits_ask_for_what_is_exact(packed: Served) -> None:
    packed.chat(SYSTEM, QUESTION)
    assert cached(packed.chat(SYSTEM, QUESTION, kv_bits=16)) == 0


def test_the_cache_says_how_many_bits_an_entry_has(packed: Served) -> None:
    packed.chat(SYSTEM, QUESTION, conversation_id="small", user_id="alice")
    packed.chat(SYSTEM, QUESTION, conversation_id="exact", user_id="alice", kv_bits=16)
    small, exact = packed.entry_of("small"), packed.entry_of("exact")
    assert (small["kv_bits"], exact["kv_bits"]) == (8, 16)
    assert small["user"] == exact["user"] == "alice"
    assert small["bytes"] < 0.8 * exact["bytes"]


def test_an_explanation_is_about_the_bits_that_were_asked_for(sea: Served) -> None:
    sea.chat(SYSTEM, QUESTION, kv_bits=8)
    assert sum(sea.explain(SYSTEM, QUESTION, kv_bits=8)["reused"].values()) > 0
    assert sum(sea.explain(SYSTEM, QUESTION)["reused"].values()) == 0


def test_a_prefix_is_warmed_in_the_bits_that_were_asked_for(sea: Served) -> None:
    warmed = sea.post("/v1/warm", messages=[user("Long words. " * 60)], kv_bits=8)
    assert warmed["ready"]
    assert sea.entries()[0]["kv_bits"] == 8
    assert sea.post("/v1/warm", messages=[user("Long words. " * 60)])["cached_tokens"] == 0


def test_nothing_stays_of_a_user_who_is_removed(sea: Served) -> None:
    sea.chat(SYSTEM, QUESTION, user_id="alice", kv_bits=8)
    removed = sea.delete("/v1/cache?user_id=alice")
    assert removed["tokens"] > 0
    assert cached(sea.chat(SYSTEM, QUESTION, user_id="alice", kv_bits=8)) == 0


def test_stored_state_in_fewer_bits_can_be_verified(packed: Served) -> None:
    packed.chat(SYSTEM, QUESTION, conversation_id="c")
    entry = packed.entry_of("c")
    (result,) = packed.post("/v1/cache/verify", ids=[entry["id"]])["data"]
    assert result["reused"] >= entry["tokens"] - 1
    assert not result["equal"]


def test_bits_that_the_model_cannot_do_are_a_400(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(kv_unit=KvUnit.SNAPSHOT)) as lake:
        response = lake.client.post("/v1/chat/completions", json={"messages": [QUESTION], "kv_bits": 8})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "kv_bits"
        assert lake.chat(QUESTION, kv_bits=16)["usage"]["prompt_tokens"]


def test_bits_that_the_model_cannot_do_are_no_default(tmp_path: Path) -> None:
    engine = FakeEngine(kv_unit=KvUnit.SNAPSHOT)
    with pytest.raises(ConfigError, match="kv_bits 8"):
        fake_backend(Config(data_dir=tmp_path, kv_bits=8), engine)
    assert engine.is_closed


def test_declared_prefixes_are_ready_in_the_configured_bits(tmp_path: Path) -> None:
    prefix = Request(messages=(Message("system", "Be brief. " * 60),), namespace=SHARED).decided(is_prefix=True)
    backend = fake_backend(Config(data_dir=tmp_path, kv_bits=8))
    try:
        warmed = asyncio.run(backend.warmer.warm(prefix))
        assert warmed.error is None
        (entry,) = backend.cache.entries()
        assert (entry.id, entry.kv_bits, entry.is_shared) == (warmed.entry_id, 8, True)
    finally:
        asyncio.run(backend.close())
