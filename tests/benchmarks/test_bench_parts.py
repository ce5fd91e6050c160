from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from emberkeep.errors import EmberkeepError
from helpers import tiny_gguf
from helpers.commands import run_module

pytestmark = pytest.mark.slow


def test_sizes_beyond_the_trained_context_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["miss", "--model", str(tiny_gguf.dense(tmp_path / "tiny.gguf"))])
    assert result.stderr == ""
    assert isinstance(result.exception, EmberkeepError)
    assert str(result.exception).startswith("miss would need ")


def test_every_benchmark_that_needs_no_files_of_others_runs_and_reports(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    arguments = ("all", "--quick", "--model", str(model), "--data-dir", "data", "--json", "report.json")
    done = run_module("benchmarks", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = [result["name"] for result in report["results"]]
    assert names == ["restart", "turns", "shared", "miss", "load", "bits", "store", "memory", "crowd", "endless"]
    assert all(result["name"] in done.stdout for result in report["results"])
    assert list((tmp_path / "data").iterdir()) == []


def test_an_error_is_explained_as_the_command_line_does(tmp_path: Path) -> None:
    done = run_module("benchmarks", "miss", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
