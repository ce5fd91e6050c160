from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkeep.engine.fake import CHATML
from emberkeep.types import Json
from helpers import tiny_gguf
from helpers.commands import emberkeep
from helpers.server_process import ServerProcess

pytest.importorskip("ray", reason="needs the extra emberkeep[cluster]")
pytestmark = [pytest.mark.slow, pytest.mark.serial]


def status(data_dir: Path) -> Json:
    told = emberkeep(data_dir, "cluster", "status", "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_a_cluster_of_a_real_engine_is_started_updated_looked_at_and_stopped(tmp_path: Path) -> None:
    model, data_dir = tiny_gguf.dense(tmp_path / "tiny.gguf", template=CHATML), tmp_path / "data"
    settings = ("--model", str(model), "--port", "0", "--cluster-replicas", "2", "--data-dir", str(data_dir))
    with ServerProcess("-m", "emberkeep", "cluster", "serve", *settings) as server:
        assert server.chat([{"role": "user", "content": "hello"}], max_tokens=4).completion_tokens == 4
        before = status(data_dir)
        assert (before["state"], before["url"]) == ("running", server.url)
        assert [about["replica"] for about in before["replicas"]] == ["0", "1"]

        again = emberkeep(data_dir, "cluster", "serve", *settings)
        assert again.returncode == 1
        assert "runs on" in again.stderr

        changed = emberkeep(data_dir, "cluster", "update", *settings, "--ctx", "256")
        assert changed.returncode == 0, changed.stderr
        after = status(data_dir)
        assert after["url"] == server.url
        assert not {about["pid"] for about in before["replicas"]} & {about["pid"] for about in after["replicas"]}
        assert server.http.get(f"{server.url}/v1/models").json()["data"][0]["context_length"] == 256

        server.stop()
        assert "Traceback" not in server.log
    gone = emberkeep(data_dir, "cluster", "status")
    assert gone.returncode == 1
    assert "emberkeep cluster serve" in gone.stderr
