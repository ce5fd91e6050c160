"""A server's cache, read by a command."""

from __future__ import annotations

from pathlib import Path

import httpx

from emberkeep.cli.cache_stores import ServedStore
from emberkeep.cli.running_server import RunningServer

PAGE = 3


def entry(number: int) -> dict[str, object]:
    names = ("tokens", "bytes", "last_used_s", "hits", "turns", "branches", "expires_in_s")
    told: dict[str, object] = dict.fromkeys(names, 0)
    return told | {
        "id": f"entry-{number}",
        "kind": "conversation",
        "conversation_id": None,
        "head": "",
        "user": None,
        "shared": False,
        "kv_bits": 16,
        "repair": None,
        "tiers": {"hot": 0, "warm": 0, "cold": 0},
        "ttl": "long",
        "pinned": False,
    }


def answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/stats":
        return httpx.Response(200, json={"model": "tiny", "store": {"folder": None}})
    offset = int(request.url.params.get("offset", 0))
    numbers = [0, 1, 2, 2, 3, 4, 5][offset : offset + PAGE]  # one moved to the next page meanwhile
    has_more = offset + PAGE < 7
    return httpx.Response(200, json={"data": [entry(number) for number in numbers], "has_more": has_more})


def test_entries_of_all_pages_are_listed_once() -> None:
    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        entries = ServedStore(RunningServer(http), "tiny", Path("data"), {}).entries()
    assert [found.id for found in entries] == [f"entry-{number}" for number in range(6)]
