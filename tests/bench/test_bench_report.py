from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from emberkeep.bench.figures import series
from emberkeep.bench.report import BenchResult, Row, Table, readable_series, render, report_json
from emberkeep.bench.surroundings import surroundings
from emberkeep.errors import EngineError

pytestmark = pytest.mark.slow

RESULT = BenchResult(
    "restart",
    (
        Table(
            "time to first token",
            (
                Row("cold", {"TTFT": series([7000.4, 7100.0, 6900.0], "ms")}),
                Row("disk", {"TTFT": series([41.23], "ms"), "reused": 2796, "from": "cold"}),
            ),
        ),
    ),
    ("Loading the model is in neither.",),
)


def printed(result: BenchResult) -> list[str]:
    output = StringIO()
    console = Console(file=output, width=200)
    for part in render(result):
        console.print(part)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_table_has_every_column_that_any_row_has() -> None:
    assert RESULT.tables[0].columns == ["TTFT", "reused", "from"]


def test_a_result_prints_as_plain_aligned_text() -> None:
    title, head, cold, disk, note = printed(RESULT)
    assert title == "restart: time to first token"
    assert head.split() == ["TTFT", "reused", "from"]
    assert cold.split() == ["cold", "7,000", "ms", "(6,900–7,100)"]
    assert disk.split() == ["disk", "41.2", "ms", "2,796", "cold"]
    assert note.strip() == "Loading the model is in neither."
    assert "\x1b" not in "".join(printed(RESULT))


@pytest.mark.parametrize(
    ("samples", "unit", "expected"),
    [
        ([1.0123], "×", "1.012×"),
        ([204.4, 210.0, 190.0], "×", "204× (190–210)"),
        ([-0.5, 3.25], "%", "1.375 % (-0.500–3.25)"),
        ([12345.6], "MB/s", "12,346 MB/s"),
        ([5.0, 5.0], "ms", "5.00 ms"),
    ],
)
def test_a_series_reads_as_median_and_spread(samples: list[float], unit: str, expected: str) -> None:
    assert readable_series(series(samples, unit)) == expected


def test_the_json_report_has_the_surroundings_and_the_raw_samples() -> None:
    report = json.loads(json.dumps(report_json([RESULT], {"machine": {"cores": 2}})))
    assert report["machine"] == {"cores": 2}
    (result,) = report["results"]
    cold, disk = result["tables"][0]["rows"]
    assert cold["label"] == "cold"
    assert cold["TTFT"]["samples"] == [7000.4, 7100.0, 6900.0]
    assert disk["reused"] == 2796
    assert result["notes"] == ["Loading the model is in neither."]


def test_a_machine_without_llama_cpp_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise EngineError("llama.cpp (auto) is not installed.")

    monkeypatch.setattr("emberkeep.bench.surroundings.version", missing)
    machine = surroundings(None, tmp_path)["machine"]
    assert isinstance(machine, dict) and machine["llama.cpp"] == "not installed"
