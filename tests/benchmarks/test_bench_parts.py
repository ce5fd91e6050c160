from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from emberkeep.errors import EmberkeepError
from helpers import tiny_gguf

pytestmark = pytest.mark.slow


def run_benchmarks(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("EMBERKEEP_")}
    env |= {"XDG_CONFIG_HOME": str(cwd), "XDG_DATA_HOME": str(cwd)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_sizes_beyond_the_trained_context_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["miss", "--model", str(tiny_gguf.dense(tmp_path / "tiny.gguf"))])
    assert result.stderr == ""
    assert isinstance(result.exception, EmberkeepError)
    assert str(result.exception).startswith("miss would need ")


def test_every_benchmark_that_needs_no_files_of_others_runs_and_reports(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    arguments = ("all", "--quick", "--model", str(model), "--data-dir", "data", "--json", "report.json")
    done = run_benchmarks(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = [result["name"] for result in report["results"]]
    assert names == ["restart", "turns", "shared", "miss", "load", "bits", "store", "memory", "crowd", "endless"]
    assert all(result["name"] in done.stdout for result in report["results"])
    assert list((tmp_path / "data").iterdir()) == []


def test_an_error_is_explained_as_the_command_line_does(tmp_path: Path) -> None:
    done = run_benchmarks("miss", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
