"""`/v1/warm`: a prefix is evaluated before a request needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.types.request import Json
from helpers.cache_server import SYSTEM, Served, send_raw, served, tool, user
from helpers.scheduling import Gate


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("data")) as sea:
        yield sea


def test_a_chat_after_a_warm_evaluates_only_its_own_tokens(sea: Served) -> None:
    warmed = sea.post("/v1/warm", messages=[SYSTEM], user_id="a")
    assert warmed["ready"] is True
    assert warmed["error"] is None
    assert (warmed["cached_tokens"], warmed["evaluated_tokens"]) == (0, warmed["tokens"])
    before = sea.engine.evaluated_tokens
    answer = sea.chat(SYSTEM, user("When is high tide?"), user_id="a", max_tokens=0)
    own = answer["usage"]["prompt_tokens"] - warmed["tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
    assert sea.engine.evaluated_tokens == before + own
    assert own < 40 < warmed["tokens"]


def test_a_second_warm_evaluates_nothing(sea: Served) -> None:
    first = sea.post("/v1/warm", messages=[SYSTEM], user_id="b")
    before = sea.engine.evaluated_tokens
    second = sea.post("/v1/warm", messages=[SYSTEM], user_id="b")
    assert sea.engine.evaluated_tokens == before
    assert (second["cached_tokens"], second["evaluated_tokens"]) == (first["tokens"], 0)
    assert second["entry_id"] == first["entry_id"]


def test_its_entry_can_be_looked_up_at_once(sea: Served) -> None:
    warmed = sea.post("/v1/warm", messages=[SYSTEM], user_id="c")
    entry = sea.client.get(f"/v1/cache/{warmed['entry_id']}").json()
    assert (entry["kind"], entry["user"], entry["tokens"]) == ("prefix", "c", warmed["tokens"])
    assert entry["text"].startswith(f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n")


def test_tools_are_warmed_with_and_without_messages(sea: Served) -> None:
    for beginning in ([], [SYSTEM]):
        warmed = sea.post("/v1/warm", messages=beginning, tools=[tool("tides"), tool("moon")], user_id="d")
        answer = sea.chat(
            *beginning, user("Which moon?"), tools=[tool("tides"), tool("moon")], user_id="d", max_tokens=0
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
    only_tools = sea.post("/v1/warm", tools=[tool("winds")], user_id="d")
    assert only_tools["evaluated_tokens"] == only_tools["tokens"] - only_tools["cached_tokens"] > 0


def test_a_conversation_so_far_is_warmed_under_its_name(sea: Served) -> None:
    asked = user("When is low tide?")
    answer = {"role": "assistant", "content": "At noon."}
    warmed = sea.post("/v1/warm", messages=[SYSTEM, asked, answer], conversation_id="coast", user_id="e")
    entry = sea.entry_of("coast")
    assert (entry["id"], entry["kind"], warmed["ttl"]) == (warmed["entry_id"], "conversation", "long")
    goes_on = sea.chat(SYSTEM, asked, answer, user("Thanks."), conversation_id="coast", user_id="e")
    assert goes_on["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]


@pytest.mark.parametrize("more", [{}, {"tools": [tool("tides")]}])
def test_the_beginning_of_a_conversation_is_warmed_under_its_name(sea: Served, more: Json) -> None:
    name = f"shore-{len(more)}"
    warmed = sea.post("/v1/warm", messages=[SYSTEM], conversation_id=name, user_id="l", **more)
    entry = sea.entry_of(name)
    assert (entry["id"], entry["kind"], warmed["ttl"]) == (warmed["entry_id"], "conversation", "long")
    goes_on = sea.chat(SYSTEM, user("When is high tide?"), conversation_id=name, user_id="l", **more)
    assert goes_on["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
    assert sea.entry_of(name)["id"] == entry["id"]


def test_a_text_is_warmed_as_it_is(sea: Served) -> None:
    text = "The tide tables of this coast are kept in the harbour office. "
    warmed = sea.post("/v1/warm", text=text, user_id="f")
    answer = sea.post("/v1/completions", prompt=f"{text}They are open", max_tokens=1, user_id="f")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
    assert sea.client.get(f"/v1/cache/{warmed['entry_id']}").json()["text"] == text


def test_what_is_warmed_for_one_user_is_not_warm_for_another(sea: Served) -> None:
    salted = {"user_id": "g", "cache_salt": "s"}
    for owner in ({"user_id": "g"}, {"llama_user_id": "h"}, {"user": "i j"}, salted):
        warmed = sea.post("/v1/warm", messages=[SYSTEM], **owner)
        assert warmed["cached_tokens"] == 0
        assert sea.post("/v1/warm", messages=[SYSTEM], **owner)["evaluated_tokens"] == 0


def test_a_ttl_stays_until_another_one_is_asked_for(sea: Served) -> None:
    def ttl(**more: Json) -> str:
        warmed = sea.post("/v1/warm", messages=[SYSTEM], user_id="k", **more)
        assert sea.client.get(f"/v1/cache/{warmed['entry_id']}").json()["ttl"] == warmed["ttl"]
        return str(warmed["ttl"])

    assert ttl() == "short"
    assert ttl(ttl="extended") == "extended"
    assert ttl() == "extended"
    assert ttl(ttl="long") == "long"


def test_a_prefix_that_fits_no_context_is_refused(sea: Served) -> None:
    response = sea.client.post("/v1/warm", json={"text": "~" * 5000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_values_for_the_template_count(sea: Served) -> None:
    """The template under test does not use them, and refuses what is no name."""
    assert sea.post("/v1/warm", messages=[SYSTEM], user_id="l", chat_template_kwargs={"thinking": False})["ready"]
    response = sea.client.post("/v1/warm", json={"messages": [SYSTEM], "chat_template_kwargs": {"a b": 1}})
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"parallel": 1, "queue": 0}, "try again in a moment"), ({"max_concurrent_per_user": 1}, "limited to 1")],
)
def test_no_place_for_it_is_no_error(tmp_path: Path, settings: Json, says: str) -> None:
    engine = FakeEngine()
    with served(tmp_path, engine, **settings) as full:
        gate = Gate(engine)
        connection = send_raw(full.server.port, "/v1/chat/completions", messages=[user("hi")])
        gate.reached()
        warmed = full.post("/v1/warm", messages=[SYSTEM])
        gate.open()
        connection.close()
    assert (warmed["ready"], warmed["tokens"], warmed["ttl"]) == (False, 0, None)
    assert says in warmed["error"]


def test_an_engine_that_fails_is_no_error(tmp_path: Path) -> None:
    def fail(batch: object) -> None:
        raise EngineError("The engine is out of memory: try again.")

    engine = FakeEngine()
    with served(tmp_path, engine) as shaky:
        engine.on_evaluate = fail
        warmed = shaky.post("/v1/warm", messages=[SYSTEM])
        engine.on_evaluate = None
        assert (warmed["ready"], warmed["error"]) == (False, "The engine is out of memory: try again.")
        assert shaky.post("/v1/warm", messages=[SYSTEM])["ready"] is True


def test_no_room_to_keep_it_is_no_error(tmp_path: Path) -> None:
    with served(tmp_path, ram_budget=0, disk_budget=0) as bare:
        warmed = bare.post("/v1/warm", messages=[SYSTEM])
    assert (warmed["ready"], warmed["ttl"]) == (False, None)
    assert "raise ram_budget" in warmed["error"]


def test_a_client_that_leaves_stops_it_and_what_was_computed_is_kept(tmp_path: Path) -> None:
    engine = FakeEngine()
    text = "~" * 3000
    with served(tmp_path, engine) as sea:
        gate = Gate(engine, holds=lambda step: step == 2)
        connection = send_raw(sea.server.port, "/v1/warm", text=text)
        gate.reached()
        connection.close()
        sea.wait_until_left()
        gate.open()
        sea.settle()
        computed = engine.evaluated_tokens
        assert 0 < computed < len(text)
        assert sea.post("/v1/warm", text=text)["cached_tokens"] == computed
