from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import made_up_turns
from helpers.benchmarks import measure

pytestmark = pytest.mark.slow


def test_made_up_turns_are_the_same_wherever_one_begins() -> None:
    turns = list(made_up_turns(2003, begin=0))
    assert len({turn.key for turn in turns}) == 2003
    assert list(made_up_turns(1, begin=2000)) == [turns[2000]]
    assert len({turn.user_text for turn in turns}) == 2003


def test_the_benchmark_finds_what_it_asks_for_and_reports_the_file(tmp_path: Path) -> None:
    sizes = ["--turns", "2500", "--searches", "20", "--writes", "10"]
    searches, file = measure(tmp_path, "memory", *sizes, "--data-dir", str(tmp_path / "data"))["tables"]
    rows = {row["label"]: row for row in searches["rows"]}
    assert rows["search, rare words"]["found"] == rows["search, a whole message"]["found"] == "100%"
    assert len(rows["search, all of them"]["time"]["samples"]) == 20
    assert len(rows["archive one turn"]["time"]["samples"]) == 10
    assert file["rows"][0]["turns"] == 2500 and file["rows"][0]["bytes per turn"] > 200
    assert list((tmp_path / "data").iterdir()) == []
