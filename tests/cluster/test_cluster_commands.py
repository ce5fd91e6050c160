from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from emberkeep.engine.fake import CHATML
from emberkeep.types.request import Json
from helpers import tiny_gguf
from helpers.commands import run_module
from helpers.server_process import ServerProcess

pytest.importorskip("ray", reason="needs the extra emberkeep[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.serial]


def cluster(data_dir: Path, *arguments: str) -> CompletedProcess[str]:
    return run_module("emberkeep", "cluster", *arguments, "--data-dir", str(data_dir), cwd=data_dir.parent)


def status(data_dir: Path) -> Json:
    told = cluster(data_dir, "status", "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_a_cluster_of_a_real_engine_is_started_updated_looked_at_and_stopped(tmp_path: Path) -> None:
    model, data_dir = tiny_gguf.dense(tmp_path / "tiny.gguf", template=CHATML), tmp_path / "data"
    settings = ("--model", str(model), "--port", "0", "--replicas", "2")
    with ServerProcess("-m", "emberkeep", "cluster", "serve", *settings, "--data-dir", str(data_dir)) as server:
        assert server.chat([{"role": "user", "content": "hello"}], max_tokens=4).completion_tokens == 4
        before = status(data_dir)
        assert (before["state"], before["url"]) == ("running", server.url)
        assert [about["replica"] for about in before["replicas"]] == ["0", "1"]

        again = cluster(data_dir, "serve", *settings)
        assert again.returncode == 1
        assert "runs on" in again.stderr

        changed = cluster(data_dir, "update", *settings, "--ctx", "256")
        assert changed.returncode == 0, changed.stderr
        after = status(data_dir)
        assert after["url"] == server.url
        assert not {about["pid"] for about in before["replicas"]} & {about["pid"] for about in after["replicas"]}
        assert server.http.get(f"{server.url}/v1/models").json()["data"][0]["context_length"] == 256

        server.stop()
        assert "Traceback" not in server.log
    gone = cluster(data_dir, "status")
    assert gone.returncode == 1
    assert "emberkeep cluster serve" in gone.stderr
