from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from emberkeep.bench.report import BenchResult, Row, Table, percentile, ratios, render, series

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


def test_a_result_is_printed_as_markdown() -> None:
    output = StringIO()
    Console(file=output, width=200).print(*render(RESULT), sep="\n")
    title, head, rule, cold, disk, note = [line.strip() for line in output.getvalue().splitlines() if line.strip()]
    assert title == "## restart: time to first token"
    assert [cell.strip() for cell in head.split("|")] == ["", "", "TTFT", "reused", "from", ""]
    assert set(rule) == {"|", "-"}
    assert [cell.strip() for cell in cold.split("|")] == ["", "cold", "7,000 ms (6,900–7,100)", "", "", ""]
    assert [cell.strip() for cell in disk.split("|")] == ["", "disk", "41.2 ms", "2,796", "cold", ""]
    assert note == "- Loading the model is in neither."


@pytest.mark.parametrize(
    ("samples", "unit", "expected"),
    [
        ([1.0123], "×", "1.012×"),
        ([204.4, 210.0, 190.0], "×", "204× (190–210)"),
        ([-0.5, 3.25], "%", "1.375 % (-0.500–3.25)"),
        ([12345.6], "MB/s", "12,346 MB/s"),
        ([5.0, 5.0], "ms", "5.00 ms"),
        ([7.0], "", "7.00"),
    ],
)
def test_a_series_reads_as_median_and_spread(samples: list[float], unit: str, expected: str) -> None:
    assert str(series(samples, unit)) == expected


def test_the_json_keeps_every_sample_in_order() -> None:
    result = json.loads(json.dumps(RESULT.json()))
    cold, disk = result["tables"][0]["rows"]
    assert cold["TTFT"] == {
        "median": 7000.4,
        "low": 6900.0,
        "high": 7100.0,
        "unit": "ms",
        "samples": [7000.4, 7100.0, 6900.0],
    }
    assert (disk["label"], disk["reused"], disk["from"]) == ("disk", 2796, "cold")


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios(series([10, 40], "ms"), series([5, 10], "ms")).samples == (2, 4)
    with pytest.raises(ValueError, match="shorter"):
        ratios(series([1, 2], "ms"), series([1], "ms"))


@pytest.mark.parametrize(("percent", "expected"), [(95, 19), (100, 20), (50, 10), (1, 1), (0, 1)])
def test_a_percentile_is_one_of_the_samples(percent: float, expected: float) -> None:
    assert percentile([float(n) for n in range(20, 0, -1)], percent) == expected
