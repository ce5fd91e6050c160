"""What was measured is kept: whole, readable by itself, not for ever, and never at the cost of measuring."""

from __future__ import annotations

import json
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

from emberkeep.bench.figures import series
from emberkeep.bench.kept_results import KEPT, keep_result
from emberkeep.bench.report import BenchResult, Row, Table
from helpers import tiny_gguf
from helpers.commands import run_module

AROUND = {
    "emberkeep": "1",
    "when": "before",
    "command": ["bench", "load"],
    "machine": {"cores": 2},
    "versions": {},
}
LOAD = BenchResult(
    "load",
    (
        Table(
            "eight clients",
            (Row("streaming", {"server": series([40.0, 44.0], "ms"), "bare": series([9.0], "ms")}),),
        ),
        Table("counts", (Row("all", {"requests": 3, "how": "well"}),)),
    ),
    ("a note",),
)


def test_a_file_has_everything_and_pictures_that_need_nothing_else(tmp_path: Path) -> None:
    path = keep_result(tmp_path / "new" / "benchmarks", LOAD, AROUND)
    told = json.loads(path.read_text())
    assert path.name.endswith("-load.json") and path.stat().st_mode & 0o777 == 0o600
    assert told.pop("when") > "2020"
    (picture,) = told.pop("pictures")
    assert told == {**LOAD.json(), **{name: value for name, value in AROUND.items() if name != "when"}}
    root = Xml.fromstring(picture["svg"])
    assert (
        picture["title"] == "load: eight clients" and root.find(".//{http://www.w3.org/2000/svg}style") is not None
    )


@pytest.mark.usefixtures("quick_disk")
def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    made = [keep_result(tmp_path, LOAD, AROUND) for _ in range(KEPT + 3)]
    assert made == sorted(made)
    assert sorted(tmp_path.iterdir()) == [*made[3:], tmp_path / "mine.json"]


def test_a_name_becomes_a_part_of_a_file_name(tmp_path: Path) -> None:
    path = keep_result(tmp_path, BenchResult("../Odd name", ()), AROUND)
    assert path.parent == tmp_path and path.name.endswith("-odd-name.json")


@pytest.mark.slow
def test_a_run_keeps_each_of_its_results(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    done = run_module("emberkeep", "bench", "shared", "--quick", "--model", str(model), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "emberkeep" / "benchmarks").iterdir()
    told = json.loads(kept.read_text())
    assert (told["name"], told["model"]["file"]) == ("shared", "tiny.gguf")
    assert told["command"][:3] == ["bench", "shared", "--quick"]
    (row,) = told["tables"][0]["rows"]
    assert row["label"] == "6 sessions" and told["notes"]


@pytest.mark.slow
def test_what_cannot_be_kept_is_one_line_and_no_error(tmp_path: Path) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    (tmp_path / "emberkeep").mkdir()
    (tmp_path / "emberkeep" / "benchmarks").write_text("a file where the folder should be")
    arguments = ("shared", "--quick", "--model", str(model), "--json", "report.json")
    done = run_module("emberkeep", "bench", *arguments, cwd=tmp_path)
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("…"))
    assert line.startswith("shared is not kept for the server's page (") and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["results"]
