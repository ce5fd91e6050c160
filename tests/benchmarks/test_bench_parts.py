from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import ALL, OURS, main
from emberkeep.errors import EmberkeepError
from helpers import tiny_gguf
from helpers.benchmarks import measure
from helpers.commands import run_module

SLOW = pytest.mark.slow


def test_without_a_name_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().err.splitlines()}
    assert all(len(listed[name]) > 20 for name in OURS)


def test_flags_are_those_of_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, wrong in (
        (["hosts"], "--server"),
        (["store", "--peer", "x"], "--peer"),
        (["juggle"], "juggle"),
    ):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert wrong in capsys.readouterr().err + str(refused.value)


@SLOW
def test_sizes_beyond_the_trained_context_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(EmberkeepError, match="choose smaller sizes or another --model"):
        measure(tmp_path, "miss", "--model", str(tiny_gguf.dense(tmp_path / "tiny.gguf")))


@SLOW
def test_every_benchmark_that_needs_no_files_of_others_runs_and_reports(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    arguments = ("all", "--quick", "--model", str(model), "--data-dir", "data", "--json", "report.json")
    done = run_module("benchmarks", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = [result["name"] for result in report["results"]]
    assert names == list(ALL)
    assert list((tmp_path / "data").iterdir()) == []


@SLOW
def test_an_error_is_explained_as_the_command_line_does(tmp_path: Path) -> None:
    done = run_module("benchmarks", "miss", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
