from __future__ import annotations

from pathlib import Path

import pytest

from helpers import tiny_gguf
from helpers.benchmarks import measure
from helpers.valkey_server import running_valkey

pytestmark = pytest.mark.slow


def test_what_another_host_evaluated_is_measured_through_a_server(tmp_path: Path) -> None:
    model = str(tiny_gguf.dense(tmp_path / "tiny.gguf"))
    with running_valkey(tmp_path) as valkey:
        result = measure(tmp_path, "hosts", "--quick", "--server", valkey.url, "--model", model)
    evaluated, remote, disk = result["tables"][0]["rows"]
    assert [row["mostly from"] for row in (evaluated, remote, disk)] == ["-", "remote", "cold"]
    assert remote["evaluated tokens"]["median"] < 64 < evaluated["evaluated tokens"]["median"]
