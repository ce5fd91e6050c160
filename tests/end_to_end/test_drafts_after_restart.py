"""What a user was told before is drafted when it is asked for again: after a kill, and for nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers.server_process import START_S, ServerProcess, serve, system, user
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

FILE = """\
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side cannot be negative")
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""
EDIT = f"Repeat this file and rename `area` to `surface`:\n{FILE}"


def edit(server: ServerProcess, name: str, before: str = "You edit files.") -> tuple[str, Json]:
    body = {"messages": [system(before), user(EDIT)], "temperature": 0, "max_tokens": 60, "user_id": name}
    response = server.http.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens_details"]


def sources(server: ServerProcess) -> set[str]:
    return {name for name, each in server.stats()["speculation"]["sources"].items() if each["accepted_tokens"]}


def test_the_same_edit_starts_with_accepted_drafts_after_a_kill_but_not_for_another_user(
    smollm2: Path, tmp_path: Path
) -> None:
    with serve(smollm2, tmp_path) as server:
        first, _ = edit(server, "alice")
        server.wait_until_stored()
        server.kill()
    with serve(smollm2, tmp_path) as server:
        edit(server, "bob")
        assert not sources(server) & {"path", "corpus"}
        again, details = edit(server, "alice")
        assert "path" in sources(server)
        assert details["accepted_prediction_tokens"] > 30
        assert again[:20] == first[:20]


def test_another_session_of_the_same_user_is_drafted_from_what_is_stored(smollm2: Path, tmp_path: Path) -> None:
    with serve(smollm2, tmp_path) as server:
        edit(server, "alice")
        server.wait_until_stored()
        server.kill()
    with serve(smollm2, tmp_path) as server:
        edit(server, "bob", "Another session.")
        assert "corpus" not in sources(server)
        server.chat([user("Hello!")], max_tokens=2, user_id="alice")
        assert eventually(lambda: server.stats()["store"]["warm"] and corpus_tokens(server) > 100, START_S)
        edit(server, "alice", "You are in another session now, and edit files.")
        assert "corpus" in sources(server)


def corpus_tokens(server: ServerProcess) -> int:
    return int(server.stats()["store"]["corpus"]["tokens"])
