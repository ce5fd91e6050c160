"""`GET /v1/cache/tree`: what is stored, by where texts part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.types.request import Json
from helpers.cache_server import SYSTEM, Served, served, user
from helpers.scripted_server import ScriptedBackend, running


@pytest.fixture
def sea(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as sea:
        yield sea


def tree(sea: Served, **query: str | int) -> Json:
    response = sea.client.get("/v1/cache/tree", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_empty_store_is_an_empty_tree(sea: Served) -> None:
    assert tree(sea) == {
        "nodes": [],
        "object": "cache.tree",
        "totals": {"tokens": 0, "bytes": 0, "chunks": 0},
    }


def test_two_chats_with_the_same_beginning_are_one_stem_with_two_branches(sea: Served) -> None:
    sea.post("/v1/warm", messages=[SYSTEM])  # else its entry may come a moment later
    sea.chat(SYSTEM, user("When is high tide?"))
    second = sea.chat(SYSTEM, user("When is low tide?"))
    shared = second["emberkeep"]["divergence"]["token_index"]
    stem, *branches = tree(sea)["nodes"]
    assert (stem["start"], stem["end"], stem["below"], stem["parent"]) == (0, shared, 2, None)
    assert [one["start"] for one in branches] == [shared, shared]
    assert [one["parent"] for one in branches] == [stem["id"]] * 2
    heads = {end["head"]: end for one in branches for end in one["entries"]}
    assert set(heads) == {"When is high tide?", "When is low tide?"}
    assert all(end["latest"] and not end["pinned"] for end in heads.values())
    (prefix,) = stem["entries"]
    assert (prefix["kind"], prefix["position"] < shared) == ("prefix", True)
    assert {prefix["id"], *(end["id"] for end in heads.values())} == {entry["id"] for entry in sea.entries()}
    assert stem["tiers"]["hot"] == shared


def test_everything_is_in_it(sea: Served) -> None:
    for name in range(5):
        sea.chat(SYSTEM, user(f"{name} boats come in, and " * 9), user_id=f"user-{name % 2}")
    told, stored = tree(sea), sea.client.get("/v1/stats").json()["store"]["cold"]
    assert told["totals"]["tokens"] == stored["tokens"] == sum(node["own_tokens"] for node in told["nodes"])
    assert told["totals"]["bytes"] == stored["bytes"]
    assert {node["user"] for node in told["nodes"]} == {"user-0", "user-1"}
    for limit in (1, 2, 3, 4):
        few = tree(sea, limit=limit)
        assert len(few["nodes"]) <= limit
        assert few["totals"] == told["totals"]
    assert sum(node["branches"] for node in tree(sea, limit=2)["nodes"]) > 0


def test_a_part_of_it_can_be_looked_at(sea: Served) -> None:
    for name in ("high", "low"):
        sea.chat(SYSTEM, user(f"When is {name} tide?"))
    _, branch, _ = tree(sea)["nodes"]
    (alone,) = tree(sea, at=branch["id"])["nodes"]
    assert alone == {**branch, "parent": None}


def test_a_part_that_has_gone_is_a_404(sea: Served) -> None:
    for at in ("0123456789abcdef", "nonsense", "~x"):
        response = sea.client.get("/v1/cache/tree", params={"at": at})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "at")
        assert "look at the whole" in response.json()["error"]["message"]


def test_pins_and_tiers_are_told(sea: Served) -> None:
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    sea.post("/v1/cache/pin", id=sea.entry_of("tides")["id"])
    sea.backend.scheduler.forget({""}).result(60)
    (node,) = tree(sea)["nodes"]
    assert node["pinned"] and node["entries"][0]["pinned"]
    assert node["tiers"] == {"hot": 0, "warm": node["tokens"], "cold": 0}


def test_there_is_no_entry_of_that_name(sea: Served) -> None:
    assert sea.client.delete("/v1/cache/tree").status_code == 405


def test_a_backend_without_a_store_has_an_empty_tree() -> None:
    with running(ScriptedBackend(), Config()) as server:
        assert httpx.get(f"{server.url}/v1/cache/tree").json()["nodes"] == []
