"""The benchmarks of the Hugging Face engine, on tiny models: do they measure what they say?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.benchmarks import measure

pytestmark = pytest.mark.slow


def rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in table["rows"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that only transformers can read."""
    from helpers import tiny_hf

    return tiny_hf.write(tmp_path / "tiny")


def test_turns_reuse_what_the_turn_before_left(folder: Path, tmp_path: Path) -> None:
    first, *later, summary = measure(tmp_path, "hf-turns", "--quick", "--model", str(folder))["tables"][0]["rows"]
    assert "reuse" not in first
    # Answers of this model are bytes that are no text, and a client that sends text back loses them.
    assert all(90 < row["reuse"]["median"] <= 100 for row in later)
    assert all(row["transformers"]["median"] > 0 for row in (first, *later, summary))


def test_passages_are_moved_in_every_way_but_the_full_prefill(folder: Path, tmp_path: Path) -> None:
    found = rows(measure(tmp_path, "rag", "--quick", "--model", str(folder))["tables"][0])
    assert list(found) == ["full prefill", "none", "selective", "cacheblend"]
    moved = {way: row["moved"]["median"] for way, row in found.items()}
    repaired = {way: row["repaired"]["median"] for way, row in found.items()}
    layers = {way: row["token-layers"]["median"] for way, row in found.items()}
    assert moved["full prefill"] == 0 < moved["selective"] < moved["none"] == moved["cacheblend"]
    assert repaired["none"] == repaired["selective"] == 0 < repaired["cacheblend"] < moved["cacheblend"]
    assert layers["full prefill"] == 100 > layers["cacheblend"] > layers["none"]


def test_questions_of_a_file_are_asked(folder: Path, tmp_path: Path) -> None:
    passages = [{"text": f"{word} " * 60} for word in ("alpha", "beta", "gamma", "delta")]
    asked = {"question": "Which?", "answers": ["beta"], "ctxs": passages}
    (tmp_path / "questions.json").write_text(json.dumps([asked]))
    result = measure(
        tmp_path, "rag", "--quick", "--model", str(folder), "--questions", str(tmp_path / "questions.json")
    )
    assert result["tables"][0]["title"].startswith("1 questions of about 400 tokens")


def test_every_part_of_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    tables = measure(tmp_path, "gpu", "--quick", "--device", "cpu")["tables"]
    streamed, drafted, memory, prompt, state, turns, decode, *_ = tables
    assert [row["label"].split(":")[0] for row in streamed["rows"]][1:3] == ["auto", "ffn"]
    assert list(drafted["rows"][0])[1:3] == ["plain", "with drafts"]
    alone, stored, hot, ram = prompt["rows"]
    assert alone["reused tokens"] == stored["reused tokens"] == 0
    assert hot["reused tokens"] == ram["reused tokens"] == 511
    assert len(memory["rows"][0]["used / predicted"]["samples"]) == 30
    assert "refused" in memory["rows"][1]["predicted"]
    assert list(rows(state)) == ["pinned copy to the device", "loaded", "stored"]
    assert [row["new tokens"] for row in turns["rows"]] == [288, 32, 32]
    assert list(rows(decode)) == ["batch of 1", "batch of 8"]


def test_the_gpu_benchmark_runs_without_the_command_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "benchmarks.gpu",
        "--parts",
        "decode",
        "--quick",
        "--device",
        "cpu",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([*command, "--json", "gpu.json"], cwd=tmp_path, env=env, capture_output=True, text=True)
    (table,) = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert table["title"] == "a decode step after 64 tokens"
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"llama_cpp", "typer", "rich", "starlette", "pydantic", "llguidance"}
