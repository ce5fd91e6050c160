"""Prefixes that are ready before the first request, in a real server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers.server_process import RULES, Reply, ServerProcess, serve, system, user

pytestmark = pytest.mark.slow

PATIENCE_S = 240.0


def ask(server: ServerProcess, text: str, question: str, **fields: Json) -> Reply:
    return server.chat([system(text), user(question)], max_tokens=4, **fields)


def entries(server: ServerProcess, **query: str) -> list[Json]:
    return list(server.http.get(f"{server.url}/v1/cache", params=query).json()["data"])


def until(server: ServerProcess, condition) -> list[Json]:
    """Looks at the cache again and again until it is as wanted."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if condition(listed := entries(server)):
            return listed
    raise AssertionError(f"never came about: {listed}")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(RULES)
    return path


def own_tokens(reply: Reply) -> int:
    return reply.prompt_tokens - reply.cached_tokens


def test_a_warm_prefix_is_ready_stays_ready_and_survives_a_kill(
    smollm2: Path, tmp_path: Path, rules: Path
) -> None:
    data = tmp_path / "data"
    quick = tmp_path / "quick.toml"
    quick.write_text("ttl = {short = 3}\nsweep_s = 1\n")
    options = ("--warm", str(rules), "--config", str(quick))
    with serve(smollm2, data, *options) as server:
        (prefix,) = until(server, lambda listed: len(listed) == 1 and listed[0]["turns"])
        assert (prefix["kind"], prefix["shared"], prefix["ttl"]) == ("prefix", True, "short")
        first = ask(server, RULES, "Who waits?", user_id="alice", conversation_id="a")
        assert own_tokens(first) < 20 < prefix["tokens"] == first.cached_tokens
        # It is touched again and again while its TTL goes by.
        turns = prefix["turns"]
        later = until(server, lambda listed: _of(listed, prefix)["turns"] >= turns + 4)
        assert _of(later, prefix)["expires_in_s"] > 0
        evaluated = server.stats()["scheduler"]["evaluated_tokens"]
        second = ask(server, RULES, "Who pays?", user_id="bob")
        assert own_tokens(second) < 20
        assert server.stats()["scheduler"]["evaluated_tokens"] - evaluated < 40
        server.wait_until_stored()
        server.kill()
    with serve(smollm2, data, *options) as server:
        third = ask(server, RULES, "Who sails?", user_id="carol")
        assert own_tokens(third) < 20
        assert server.stats()["scheduler"]["evaluated_tokens"] < 40


def _of(listed: list[Json], entry: Json) -> Json:
    return next(other for other in listed if other["id"] == entry["id"])
