"""`/v1/cache`: what is kept, keeping and removing it, why it was not used, and whether it is right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.server.routes import cache as cache_routes
from emberkeep.types.request import Json
from helpers.cache_server import HOUR_S, SYSTEM, Served, send_raw, served, tool, user
from helpers.kv_building import chunks_of, exported, prompt
from helpers.scheduling import Gate

UNKNOWN_ENTRY = "0123456789ab"
_names = itertools.count()


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("data")) as sea:
        yield sea


@pytest.fixture
def user_id() -> str:
    """A user with nothing in the store yet."""
    return f"user-{next(_names)}"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as alone:
        yield alone


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Served]:
    """Room for a few conversations, in RAM only; nothing rests in the engine besides the latest."""
    with served(tmp_path, FakeEngine(sequences=2), ram_budget=20_000, disk_budget=0) as narrow:
        yield narrow


def crowd(narrow: Served) -> None:
    """Conversations of other people, more than there is room for."""
    for number in range(12):
        narrow.chat(user(f"Question number {number}. " * 10), user_id=f"crowd-{number}")


# ── what is kept ──


def test_a_conversation_is_listed(sea: Served, user_id: str) -> None:
    answer = sea.chat(SYSTEM, user("When is high tide?"), user_id=user_id, conversation_id="tides")
    (entry,) = sea.entries(user_id=user_id, kind="conversation")
    tokens = answer["usage"]["total_tokens"] + 2  # the end of the turn
    assert {key: entry[key] for key in ("kind", "conversation_id", "head", "user", "shared")} == {
        "kind": "conversation",
        "conversation_id": "tides",
        "head": "When is high tide?",
        "user": user_id,
        "shared": False,
    }
    assert {key: entry[key] for key in ("tokens", "tier", "turns", "branches", "ttl", "pinned")} == {
        "tokens": tokens,
        "tier": "hot",
        "turns": 1,
        "branches": 1,
        "ttl": "long",
        "pinned": False,
    }
    assert entry["tiers"] == {"hot": tokens, "warm": tokens, "cold": tokens}
    assert entry["bytes"] > tokens * sea.engine.capabilities.kv_bytes_per_token
    assert (entry["expires_in_s"], entry["last_used_s"], entry["hits"]) == (HOUR_S, 0, 0)


def test_entries_are_chosen_by_user_kind_and_number(sea: Served, user_id: str) -> None:
    sea.post("/v1/warm", messages=[SYSTEM], user_id=user_id)
    sea.chat(SYSTEM, user("one"), user_id=user_id, conversation_id="one")
    sea.clock.seconds += 1
    sea.chat(SYSTEM, user("two"), user_id=user_id, conversation_id="two")
    names = [entry["conversation_id"] for entry in sea.entries(user_id=user_id, kind="conversation")]
    assert names == ["two", "one"]
    assert [entry["kind"] for entry in sea.entries(user_id=user_id, kind="prefix")] == ["prefix"]
    assert {entry["user"] for entry in sea.entries()} >= {user_id}
    listed = sea.client.get("/v1/cache", params={"user_id": user_id, "limit": 1}).json()
    assert len(listed["data"]) == 1
    everything = sea.entries(user_id=user_id)
    assert listed["totals"] == {
        "entries": 3,
        "tokens": sum(entry["tokens"] for entry in everything),
        "bytes": sum(entry["bytes"] for entry in everything),
    }


def test_requests_without_a_user_are_listed_too(sea: Served, user_id: str) -> None:
    sea.chat(user("Who am I?"), conversation_id=f"without a user, beside {user_id}")
    sea.chat(user("Who am I?"), user_id=user_id)
    entries = sea.entries(user_id="")
    assert f"without a user, beside {user_id}" in [entry["conversation_id"] for entry in entries]
    assert {entry["user"] for entry in entries} == {None}


def test_an_entry_shows_both_ends_of_its_text(sea: Served, user_id: str) -> None:
    answer = sea.chat(SYSTEM, user("And the winds?"), user_id=user_id, conversation_id="winds")
    (entry,) = sea.entries(user_id=user_id, kind="conversation")
    whole = sea.client.get(f"/v1/cache/{entry['id']}").json()
    said = answer["choices"][0]["message"]["content"]
    assert whole["text"].startswith(f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>")
    assert whole["text"].endswith(f"<|im_start|>assistant\n{said}<|im_end|>\n")
    assert len(whole["text"]) == whole["text_chars"]
    short = sea.client.get(f"/v1/cache/{entry['id']}?chars=21").json()
    assert short["text"] == f"{whole['text'][:11]}…{whole['text'][-10:]}"
    assert short["text_chars"] == whole["text_chars"]
    assert sea.client.get(f"/v1/cache/{entry['id']}?chars=0").json()["text"] == "…"


def test_what_users_wrote_stays_data(sea: Served, user_id: str) -> None:
    hostile = '</script>"\\\u2028\x00{{ 7 * 7 }}'
    sea.chat(user(hostile), user=f"{hostile} {user_id}", conversation_id=hostile)
    (entry,) = sea.entries(user_id=f"{hostile} {user_id}")
    assert entry["conversation_id"] == hostile
    assert sea.delete("/v1/cache?" + str(httpx.QueryParams(user_id=f"{hostile} {user_id}")))["entries"] == 1
    assert not sea.entries(user_id=f"{hostile} {user_id}")


@pytest.mark.parametrize("name", [UNKNOWN_ENTRY, "no-such-entry", "PIN", "0123", "ü", "x" * 5000])
def test_what_is_not_there_is_404_whatever_it_is_called(sea: Served, name: str) -> None:
    responses = [
        sea.client.get(f"/v1/cache/{name}"),
        sea.client.delete(f"/v1/cache/{name}"),
        sea.client.post("/v1/cache/pin", json={"id": name}),
        sea.client.post("/v1/cache/unpin", json={"id": name}),
        sea.client.post("/v1/cache/verify", json={"ids": [name]}),
    ]
    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 404
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "id", "entry_not_found")
        assert error["message"] == f"There is no entry {name[:64]!r}: `emberkeep cache ls` lists them."


# ── keeping and removing ──


def test_what_is_pinned_outlives_its_time(alone: Served) -> None:
    alone.chat(user("Keep this."), user_id="ann", conversation_id="kept")
    alone.chat(user("And not that."), user_id="bob", conversation_id="left")
    kept, left = alone.entry_of("kept"), alone.entry_of("left")
    assert alone.post("/v1/cache/pin", id=kept["id"])["pinned"] is True
    alone.clock.seconds += HOUR_S + 1
    assert alone.entry_of("left")["expires_in_s"] == -1
    removed = {key: left[key] for key in ("tokens", "bytes")}
    assert alone.post("/v1/cache/gc")["removed"] == {"entries": 1, **removed}
    assert [entry["id"] for entry in alone.entries()] == [kept["id"]]
    assert alone.post("/v1/cache/unpin", id=kept["id"])["pinned"] is False
    assert alone.post("/v1/cache/gc")["removed"]["entries"] == 1
    assert alone.entries() == []
    assert alone.post("/v1/cache/gc")["removed"] == {"entries": 0, "tokens": 0, "bytes": 0}


def test_what_is_pinned_is_not_evicted(narrow: Served) -> None:
    asked = [user("Which of us stays in a full store? " * 5)]
    narrow.chat(*asked, user_id="ann", conversation_id="kept")
    narrow.post("/v1/cache/pin", id=narrow.entry_of("kept")["id"])
    narrow.chat(*asked, user_id="bob")
    crowd(narrow)
    before = narrow.engine.evaluated_tokens
    pinned = narrow.chat(*asked, user_id="ann", max_tokens=0)
    assert narrow.engine.evaluated_tokens == before
    assert pinned["emberkeep"]["reused"]["warm"] == pinned["usage"]["prompt_tokens"]
    evicted = narrow.chat(*asked, user_id="bob", max_tokens=0)
    assert evicted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert evicted["emberkeep"]["reason"] == "evicted"


def test_what_is_removed_is_evaluated_again(sea: Served, user_id: str) -> None:
    asked = [user("What do you forget?")]
    first = sea.chat(*asked, user_id=user_id, max_tokens=0)
    (entry,) = sea.entries(user_id=user_id)
    removed = sea.delete(f"/v1/cache/{entry['id']}")
    assert removed == {"entries": 1, "tokens": entry["tokens"], "bytes": entry["bytes"]}
    assert sea.entries(user_id=user_id) == []
    before = sea.engine.evaluated_tokens
    again = sea.chat(*asked, user_id=user_id, max_tokens=0)
    assert sea.engine.evaluated_tokens == before + first["usage"]["prompt_tokens"]
    assert again["emberkeep"]["reason"] == "removed"


def test_a_pin_stays_when_a_longer_text_takes_the_place_of_what_was_pinned(sea: Served, user_id: str) -> None:
    pinned = sea.post("/v1/warm", text="Once upon a tide", user_id=user_id)
    sea.post("/v1/cache/pin", id=pinned["entry_id"])
    sea.post("/v1/completions", prompt="Once upon a tide there was", max_tokens=1, user_id=user_id)
    sea.settle()
    sea.clock.seconds += HOUR_S + 1
    sea.post("/v1/cache/gc")
    (entry,) = sea.entries(user_id=user_id)
    assert (entry["id"], entry["tokens"], entry["pinned"]) == (pinned["entry_id"], pinned["tokens"], True)
    assert sea.post("/v1/warm", text="Once upon a tide", user_id=user_id)["evaluated_tokens"] == 0


def test_removing_an_entry_leaves_what_others_build_on(sea: Served, user_id: str) -> None:
    sea.post("/v1/warm", messages=[SYSTEM], user_id=user_id)
    sea.chat(SYSTEM, user("one"), user_id=user_id, conversation_id="one")
    sea.chat(SYSTEM, user("two"), user_id=user_id, conversation_id="two")
    (prefix,) = sea.entries(user_id=user_id, kind="prefix")
    one = next(entry for entry in sea.entries(user_id=user_id) if entry["conversation_id"] == "one")
    assert sea.delete(f"/v1/cache/{one['id']}")["tokens"] < one["tokens"]
    explained = sea.explain(SYSTEM, user("two"), user_id=user_id)
    assert explained["reason"] == "none"
    assert sum(sea.explain(SYSTEM, user("one"), user_id=user_id)["reused"].values()) >= prefix["tokens"]


def test_removing_a_user_leaves_the_others(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Is the pilot there?")]
    sea.chat(*asked, user_id=user_id)
    sea.chat(*asked, user_id=user_id, cache_salt="another room")
    other = sea.chat(*asked, user_id=f"{user_id}-other")
    sea.chat(*asked)
    kept = sea.entries(user_id=f"{user_id}-other")
    without_a_user = sea.entries(user_id="")
    mine = sea.entries(user_id=user_id, kind="conversation")
    removed = sea.delete(f"/v1/cache?user_id={user_id}")
    assert len(mine) == 2
    assert removed["tokens"] == sum(entry["tokens"] for entry in mine)
    assert sea.entries(user_id=user_id) == []
    assert sea.entries(user_id=f"{user_id}-other") == kept
    assert sea.entries(user_id="") == without_a_user
    before = sea.engine.evaluated_tokens
    sea.chat(*asked, user_id=f"{user_id}-other", max_tokens=0)
    assert sea.engine.evaluated_tokens == before
    sea.chat(*asked, user_id=user_id, max_tokens=0)
    assert sea.engine.evaluated_tokens == before + other["usage"]["prompt_tokens"]


def test_those_without_a_name_are_removed_by_an_empty_one(alone: Served) -> None:
    alone.chat(user("I give no name."))
    alone.chat(user("I am ann."), user_id="ann")
    assert alone.delete("/v1/cache?user_id=")["entries"] == 1
    assert [entry["user"] for entry in alone.entries()] == ["ann"]


def test_nothing_is_removed_when_no_user_is_named(sea: Served, user_id: str) -> None:
    sea.chat(user("Do not delete everything."), user_id=user_id)
    before = sea.entries()
    for path in ("/v1/cache", "/v1/cache?all=true", "/v1/cache/"):
        response = sea.client.delete(path)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "user_id"
    assert [entry["id"] for entry in sea.entries()] == [entry["id"] for entry in before]


# ── why ──


def test_nothing_was_ever_stored(sea: Served, user_id: str) -> None:
    explained = sea.explain(user(f"Good morning from {user_id}, for the first time."), user_id=user_id)
    assert explained["reason"] == "new"
    assert explained["divergence"] is None
    assert explained["reused"] == {"hot": 0, "warm": 0, "cold": 0, "remote": 0}
    assert explained["explanation"].startswith(f"0 of {explained['prompt_tokens']} tokens can be reused.")


def test_a_prompt_is_shown_by_where_its_state_is(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Where is “Ångström”? 🙂")]
    answer = sea.chat(*asked, user_id=user_id)
    told = answer["emberkeep"]["sources"]
    assert sum(part["tokens"] for part in told) == answer["usage"]["prompt_tokens"]
    assert told[-1]["from"] == "evaluated"
    now = sea.explain(*asked, user_id=user_id, with_prompt=True)
    assert [(part["from"], part["tokens"]) for part in now["prompt"]] == [
        ("hot", answer["usage"]["prompt_tokens"] - 1),
        ("evaluated", 1),
    ]
    assert "Where is “Ångström”? 🙂" in "".join(part["text"] for part in now["prompt"])
    then = sea.explain(*asked, user_id=user_id, with_prompt=True, sources=told)
    assert [(part["from"], part["tokens"]) for part in then["prompt"]] == [
        (part["from"], part["tokens"]) for part in told
    ]
    assert "".join(part["text"] for part in then["prompt"]) == "".join(part["text"] for part in now["prompt"])
    # What does not add up is not believed.
    wrong = sea.explain(*asked, user_id=user_id, with_prompt=True, sources=[{"from": "cold", "tokens": 3}])
    assert wrong["prompt"] == now["prompt"]
    assert "prompt" not in sea.explain(*asked, user_id=user_id)


@pytest.mark.parametrize(
    "sources", [5, [5], [{"from": "hot"}], [{"from": "here", "tokens": 1}], [{"from": "hot", "tokens": 0}]]
)
def test_sources_that_are_none_are_refused(sea: Served, sources: object) -> None:
    body = {"messages": [user("Hello")], "with_prompt": True, "sources": sources}
    response = sea.client.post("/v1/cache/explain", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("sources")


def test_everything_is_stored(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Are you ready?")]
    answer = sea.chat(*asked, user_id=user_id)
    explained = sea.explain(*asked, user_id=user_id)
    assert explained["reason"] == "none"
    assert explained["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert sum(explained["reused"].values()) == explained["prompt_tokens"] - 1


def test_a_message_was_edited(sea: Served, user_id: str) -> None:
    def history(second: str) -> list[Json]:
        return [SYSTEM, user(second), {"role": "assistant", "content": "At noon."}, user("And tomorrow?")]

    sea.chat(*history("When is low tide?"), user_id=user_id)
    edited = history("When is low water?")
    explained = sea.explain(*edited, user_id=user_id)
    divergence = explained["divergence"]
    assert (explained["reason"], divergence["where"]) == ("edited_message", "message 2 (user)")
    assert divergence["stored_text"].startswith(" tide?<|im_end|>")
    assert divergence["prompt_text"].startswith(" water?<|im_end|>")
    assert divergence["token_index"] == sum(explained["reused"].values())
    assert "Message 2 (user) was edited at token" in explained["explanation"]
    told = sea.chat(*edited, user_id=user_id)["emberkeep"]
    assert (told["reason"], told["divergence"]) == ("edited_message", divergence)


def test_a_new_turn_is_no_edit(sea: Served, user_id: str) -> None:
    sea.chat(SYSTEM, user("Where is the reef?"), user_id=user_id)
    explained = sea.explain(SYSTEM, user("Where is the lighthouse?"), user_id=user_id)
    assert (explained["reason"], explained["divergence"]["where"]) == ("diverged", "message 2 (user)")


def test_the_tools_were_changed(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Which moon is it?")]
    sea.chat(*asked, tools=[tool("tides"), tool("moon")], user_id=user_id)
    explained = sea.explain(*asked, tools=[tool("tides"), tool("moon", "Look up.")], user_id=user_id)
    assert explained["reason"] == "changed_tools"
    assert explained["divergence"]["where"] == "the tool moon"
    assert "The tool moon was changed" in explained["explanation"]
    told = sea.chat(*asked, tools=[tool("tides"), tool("moon", "Look up.")], user_id=user_id)["emberkeep"]
    assert (told["reason"], told["divergence"]["where"]) == ("changed_tools", "the tool moon")


def test_another_order_of_the_tools_changes_nothing(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Which moon is it?")]
    sea.chat(*asked, tools=[tool("tides"), tool("moon")], user_id=user_id)
    told = sea.chat(*asked, tools=[tool("moon"), tool("tides")], user_id=user_id)["emberkeep"]
    assert (told["reason"], told["hygiene"]) == ("none", ["tool-order"])


def test_it_belongs_to_another_user(sea: Served, user_id: str) -> None:
    asked = [user(f"A long question that only {user_id} has ever asked.")]
    sea.chat(*asked, user_id=user_id)
    explained = sea.explain(*asked, user_id=f"{user_id}-other")
    assert explained["reason"] == "other_user"
    assert f"stored for the user {user_id}, and users do not share" in explained["explanation"]
    assert sum(explained["reused"].values()) == 0


def test_the_answer_itself_says_nothing_of_other_users(sea: Served, user_id: str) -> None:
    asked = [user(f"Another long question that only {user_id} has ever asked.")]
    sea.chat(*asked, user_id=user_id)
    assert sea.chat(*asked, user_id=f"{user_id}-other")["emberkeep"]["reason"] == "new"


def test_it_expired(alone: Served) -> None:
    asked = [SYSTEM, user("How long do you remember?")]
    alone.chat(*asked, prompt_cache_retention="24h")
    alone.clock.seconds += 24 * HOUR_S
    assert alone.explain(*asked)["reason"] == "none"
    assert alone.post("/v1/cache/gc")["removed"]["entries"]
    explained = alone.explain(*asked)
    assert explained["reason"] == "expired"
    assert "outlived its TTL" in explained["explanation"]
    assert sum(explained["reused"].values()) == 0


def test_it_was_evicted(narrow: Served) -> None:
    asked = [user("Is there still room for me in here? " * 5)]
    narrow.chat(*asked, user_id="ann")
    crowd(narrow)
    explained = narrow.explain(*asked, user_id="ann")
    assert explained["reason"] == "evicted"
    assert "its room was needed" in explained["explanation"]


def test_it_was_removed(sea: Served, user_id: str) -> None:
    asked = user("What did I just delete?")
    answer = sea.chat(asked, user_id=user_id)["choices"][0]["message"]
    (entry,) = sea.entries(user_id=user_id)
    sea.delete(f"/v1/cache/{entry['id']}")
    explained = sea.explain(asked, answer, user("Well?"), user_id=user_id)
    assert explained["reason"] == "removed"
    assert "removed by request" in explained["explanation"]


def test_of_a_user_who_was_removed_nothing_is_known(sea: Served, user_id: str) -> None:
    asked = [user("Who am I, now that I am gone?")]
    sea.chat(*asked, user_id=user_id)
    sea.delete(f"/v1/cache?user_id={user_id}")
    assert sea.explain(*asked, user_id=user_id)["reason"] == "new"


def test_fresh_evaluation_was_asked_for(sea: Served, user_id: str) -> None:
    asked = [user("Think again.")]
    sea.chat(*asked, user_id=user_id)
    explained = sea.explain(*asked, user_id=user_id, cache_prompt=False)
    assert explained["reason"] == "disabled"
    assert sum(explained["reused"].values()) == 0


def test_a_raw_prompt_is_explained_too(sea: Served, user_id: str) -> None:
    sea.post("/v1/completions", prompt="Once upon a tide", max_tokens=2, user_id=user_id)
    sea.settle()
    explained = sea.post("/v1/cache/explain", prompt="Once upon a time", user_id=user_id)
    assert (explained["reason"], explained["divergence"]["where"]) == ("diverged", None)
    assert explained["divergence"]["prompt_text"] == "me"


def test_explaining_changes_nothing(sea: Served, user_id: str) -> None:
    asked = [SYSTEM, user("Look, but do not touch.")]
    sea.chat(*asked, user_id=user_id)
    before = sea.entries(user_id=user_id), sea.engine.evaluated_tokens
    sea.explain(*asked, user_id=user_id)
    sea.explain(SYSTEM, user("Something else."), user_id=user_id)
    assert (sea.entries(user_id=user_id), sea.engine.evaluated_tokens) == before


# ── whether it is right ──


def test_stored_state_is_verified(alone: Served) -> None:
    for number in range(6):
        alone.chat(user(f"Tell me story number {number}."), user_id="ann", conversation_id=f"c{number}")
        alone.clock.seconds += 1
    latest = [entry["id"] for entry in alone.entries()][:4]
    report = alone.post("/v1/cache/verify")
    assert report["equal"] is True
    assert [result["id"] for result in report["data"]] == latest
    assert all(result["reused"] > 0 for result in report["data"])
    one = alone.entry_of("c0")
    (result,) = alone.post("/v1/cache/verify", ids=[one["id"]], tokens=3)["data"]
    assert result == {
        "id": one["id"],
        "object": "cache.verified",
        "reused": one["tokens"] - 1,
        "wide": 0,
        "narrow": one["tokens"] - 1,
        "reproducible": 0,
        "compared": 3,
        "agreed": 3,
        "equal": True,
    }
    assert len(alone.post("/v1/cache/verify", sample=6)["data"]) == 6


def test_what_was_compared_is_told_by_the_steps_that_computed_it(alone: Served) -> None:
    alone.chat(user("Tell me a long story. " * 40), conversation_id="c")
    entry = alone.entry_of("c")
    (result,) = alone.post("/v1/cache/verify", ids=[entry["id"]])["data"]
    assert result["wide"] == result["reproducible"] >= 256
    assert result["narrow"] == result["reused"] - result["wide"] > 0


def test_wrong_state_is_found(alone: Served) -> None:
    alone.chat(user("Is this really what was computed?"), conversation_id="c")
    entry, another = alone.entry_of("c"), prompt(1000)
    for chunk in chunks_of(alone.backend._store):
        assert chunk.payload is not None
        chunk.payload = exported(another, chunk.start, chunk.end)
    report = alone.post("/v1/cache/verify", ids=[entry["id"]])
    assert report["equal"] is False
    (result,) = report["data"]
    assert result["reused"] == entry["tokens"] - 1
    assert result["agreed"] < result["compared"]


def test_what_is_stored_is_verified_and_not_what_rests_in_the_engine(alone: Served) -> None:
    alone.chat(user("Where does this come from?"), conversation_id="c")
    assert alone.entry_of("c")["tier"] == "hot"
    imported = alone.backend.scheduler.counters.reused_warm_tokens
    (result,) = alone.post("/v1/cache/verify")["data"]
    assert alone.backend.scheduler.counters.reused_warm_tokens == imported + result["reused"] > imported


def test_verifying_leaves_no_trace(alone: Served) -> None:
    alone.chat(user("Do not mind me."), conversation_id="c")
    before = [(entry["id"], entry["tokens"], entry["turns"]) for entry in alone.entries()]
    alone.post("/v1/cache/verify")
    alone.settle()
    assert [(entry["id"], entry["tokens"], entry["turns"]) for entry in alone.entries()] == before


def test_state_that_fills_the_context_can_be_verified(tmp_path: Path) -> None:
    with served(tmp_path, FakeEngine(context=256)) as small:
        small.post("/v1/completions", prompt="~" * 250, max_tokens=6)
        small.settle()
        (result,) = small.post("/v1/cache/verify", tokens=32)["data"]
    assert result["reused"] == 256 - 32 - 1
    assert result["equal"] is True


def test_a_client_that_leaves_stops_the_verification(alone: Served) -> None:
    for number in range(3):
        alone.chat(user(f"Tell me story number {number}."), conversation_id=f"c{number}")
    gate = Gate(alone.engine)
    jobs = alone.backend.scheduler.counters.jobs
    connection = send_raw(alone.server.port, "/v1/cache/verify")
    gate.reached()
    connection.close()
    alone.wait_until_left()
    gate.open()
    alone.settle()
    assert alone.backend.scheduler.counters.jobs == jobs + 1


def test_a_verification_ends_in_time_and_says_what_is_left(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_routes, "VERIFY_S", 0.05)
    for number in range(2):
        alone.chat(user(f"Tell me story number {number}."), conversation_id=f"c{number}")
    gate = Gate(alone.engine)
    report = alone.client.post("/v1/cache/verify", json={}).json()
    gate.open()
    assert report["data"] == []
    assert sorted(report["left"]) == sorted(entry["id"] for entry in alone.entries())


def test_one_verification_runs_at_a_time(alone: Served) -> None:
    alone.chat(user("Tell me a story."), conversation_id="c")
    gate = Gate(alone.engine)
    connection = send_raw(alone.server.port, "/v1/cache/verify")
    gate.reached()
    refused = alone.client.post("/v1/cache/verify", json={})
    gate.open()
    connection.close()
    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
