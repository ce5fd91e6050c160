"""How `emberkeep serve` begins and ends, and what it says when it cannot begin."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from emberkeep.types.request import Json
from helpers.server_process import ServerProcess, serve, user
from helpers.tiny_gguf import ENDINGS, dense

pytestmark = pytest.mark.slow

LONG = {
    "max_tokens": 900,
    "temperature": 0,
    "stream": True,
    "logit_bias": {str(token): -100 for token in ENDINGS},
}
"""An answer that fills the context."""
OF_THE_MACHINE = (" INFO memory of ", " INFO RAM is copied at ")
LOOP_BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return dense(path, template="{% for message in messages %}{{ message.content }}{% endfor %}")


def last_words(server: ServerProcess, loading: str | None = None) -> str:
    """What a server that did not start said, which must be one sentence, after the steps of `loading` a model if
    it came so far; the log may have told of its machine."""
    assert server.exit_code() == 1
    said = [line for line in server.log.splitlines() if " INFO " not in line]
    assert said, "it said nothing"
    *steps, words = said
    assert are_steps(steps, loading) if loading else not steps, server.log
    return words


def are_steps(lines: list[str], model: str) -> bool:
    """Whether they tell how loading began and went on, nothing else, and nothing twice in a row."""
    first, *later = f"Loading {model}", f"Checking {model}", f"Trying out {model}, once"
    is_news = all(line != before for before, line in pairwise(lines))
    return lines[:1] == [first] and {*lines} <= {first, *later} and is_news


def frames(response: httpx.Response) -> Iterator[Json]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def wait_until_draining(server: ServerProcess) -> None:
    while server.http.get(f"{server.url}/health").status_code == 200:
        pass


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_server_stops_at_once_and_without_complaint(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as server:
        server.chat([user("hello")], max_tokens=4)
        server.stop()
        # What its machine is like is told once it was measured, which is when nothing is asked for a second.
        lines = [line for line in server.log.splitlines() if not any(told in line for told in OF_THE_MACHINE)]
        steps, banner, asked = lines[:-6], lines[-6:-1], lines[-1]
        assert are_steps(steps, "tiny"), server.log
        assert [line.split()[0] for line in banner] == ["Emberkeep", "page", "model", "data", "stop"], server.log
        assert " INFO " in asked and "POST /v1/chat/completions 200: " in asked


def test_a_stopping_server_finishes_its_answers_and_takes_no_new_ones(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as server:
        completions = f"{server.url}/v1/chat/completions"
        with server.http.stream("POST", completions, json={"messages": [user("hello")], **LONG}) as response:
            answer = frames(response)
            next(answer)
            server.terminate()
            wait_until_draining(server)
            refused = server.http.post(completions, json={"messages": [user("me too")]})
            finishes = [choice["finish_reason"] for frame in answer for choice in frame["choices"]]
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "length" in finishes
        assert server.exit_code() == 0


def test_a_second_signal_ends_the_answers_too(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as server:
        body = {"messages": [user("hello")], **LONG}
        with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            answer = frames(response)
            next(answer)
            server.terminate()
            wait_until_draining(server)
            server.terminate()
            *_, last = answer
        assert "ask again" in last["error"]["message"]
        assert server.exit_code() == 0
    with serve(model, tmp_path) as server:
        reply = server.chat([user("hello")], max_tokens=4)
        assert reply.cached_tokens == reply.prompt_tokens - 1


# ── beginnings that fail ─────────────────────────────────────────────────────────────────────────


def test_a_taken_port_is_named_with_the_way_out(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(model, tmp_path, "--port", str(port)) as server:
            words = last_words(server)
    assert str(port) in words
    assert "--port" in words


@pytest.mark.parametrize("kept", [0, 3, 100, 0.5, 0.999])
def test_a_model_file_that_is_cut_off_is_refused(model: Path, tmp_path: Path, kept: float) -> None:
    data = model.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: int(len(data) * kept) if 0 < kept < 1 else int(kept)])
    with serve(broken, tmp_path) as server:
        assert "broken.gguf" in last_words(server, loading="broken")


def test_a_template_that_is_no_template_is_refused(tmp_path: Path) -> None:
    with serve(dense(tmp_path / "odd.gguf", template="{% for %}"), tmp_path) as server:
        assert "template" in last_words(server, loading="odd")


def test_a_template_that_never_ends_costs_its_own_requests_only(tmp_path: Path) -> None:
    with serve(dense(tmp_path / "bomb.gguf", template=LOOP_BOMB), tmp_path) as server:
        refused = server.http.post(f"{server.url}/v1/chat/completions", json={"messages": [user("hello")]})
        assert refused.status_code == 400
        assert "template" in refused.json()["error"]["message"]
        assert server.http.get(f"{server.url}/health").status_code == 200
        plain = server.http.post(f"{server.url}/v1/completions", json={"prompt": "hello", "max_tokens": 4})
        assert plain.status_code == 200
        server.stop()


def test_other_weights_in_the_same_file_reuse_nothing(tmp_path: Path) -> None:
    model, replies = tmp_path / "tiny.gguf", []
    for seed in (0, 1, 0):
        with serve(dense(model, seed=seed), tmp_path) as server:
            replies.append(server.chat([user("hello there, harbour")], max_tokens=16))
            server.stop()
    first, other, again = replies
    assert other.cached_tokens == 0
    assert other.text != first.text
    assert again.cached_tokens == again.prompt_tokens - 1
    assert again.text == first.text
