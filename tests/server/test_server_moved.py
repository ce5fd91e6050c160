"""Asking for reuse beyond prefixes, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ConfigError
from helpers.cache_server import Served
from helpers.cache_server import served as serving
from helpers.scripted_backend import fake_backend

DOCUMENTS = [f"Document {n}. " + " ".join(f"word {n * 37 + i * 11}" for i in range(40)) for n in range(3)]


def ask(order: str) -> dict[str, str]:
    return {"role": "user", "content": "\n".join([*(DOCUMENTS[int(n)] for n in order), "What is in them?"])}


@pytest.fixture
def served(tmp_path: Path):
    with serving(tmp_path) as served:
        yield served


def test_documents_in_another_order_are_moved_and_the_answer_says_so(served: Served) -> None:
    exact = served.chat(ask("210"), cache_prompt=False, user="other")
    served.chat(ask("012"))
    answer = served.chat(ask("210"), approximate="cacheblend")
    detail = answer["emberkeep"]
    assert detail["approximate"] is True
    assert detail["moved_tokens"] > 300
    assert 0 < detail["repaired_tokens"] < detail["moved_tokens"] / 2
    reused = sum(detail["reused"].values())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == reused + detail["moved_tokens"]
    again = served.chat(ask("210"))
    assert again["emberkeep"]["approximate"] is False
    assert again["choices"] == exact["choices"]


def test_a_conversation_goes_on_from_its_own_approximate_state(served: Served) -> None:
    served.chat(ask("012"))
    first = served.chat(ask("210"), approximate="none")
    history = [ask("210"), first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = served.chat(*history, approximate="none")
    assert second["emberkeep"]["approximate"] is True
    assert second["emberkeep"]["moved_tokens"] == 0
    assert sum(second["emberkeep"]["reused"].values()) > first["usage"]["prompt_tokens"]


def test_explaining_tells_what_would_be_moved(served: Served) -> None:
    served.chat(ask("012"))
    explained = served.explain(ask("210"), approximate="none")
    moved = served.chat(ask("210"), approximate="none")["emberkeep"]["moved_tokens"]
    assert explained["moved_tokens"] == moved
    assert f"{moved:,} tokens of what follows are stored at other places" in explained["explanation"]


def test_the_statistics_count_what_was_moved(served: Served) -> None:
    served.chat(ask("012"))
    moved = served.chat(ask("210"), approximate="none")["emberkeep"]["moved_tokens"]
    assert served.client.get("/v1/stats").json()["scheduler"]["moved_tokens"] == moved
    assert f"emberkeep_moved_tokens_total {moved:.1f}" in served.client.get("/metrics").text


@pytest.mark.parametrize("value", [False, "off", None])
def test_exact_answers_can_be_asked_for(tmp_path: Path, value) -> None:
    with serving(tmp_path, approximate="off" if value is None else "none") as served:
        served.chat(ask("012"))
        assert served.chat(ask("210"), approximate=value)["emberkeep"]["approximate"] is False


def test_the_setting_goes_for_requests_that_do_not_say(tmp_path: Path) -> None:
    with serving(tmp_path, approximate="none") as served:
        served.chat(ask("012"))
        assert served.chat(ask("210"))["emberkeep"]["moved_tokens"] > 300


def test_an_exact_server_refuses_what_is_not_exact(tmp_path: Path) -> None:
    with serving(tmp_path, approximate="never") as served:
        served.chat(ask("012"))
        detail = served.chat(ask("210"), approximate=False, kv_bits=16)["emberkeep"]
        assert (detail["approximate"], detail["moved_tokens"]) == (False, 0)
        for more in ({"approximate": "cacheblend"}, {"kv_bits": 4}):
            body = {"messages": [ask("210")], **more}
            response = served.client.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, *more)
        assert {entry["kv_bits"] for entry in served.entries()} == {16}


def test_an_exact_server_stores_no_fewer_bits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="approximate = never wants exact state, and kv_bits = 8 is not"):
        fake_backend(Config(data_dir=tmp_path, approximate="never", kv_bits=8))


def test_a_warmed_prefix_is_exact(tmp_path: Path) -> None:
    with serving(tmp_path, approximate="none") as served:
        served.chat(ask("012"))
        warmed = served.post("/v1/warm", text="\n".join([DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]))
        assert warmed["cached_tokens"] == 0


def test_an_engine_that_cannot_move_state_says_what_can(tmp_path: Path) -> None:
    engine = FakeEngine(kv_unit=KvUnit.BOTH)
    with serving(tmp_path, engine=engine) as served:
        response = served.client.post(
            "/v1/chat/completions", json={"messages": [ask("0")], "approximate": "cacheblend"}
        )
        assert response.status_code == 400
        assert "use --engine hf" in response.json()["error"]["message"]
