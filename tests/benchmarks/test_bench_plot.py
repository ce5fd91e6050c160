from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot import draw, lines_of, measured


def table(*labels: str, unit: str = "ms") -> dict[str, Any]:
    value = {"median": 2.0, "low": 1.0, "high": 3.0, "unit": unit}
    ratio = {**value, "unit": "×"}
    return {
        "title": "t",
        "rows": [{"label": label, "TTFT": value, "ratio": ratio, "count": 7} for label in labels],
    }


@pytest.mark.parametrize(
    ("labels", "lines"),
    [
        (("501 tokens, cold", "501 tokens, disk", "1,001 tokens, cold"), {"cold": [501, 1001], "disk": [501]}),
        (("turn 2", "turn 1"), {"TTFT": [1, 2]}),
        (("501 tokens, cold",), {}),
        (("streaming", "turn 1"), {}),
    ],
)
def test_labels_that_grow_become_lines(labels: tuple[str, ...], lines: dict[str, list[float]]) -> None:
    found = lines_of(measured(table(*labels)))
    assert {name: [x for x, _ in points] for name, points in found.items()} == lines


def test_a_report_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = [table("turn 1", "turn 2"), table("streaming"), table("all", unit="×")]
    draw({"results": [{"name": "turns", "tables": tables}]}, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().count("turns: t (ms)</text>") == 2
