from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from benchmarks import replay
from benchmarks.replay import RESPONSES, ReplayPlan
from emberkeep.bench.servers import BenchClient, TimedExchange
from helpers import tiny_gguf
from helpers.benchmarks import ScriptedWorkspace, measure

pytestmark = pytest.mark.slow


def talks(folder: Path, *names: str, turns: int = 3) -> Path:
    file = folder / "talks.json"
    said = [
        {"from": who, "value": f"{who} {turn} of {name}"}
        for name in names
        for turn in range(turns)
        for who in ("human", "gpt")
    ]
    size = 2 * turns
    entries = [{"id": name, "conversations": said[size * i : size * i + size]} for i, name in enumerate(names)]
    file.write_text(json.dumps(entries))
    return file


class ScriptedServer:
    """Answers in its own way, without a model; one that is told of a fire refuses."""

    started: ClassVar[list[ScriptedServer]] = []

    def __init__(self, workspace: object, data_dir: Path, **_: object) -> None:
        self.port = len(self.started)
        self.bodies: list[Any] = []
        self.started.append(self)
        self.client = ScriptedClient(self.port)
        (data_dir / "serve.log").write_text(f"life {self.port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class ScriptedClient(BenchClient):
    async def post(self, path: str, body: Any) -> TimedExchange:
        ScriptedServer.started[self._port].bodies.append(json.loads(json.dumps(body)))
        if "fire" in body["messages"][-1]["content"]:
            return TimedExchange(0.0, 0.0, 0.0, b'HTTP/1.1 500 Error\r\n\r\n{"error": "it burns"}')
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        frame = {"choices": [{"delta": {"content": "hm"}}], "usage": usage, "timings": {"predicted_ms": 1.0}}
        return TimedExchange(0.0, 0.5, 1.0, f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(frame)}\n\n".encode())

    async def wait_until_settled(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedServer]:
    monkeypatch.setattr(ScriptedServer, "started", [])
    monkeypatch.setattr(replay, "OwnServer", ScriptedServer)
    return ScriptedServer.started


def played(folder: Path, plan: ReplayPlan) -> dict[str, Any]:
    return asyncio.run(replay.run(ScriptedWorkspace(folder), plan)).json()


def test_the_server_is_killed_half_way_and_every_conversation_goes_on(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    rows = played(tmp_path, ReplayPlan(talks(tmp_path, "a", "b", turns=4)))["tables"][0]["rows"]
    assert [len(server.bodies) for server in servers] == [4, 4]
    assert [row["label"] for row in rows] == ["turn 1", "turn 2", "turn 3", "turn 4", "after a restart", "all"]
    assert [row["requests"] for row in rows] == [2, 2, 2, 2, 2, 8]
    assert (rows[-1]["reused"], rows[-1]["evaluated"], rows[-1]["share"]) == (32, 48, "40.0 %")
    last = [message["content"] for message in servers[1].bodies[-1]["messages"]]
    assert last == ["human 0 of b", "hm", "human 1 of b", "hm", "human 2 of b", "hm", "human 3 of b"]


def test_what_was_answered_then_is_sent_back_if_wanted(servers: list[ScriptedServer], tmp_path: Path) -> None:
    played(tmp_path, ReplayPlan(talks(tmp_path, "a"), recorded=True, restart_every=1))
    assert [len(server.bodies) for server in servers] == [1, 1, 1]
    assert servers[2].bodies[0]["messages"][1] == {"role": "assistant", "content": "gpt 0 of a"}


def test_a_conversation_ends_with_a_failure_and_the_others_go_on(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    table, failures = played(tmp_path, ReplayPlan(talks(tmp_path, "a", "fire"), out=tmp_path / "out"))["tables"]
    assert (table["rows"][-1]["requests"], table["rows"][-1]["failures"]) == (4, 1)
    assert failures["rows"][0]["label"] == "fire, turn 1"
    assert "it burns" in failures["rows"][0]["failure"]
    lines = [json.loads(line) for line in (tmp_path / "out" / RESPONSES).read_text().splitlines()]
    assert ["failure" in line for line in lines] == [False, True, False, False]
    assert "500 Error" in lines[1]["response"]
    assert (tmp_path / "out" / "server-2.log").read_text() == "life 1"


def test_real_servers_go_on_from_what_was_written(tmp_path: Path) -> None:
    file, out = talks(tmp_path, "a", "b", turns=2), tmp_path / "out"
    arguments = (
        "--model",
        str(tiny_gguf.dense(tmp_path / "tiny.gguf")),
        "--answer-tokens",
        "4",
        "--out",
        str(out),
    )
    result = measure(tmp_path, "replay", "--file", str(file), *arguments)
    rows = {row["label"]: row for row in result["tables"][0]["rows"]}
    assert rows["after a restart"]["requests"] == 2 and rows["all"]["failures"] == 0
    assert "cold" in rows["after a restart"]["mostly from"]
    assert rows["after a restart"]["reused"] > 20
    assert {path.name for path in out.iterdir()} == {"server-1.log", "server-2.log", RESPONSES}
    assert "ready at" in (out / "server-2.log").read_text()
