"""What `emberkeep bench` tells of what it measured, and what it refuses before it measures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.bench import start
from emberkeep.bench.servers import OURS, PEER
from emberkeep.cli.bench import KINDS, app
from emberkeep.errors import EmberkeepError
from helpers import scripted_llama_server, tiny_gguf
from helpers.commands import run_module

MODEL_HERE = pytest.mark.slow


@pytest.fixture(autouse=True)
def _settings_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_DATA_DIR", str(tmp_path / "settings"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("accuracy --questions FILE", "accuracy was removed: run `make bench ARGS=accuracy` from a checkout."),
        ("cluster --trace FILE", "make bench ARGS=cluster"),
        ("report DIR", "--json FILE"),
        ("turns --plot x.svg", "--plot was removed: --json FILE"),
        ("juggle", "there is no juggle: choose restart, turns, load, start, peers or all."),
        ("turns --tokens 500", "--tokens does not belong to turns."),
        ("peers", "peers needs --peer."),
    ],
)
def test_what_is_not_here_says_what_is(arguments: str, sentence: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_the_help_names_every_kind_and_does_not_threaten_the_folder_that_is_measured() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert all(about in text for about in KINDS.values())
    assert "a subfolder of it is used and removed" in text


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    report = str(tmp_path / "none" / "report.json")
    result = CliRunner().invoke(app, ["turns", "--quick", "--json", report])
    assert isinstance(result.exception, OSError) and report in str(result.exception)


@MODEL_HERE
def test_a_model_with_too_little_context_is_refused(tmp_path: Path) -> None:
    model = str(tiny_gguf.dense(tmp_path / "tiny.gguf"))
    result = CliRunner().invoke(app, ["restart", "--tokens", "1000", "--model", model])
    assert isinstance(result.exception, EmberkeepError) and "trained for 1,024" in str(result.exception)


def test_a_start_is_compared_with_the_other_server_in_both_ways() -> None:
    starts = {
        f"{OURS}, first time": [{"ready": 4.0}],
        f"{OURS}, remembered": [{"ready": 3.0}],
        PEER: [{"ready": 2.0}],
    }
    values = start.row("ready", starts).values
    assert [str(values[f"{OURS}, {way} / {PEER}"]) for way in ("first time", "remembered")] == ["2.00×", "1.500×"]


@MODEL_HERE
def test_every_kind_runs_and_reports(tmp_path: Path) -> None:
    model, program = tiny_gguf.dense(tmp_path / "tiny.gguf"), scripted_llama_server.install(tmp_path)
    arguments = ("all", "peers", "--quick", "--model", str(model), "--peer", str(program))
    done = run_module(
        "emberkeep", "bench", *arguments, "--data-dir", "data", "--json", "report.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    restart, turns, _, starts, peers = report["results"]
    assert [result["name"] for result in report["results"]] == list(KINDS)
    assert (report["cores"], report["model"]) == (os.cpu_count(), str(model))
    assert report["machine"]["platform"] in done.stdout
    assert list((tmp_path / "data").iterdir()) == []

    cold, disk, ram, hot = restart["tables"][0]["rows"]
    assert cold["reused tokens"] == 0
    assert disk["reused tokens"] == ram["reused tokens"] == hot["reused tokens"] > 400 - 128
    assert [row["mostly from"] for row in (disk, ram, hot)] == ["cold", "warm", "hot"]
    first, *later, _ = turns["tables"][0]["rows"]
    assert "reuse" not in first and all(90 < row["reuse"]["median"] <= 100 for row in later)
    assert f"{OURS}, remembered / {PEER}" in starts["tables"][0]["rows"][0]

    waits, rates = peers["tables"]
    cold, *warm = waits["rows"]
    assert max(cold["reused by us"], cold["by llama-server"]) < 25  # what the template begins with
    assert len(warm) == 4 and all(row["reused by us"] > 250 and row["by llama-server"] > 70 for row in warm)
    assert all(len(row["ratio"]["samples"]) == 2 for row in (*waits["rows"], *rates["rows"]))
    assert scripted_llama_server.VERSION in peers["notes"][0] and "--parallel 2" in peers["notes"][0]


@MODEL_HERE
def test_a_model_that_is_not_there_is_explained(tmp_path: Path) -> None:
    done = run_module("emberkeep", "bench", "turns", "--model", "none.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
