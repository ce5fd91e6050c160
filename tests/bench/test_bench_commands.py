from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.bench.stage import open_stage
from emberkeep.cli.bench import app
from emberkeep.errors import EmberkeepError, ModelError
from helpers import tiny_gguf
from helpers.commands import run_module
from helpers.valkey_server import running_valkey

pytestmark = pytest.mark.slow


def test_a_stage_leaves_nothing_behind_and_touches_nothing_else(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    (tmp_path / "mine").write_text("keep")
    with open_stage(model, tmp_path, print) as stage:
        assert stage.new_data_dir().is_relative_to(tmp_path)
        assert stage.new_data_dir() != stage.new_data_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "tiny.gguf"]


def test_a_stage_for_a_model_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelError), open_stage(tmp_path / "none.gguf", tmp_path / "data", print):
        pass
    assert list((tmp_path / "data").iterdir()) == []


def refusal(*arguments: str) -> str:
    """Why a benchmark stopped before it had a stage to measure on."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.stderr == ""
    assert isinstance(result.exception, (OSError, EmberkeepError))
    return str(result.exception)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def nothing_is_measured(*_: object) -> None:
        raise AssertionError("a stage was opened")

    monkeypatch.setattr("emberkeep.bench.stage.open_stage", nothing_is_measured)
    return str(tiny_gguf.dense(tmp_path / "tiny.gguf"))


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tiny: str, tmp_path: Path) -> None:
    report = str(tmp_path / "none" / "report.json")
    assert report in refusal("turns", "--quick", "--model", tiny, "--json", report)


@pytest.mark.parametrize(
    "sizes", [["restart", "--tokens", "1000"], ["shared", "--prefix", "1000"], ["speculation"]]
)
def test_sizes_beyond_the_trained_context_are_refused_before_anything_is_measured(
    tiny: str, sizes: list[str]
) -> None:
    sentence = refusal(*sizes, "--model", tiny)
    assert sentence.startswith(f"{sizes[0]} would need ")
    assert sentence.endswith("this model was trained for 1,024: choose smaller sizes or another --model.")


def test_the_help_does_not_threaten_the_folder_that_is_measured() -> None:
    text = " ".join(CliRunner().invoke(app, ["turns", "--help"]).output.split())
    assert "a subfolder of it is used and removed" in text


def test_every_benchmark_runs_and_reports(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    arguments = ("all", "--quick", "--model", str(model), "--data-dir", "data", "--json", "report.json")
    arguments += ("--plot", "plot.svg")
    done = run_module("emberkeep", "bench", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = [result["name"] for result in report["results"]]
    assert names == ["restart", "turns", "shared", "load"]
    assert report["machine"]["cores"] == os.cpu_count()
    cold, disk, ram, hot = report["results"][0]["tables"][0]["rows"]
    assert cold["reused tokens"] == 0
    assert disk["reused tokens"] == ram["reused tokens"] == hot["reused tokens"] > 400 - 128
    assert [row["mostly from"] for row in (disk, ram, hot)] == ["cold", "warm", "hot"]
    assert all(result["name"] in done.stdout for result in report["results"])
    assert list((tmp_path / "data").iterdir()) == []
    picture = (tmp_path / "plot.svg").read_text()
    assert all(f">{name}: " in picture for name in ("restart", "turns", "load"))


def test_what_another_host_evaluated_is_measured_through_a_server(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    with running_valkey(tmp_path) as valkey:
        arguments = ("hosts", "--quick", "--server", valkey.url, "--model", str(model), "--json", "report.json")
        done = run_module("emberkeep", "bench", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    evaluated, remote, disk = result["tables"][0]["rows"]
    assert [row["mostly from"] for row in (evaluated, remote, disk)] == ["-", "remote", "cold"]
    assert remote["evaluated tokens"]["median"] < 64 < evaluated["evaluated tokens"]["median"]


def test_a_benchmark_of_hosts_needs_their_server() -> None:
    assert "--server" in CliRunner().invoke(app, ["hosts"]).stderr
    assert isinstance(CliRunner().invoke(app, ["hosts", "--server", "http://x"]).exception, EmberkeepError)


def test_a_model_that_is_not_there_is_explained(tmp_path: Path) -> None:
    done = run_module("emberkeep", "bench", "turns", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
