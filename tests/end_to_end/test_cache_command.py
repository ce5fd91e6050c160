"""`emberkeep cache` as a person types it: beside a running server, and after it was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emberkeep.types.request import Json
from helpers.serve_command import serve, system, user

pytestmark = pytest.mark.slow


def cache(data_dir: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "emberkeep", "cache", *arguments, "--data-dir", str(data_dir)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == status, done.stderr
    return done.stdout


def entries(data_dir: Path) -> list[Json]:
    return json.loads(cache(data_dir, "ls", "--json"))


def conversation(data_dir: Path) -> Json:
    (entry,) = [entry for entry in entries(data_dir) if entry["kind"] == "conversation"]
    return entry


def test_the_cache_is_looked_after_with_and_without_a_server(smollm2: Path, tmp_path: Path) -> None:
    messages = [system(), user("What does a ship of type 9 pay?")]
    with serve(smollm2, tmp_path) as server:
        server.chat(messages, max_tokens=8, conversation_id="harbour")
        server.wait_until_stored()
        entry = conversation(tmp_path)
        assert (entry["conversation_id"], entry["tier"]) in (("harbour", "hot"), ("harbour", "warm"))
        assert "harbour" in cache(tmp_path, "pin", entry["id"][:6])
        assert "What does a ship of type 9 pay?<|im_end|>" in cache(tmp_path, "show", entry["id"])
        (tmp_path / "request.json").write_text(json.dumps({"messages": messages}))
        assert "are stored; the last one is always evaluated." in cache(
            tmp_path, "explain", str(tmp_path / "request.json")
        )
        assert "1 entry replayed" in cache(tmp_path, "verify", entry["id"], "--tokens", "8")
        server.stop()
    assert list((tmp_path / "servers").iterdir()) == []
    with serve(smollm2, tmp_path) as server:
        assert server.gets_ready()
        server.kill()
    assert conversation(tmp_path)["pinned"] is True
    assert conversation(tmp_path)["tier"] == "cold"
    checked = cache(tmp_path, "verify", entry["id"], "--tokens", "8", "--model", str(smollm2))
    assert " 0 damaged." in checked
    assert "100.0% of 8 tokens agree." in checked
    assert "Removed 2 entries" in cache(tmp_path, "rm", *(entry["id"] for entry in entries(tmp_path)))
    with serve(smollm2, tmp_path) as server:
        assert server.chat(messages, max_tokens=1).cached_tokens == 0
