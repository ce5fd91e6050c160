"""A user who is deleted from one of two servers on a folder: no endpoint and no file shows anything of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from emberkeep.types.request import Json
from helpers.server_process import ServerProcess
from helpers.stored_chats import files_of, possible_prompts, said, start

CANARY = "xqcanari"
USER = f"{CANARY}-ann"


def messages(turns: int, system: str = "You are a helper.") -> list[Json]:
    talk = [{"role": "system", "content": f"{system} The word is {CANARY}es. " * 12}]
    for turn in range(turns):
        talk.append({"role": "user", "content": f"{CANARY}es number {turn}, what of them? " * 6})
        talk.append({"role": "assistant", "content": f"{CANARY}es are as they are, {turn}. " * 6})
    return [*talk, {"role": "user", "content": f"And now, {CANARY}es?"}]


def ask(server: ServerProcess, turns: int, **fields: Json) -> None:
    server.chat(messages(turns), max_tokens=8, user_id=USER, **fields)


def in_flight(server: ServerProcess, started: threading.Event) -> None:
    """An answer that is being written while its user is deleted."""
    body = {"messages": messages(5, "Go on."), "stream": True, "max_tokens": 400, "user_id": USER}
    with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                started.set()
    started.set()


def settled(server: ServerProcess) -> None:
    for _ in range(10_000):
        stats = server.stats()
        if not stats["scheduler"]["active"] and not stats["store"]["cold"]["pending_chunks"]:
            return
    raise AssertionError(stats)


def shown_by(server: ServerProcess) -> list[str]:
    """Whatever can be asked for without naming a user, and each entry that is listed."""
    paths = json.loads(server.http.get(f"{server.url}/openapi.json").text)["paths"]
    asked = [path for path, methods in paths.items() if "get" in methods and "{" not in path]
    asked += [f"/v1/memory/facts?user_id={USER}", f"/v1/memory/conversations?user_id={USER}"]
    asked += [f"/v1/memory/search?user_id={USER}&query={CANARY}es", f"/v1/memory/export?user_id={USER}"]
    listed = server.http.get(f"{server.url}/v1/cache").json()["data"]
    asked += [f"/v1/cache/{entry['id']}" for entry in listed]
    texts = {path: server.http.get(f"{server.url}{path}").text for path in asked}
    assert len(texts) > 8
    return [path for path, text in texts.items() if CANARY in text.lower().replace(USER + "&query", "")]


def traces() -> list[bytes]:
    (ids,) = possible_prompts([said(m["role"], m["content"]) for m in messages(0)])
    (word,) = possible_prompts([said("user", f" {CANARY}es number")])
    starts = range(40, len(ids) - 12, 5)
    windows = [np.array(ids[at : at + 10], "<i4").tobytes() for at in starts]
    return [CANARY.encode(), np.array(word[-24:-8], "<i4").tobytes(), *windows]


def found_in(folder: Path) -> list[str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [str(p) for p in files if any(trace in p.read_bytes().lower() for trace in traces())]


@pytest.mark.slow
def test_nothing_of_a_deleted_user_is_shown_or_stored_by_any_server_of_the_folder(tmp_path: Path) -> None:
    with start(tmp_path, "--ram-budget", "65536") as here, start(tmp_path, "--ram-budget", "65536") as there:
        for server in (here, there):
            for turns in range(1, 8):
                ask(server, turns, conversation_id=f"{CANARY}-talk")
            server.chat(messages(3)[:3] + messages(1)[-1:], max_tokens=8, user_id=USER)
            server.http.put(f"{server.url}/v1/memory/facts/town?user_id={USER}", json={"value": f"{CANARY}es"})
            settled(server)
        damaged = files_of(tmp_path, USER)[2]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        ask(there, 7)
        bystander = there.chat([{"role": "user", "content": "Hello there, who is it? " * 20}], max_tokens=8)
        settled(there)
        assert len(found_in(tmp_path)) > 10 and "/v1/cache" in shown_by(there)
        assert f"{CANARY}es" not in there.http.get(f"{there.url}/v1/stats").text
        running = [(server, threading.Event()) for server in (here, there)]
        talks = [threading.Thread(target=in_flight, args=pair) for pair in running]
        for talk, (_, started) in zip(talks, running, strict=True):
            talk.start()
            assert started.wait(60)
        for path in (f"/v1/cache?user_id={USER}", f"/v1/memory?user_id={USER}"):
            response = here.http.delete(f"{here.url}{path}")
            assert response.status_code == 200, response.text
        for talk in talks:
            talk.join()
        for server in (here, there):
            server.chat([{"role": "user", "content": "Another user."}], max_tokens=4)
            settled(server)
            assert shown_by(server) == []
        assert found_in(tmp_path) == []
        here.stop()
        there.stop()
    assert found_in(tmp_path) == []
    with start(tmp_path) as again:
        assert shown_by(again) == []
        same = again.chat([{"role": "user", "content": "Hello there, who is it? " * 20}], max_tokens=8)
        assert same.text == bystander.text and same.cached_tokens == same.prompt_tokens - 1
        again.stop()
    assert found_in(tmp_path) == []
