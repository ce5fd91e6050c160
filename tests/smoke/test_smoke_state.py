"""What is kept and found again: from turn to turn, after a restart, a kill, a damage, a client that left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from emberkeep.types.request import Json
from helpers.commands import emberkeep
from helpers.server_process import Reply, ServerLives, ServerProcess, assistant, system, user
from helpers.stored_chats import cold, files_of, is_all_reused, store_folder
from helpers.waiting import eventually

GREEDY: Json = {"speculation": False, "max_tokens": 8}
SYSTEM = "You are the keeper of a lighthouse on a small island. You count ships, you write down the weather. " * 4
"""Of more than one chunk together with a question."""
LONG: Json = {"speculation": False, "max_tokens": 1800, "ignore_eos": True}
"""An answer that takes far longer than leaving it."""
OTHER = "a-bystander"


def talk(me: str, *turns: Json) -> list[Json]:
    return [system(f"{SYSTEM} Today {me} asks."), user("How many ships came in?"), *turns]


def ask(server: ServerProcess, me: str, *turns: Json) -> Reply:
    return server.chat(talk(me, *turns), user_id=me, **GREEDY)


def beginning(reply: Reply) -> str:
    """The first word. The last token of a prompt rounds otherwise when it is evaluated alone, as after a reuse,
    than beside all others, and which word is the likeliest may change with that, sooner or later."""
    return reply.text.split()[0]


def test_the_next_turn_evaluates_only_what_is_new(server: ServerProcess, me: str) -> None:
    first = ask(server, me)
    second = ask(server, me, assistant(first.text), user("And who was it?"))
    assert (first.cached_tokens, first.detail["reason"]) == (0, "new")
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 2
    assert second.prompt_tokens - second.cached_tokens < 24


def test_a_chat_in_the_terminal_asks_the_running_server(server: ServerProcess, data_dir: Path) -> None:
    before = answered(server)
    said = emberkeep(data_dir, "chat", "-t", "0", "--max-tokens", "6", "What is a lighthouse?")
    assert said.stdout.strip()
    assert answered(server) == before + 1


def answered(server: ServerProcess) -> int:
    jobs: int = server.http.get(f"{server.url}/v1/stats").json()["scheduler"]["jobs"]
    return jobs


def test_users_share_nothing(server: ServerProcess, me: str) -> None:
    alice = server.chat(talk(me), user_id=f"{me}-alice", **GREEDY)
    bob = server.chat(talk(me), user_id=f"{me}-bob", **GREEDY)
    assert alice.cached_tokens == bob.cached_tokens == 0
    assert alice.text == bob.text


def test_an_answer_without_the_cache_is_the_same(server: ServerProcess, me: str) -> None:
    ask(server, me)
    cached, fresh = ask(server, me), server.chat(talk(me), user_id=me, cache_prompt=False, **GREEDY)
    assert is_all_reused(cached)
    assert fresh.cached_tokens == 0
    assert beginning(cached) == beginning(fresh)


def test_a_stopping_server_finishes_its_answer_and_the_next_one_finds_everything(
    lives: ServerLives, me: str
) -> None:
    server, facts = lives.now, f"/v1/memory/facts/town?user_id={me}"
    ask(server, me)
    first = ask(server, me)
    assert is_all_reused(first)
    assert server.http.put(f"{server.url}{facts}", json={"value": "Lorient"}).status_code == 200
    body = {"messages": talk(f"{me}-late"), "temperature": 0, "user_id": me, "stream": True, **GREEDY}
    with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.terminate()
        assert "data: [DONE]" in list(lines)
    assert server.exit_code() == 0
    again = ask(lives.now, me)
    assert is_all_reused(again)
    assert again.text == first.text
    assert lives.now.http.get(f"{lives.now.url}{facts}").json()["value"] == "Lorient"


def test_after_a_kill_state_is_found_or_missed_and_never_wrong(lives: ServerLives, me: str) -> None:
    stored = ask(lives.now, f"{me}-early")
    lives.now.wait_until_stored()
    just_answered = ask(lives.now, f"{me}-late")
    facts = f"/v1/memory/facts/town?user_id={me}"
    assert lives.now.http.put(f"{lives.now.url}{facts}", json={"value": "Brest"}).status_code == 200
    lives.now.kill()
    found = ask(lives.now, f"{me}-early")
    assert found.cached_tokens >= found.prompt_tokens - 3
    assert beginning(found) == beginning(stored)
    assert beginning(ask(lives.now, f"{me}-late")) == beginning(just_answered)
    assert lives.now.http.get(f"{lives.now.url}{facts}").json()["value"] == "Brest"
    assert cold(lives.now)["damaged_chunks"] == 0


def test_a_damaged_file_is_put_aside_and_its_tokens_are_evaluated_again(
    lives: ServerLives, data_dir: Path, me: str
) -> None:
    first = ask(lives.now, me)
    lives.now.stop()
    damaged = files_of(data_dir, me)[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    again = ask(lives.now, me)
    assert again.cached_tokens == 0
    assert again.text == first.text
    assert cold(lives.now)["damaged_chunks"] == 1
    assert list((store_folder(data_dir) / "quarantine").glob(f"{damaged.stem}.*"))
    assert is_all_reused(ask(lives.now, me))


def test_a_client_that_leaves_stops_the_work_and_what_was_computed_is_kept(server: ServerProcess, me: str) -> None:
    body = {"messages": talk(me), "temperature": 0, "user_id": me, "stream": True, **LONG}
    with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if '"content"' in line)
        text = "".join(
            json.loads(next(lines)[len("data: ") :])["choices"][0]["delta"]["content"] for _ in range(6)
        )
    assert eventually(lambda: not server.stats()["scheduler"]["active"])
    assert "the client left" in server.log
    assert text
    assert is_all_reused(ask(server, me))


def test_of_a_forgotten_user_no_byte_is_left(server: ServerProcess, data_dir: Path, me: str) -> None:
    ids = server.http.post(f"{server.url}/tokenize", json={"content": f"Today {me} asks."}).json()["tokens"]
    trace = np.array(ids[2:-3], "<i4").tobytes()

    def found() -> list[Path]:
        files = (path for path in data_dir.rglob("*") if path.is_file())
        return [path for path in files if trace in (data := path.read_bytes()) or me.encode() in data]

    ask(server, me)
    other = ask(server, OTHER)
    server.http.put(f"{server.url}/v1/memory/facts/town?user_id={me}", json={"value": "Lorient"})
    server.wait_until_stored()
    assert found()
    for path in ("/v1/cache", "/v1/memory"):
        response = server.http.delete(f"{server.url}{path}", params={"user_id": me})
        assert response.status_code == 200, response.text
    assert found() == []
    assert ask(server, me).cached_tokens == 0
    assert is_all_reused(ask(server, OTHER)) and other.cached_tokens == 0
