from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import OURS, main
from emberkeep.errors import EmberkeepError
from helpers import scripted_llama_server, tiny_gguf
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
@pytest.mark.parametrize(
    "name", ["limit", "decoding", "watched", "shared", "miss", "doors", "bits", "store", "crowd", "streams"]
)
def test_a_benchmark_that_needs_no_files_of_others_runs_and_reports(name: str, tmp_path: Path) -> None:
    model, data = tiny_gguf.dense(tmp_path / "tiny.gguf"), tmp_path / "data"
    result = measure(tmp_path, name, "--quick", "--model", str(model), "--data-dir", str(data))
    assert result["name"] == name
    assert all(len(row) > 1 for table in result["tables"] for row in table["rows"])
    assert list(data.iterdir()) == []


@SLOW
def test_both_servers_are_measured_beside_a_busy_process(tmp_path: Path) -> None:
    model, program = tiny_gguf.dense(tmp_path / "tiny.gguf"), scripted_llama_server.install(tmp_path)
    result = measure(tmp_path, "busy", "--quick", "--model", str(model), "--peer", str(program))
    assert [row["label"] for row in result["tables"][0]["rows"]] == ["1 streams", "2 streams"]


@SLOW
def test_an_error_is_explained_as_the_command_line_does(tmp_path: Path) -> None:
    done = run_module("benchmarks", "miss", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
