"""Long prompts with the real default model: what was evaluated once is never evaluated again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers.server_process import RULES, ServerProcess, assistant, serve, system, user

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(smollm2, tmp_path_factory.mktemp("data")) as server:
        yield server


def prompt_ids(server: ServerProcess, messages: list[Json]) -> list[int]:
    prompt = server.http.post(f"{server.url}/apply-template", json={"messages": messages}).json()["prompt"]
    return list(server.http.post(f"{server.url}/tokenize", json={"content": prompt}).json()["tokens"])


def test_an_edit_in_the_middle_costs_only_what_follows_it(server: ServerProcess) -> None:
    def conversation(pier: str) -> list[Json]:
        rules = RULES.replace("pier 3 ", f"pier {pier} ")
        return [system("Edited. " + rules), user("Who waits?"), assistant("Type 6."), user("Who else?")]

    first, second = conversation("three"), conversation("four")
    server.chat(first, max_tokens=1)
    reply = server.chat(second, max_tokens=1)
    ids = zip(prompt_ids(server, first), prompt_ids(server, second), strict=False)
    shared = next(index for index, (a, b) in enumerate(ids) if a != b)
    assert 100 < shared < reply.prompt_tokens - 100
    assert reply.cached_tokens == shared
    assert reply.detail["reason"] == "edited_message"
    assert reply.detail["divergence"]["where"] == "message 1 (system)"
    assert reply.detail["divergence"]["token_index"] == shared


def test_a_prompt_that_was_given_up_halfway_is_continued(server: ServerProcess) -> None:
    messages = [system("Given up. " + " ".join([RULES] * 3)), user("Who pays most?")]
    body = {"messages": messages, "stream": True, "return_progress": True, "temperature": 0, "max_tokens": 1}
    with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        line = next(line for line in response.iter_lines() if "prompt_progress" in line)
    progress = json.loads(line.removeprefix("data: "))["prompt_progress"]
    assert 0 < progress["processed"] < progress["total"] / 2
    reply = server.chat(messages, max_tokens=1)
    assert reply.prompt_tokens == progress["total"]
    assert progress["processed"] <= reply.cached_tokens < reply.prompt_tokens - 1
