"""`emberkeep cache` where a server runs on the same data folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from emberkeep.cli.cache import app
from emberkeep.cli.cache_stores import ServedStore
from emberkeep.cli.running_server import RunningServer
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.server.presence import announce
from emberkeep.types.request import Json
from helpers.commands import Commands
from helpers.kept_chats import WAIT_S, asking, keep, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("data_dir")]

commands = Commands(app)
run, ok = commands.run, commands.ok


@pytest.fixture
def url(data_dir: Path) -> Iterator[str]:
    with serving(Config(data_dir=data_dir)) as url:
        yield url


def ask(url: str, question: str, **more: Json) -> Json:
    body = {"messages": asking(question), "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    # What comes after an answer (its closing tokens, its entry) must be there for the next command.
    while httpx.get(f"{url}/v1/stats").json()["scheduler"]["active"]:
        pass
    return answer.json()


def cached(answer: Json) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def listed() -> list[Json]:
    return json.loads(ok("ls", "--json"))


def test_the_server_tells_what_is_in_its_engine_and_in_ram(url: str) -> None:
    ask(url, "Which ships are here?", user_id="alice", conversation_id="harbour-1")
    (entry,) = listed()
    assert (entry["conversation_id"], entry["user"], entry["model"]) == ("harbour-1", "alice", "fake")
    assert entry["tiers"]["hot"] == entry["tiers"]["warm"] == entry["tokens"]
    row = ok("ls").splitlines()[1]
    assert row.startswith("harbour-1: Which ships are here? ")
    assert "engine, RAM" in row


def test_what_is_removed_is_not_reused_by_the_server(url: str) -> None:
    assert cached(ask(url, "Which ships are here?", user_id="alice")) == 0
    assert cached(ask(url, "Which ships are here?", user_id="alice")) > 0
    (entry,) = listed()
    assert ok("rm", entry["id"][:5]).startswith("Removed 1 entry, ")
    assert cached(ask(url, "Which ships are here?", user_id="alice")) == 0
    ask(url, "Which ships are here?", user_id="bob")
    assert ok("rm", "--user", "alice", "--yes").startswith("Removed 1 entry, ")
    assert [entry["user"] for entry in listed()] == ["bob"]


def test_a_pin_reaches_the_server(url: str) -> None:
    ask(url, "Which ships are here?")
    (entry,) = listed()
    assert "is pinned" in ok("pin", entry["id"])
    assert httpx.get(f"{url}/v1/cache").json()["data"][0]["pinned"] is True
    assert "not pinned" in ok("unpin", entry["id"])
    assert httpx.get(f"{url}/v1/cache").json()["data"][0]["pinned"] is False
    assert "Nothing has outlived" in ok("gc")


def test_the_server_reads_explains_and_verifies(url: str) -> None:
    ask(url, "Which ships are here?")
    (entry,) = listed()
    assert "<|im_start|>user\nWhich ships are here?<|im_end|>" in ok("show", entry["id"])
    assert "of 4 tokens can be reused." in ok("explain", "--prompt", "ahoy")
    Path("request.json").write_text(json.dumps({"model": "another name", "messages": asking("Which boats?")}))
    said = ok("explain", "request.json")
    assert "goes on differently" in said
    assert "message 1 (user)" in said
    said = ok("verify", "--tokens", "8")
    assert "files" not in said
    assert "1 entry replayed, 100.0% of 8 tokens agree." in said
    assert "0 of" in said
    assert "reproduced to the bit" in said


def test_stores_of_other_models_are_listed_beside_it(data_dir: Path, url: str) -> None:
    keep(data_dir, "Who is at sea?", model="other", user="alice")
    ask(url, "Which ships are here?", user_id="alice")
    assert {entry["model"] for entry in listed()} == {"fake", "other"}
    assert ok("rm", "--user", "alice", "--yes").startswith("Removed 2 entries, ")
    assert listed() == []


def test_a_server_that_wants_a_key_gets_it_from_the_configuration(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Config(data_dir=data_dir, api_key="canary")):
        refused = run("ls")
        assert isinstance(refused.exception, EmberkeepError)
        assert "EMBERKEEP_API_KEY" in str(refused.exception)
        monkeypatch.setenv("EMBERKEEP_API_KEY", "canary")
        assert "Nothing is stored" in ok("ls")


def test_what_the_server_refuses_is_told_in_its_words(url: str) -> None:
    ask(url, "Which ships are here?")
    result = run("explain", "--prompt", "ahoy", "--user", "not a name")
    assert isinstance(result.exception, EmberkeepError)
    assert "user_id" in str(result.exception)
    assert isinstance(run("show", "zz").exception, NoSuchEntry)


def test_a_server_that_does_not_answer_is_left_alone(data_dir: Path) -> None:
    keep(data_dir, "Which ships are here?")
    with announce(data_dir, "http://127.0.0.1:1"):
        (entry,) = listed()
    assert entry["tier"] == "cold"


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
