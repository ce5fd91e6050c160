"""Pictures of what `--json` has written: python -m benchmarks.plot FILE -o PICTURE.svg

A table whose labels begin with a number that grows (`2,048 tokens, cold`, `turn 3`) becomes lines over it, one for
each rest of a label or column; any other becomes bars. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_GROWING = re.compile(r"(?:turn )?(\d[\d,]*)(?: \w+)?(?:, (.+))?$")
_COMPUTED = ("", "×", "%")
"""Units of what was computed from something else that is drawn."""


class Cell(NamedTuple):
    label: str
    column: str
    value: Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    draw(json.loads(given.report.read_text()), given.output)


def draw(report: Mapping[str, Any], output: Path) -> None:
    """One picture below the other. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    titled = [
        (f"{result['name']}: {table['title']}", measured(table))
        for result in report["results"]
        for table in result["tables"]
    ]
    drawn = [(title, cells) for title, cells in titled if cells]
    figure, axes = pyplot.subplots(len(drawn), 1, figsize=(8, 4 * len(drawn)), squeeze=False, layout="constrained")
    for axis, (title, cells) in zip(axes[:, 0], drawn, strict=True):
        axis.set_title(f"{title} ({cells[0].value['unit']})", loc="left")
        lines = lines_of(cells)
        _draw_lines(axis, lines) if lines else _draw_bars(axis, cells)
    figure.savefig(output, transparent=True)


def measured(table: Mapping[str, Any]) -> list[Cell]:
    """All that has the unit of the first quantity in it."""
    cells = [Cell(row["label"], column, value) for row in table["rows"] for column, value in row.items()]
    known = [cell for cell in cells if isinstance(cell.value, dict) and cell.value["unit"] not in _COMPUTED]
    return [cell for cell in known if cell.value["unit"] == known[0].value["unit"]]


def lines_of(cells: list[Cell]) -> dict[str, list[tuple[float, Mapping[str, Any]]]]:
    """By name, from left to right; none unless every label is a number, and there are several."""
    lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for label, column, value in cells:
        match = _GROWING.match(label)
        if match is None:
            return {}
        lines.setdefault(match[2] or column, []).append((float(match[1].replace(",", "")), value))
    has_several = any(len({x for x, _ in points}) > 1 for points in lines.values())
    return (
        {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()} if has_several else {}
    )


def _draw_lines(axis: Any, lines: Mapping[str, list[tuple[float, Mapping[str, Any]]]]) -> None:
    for name, points in lines.items():
        values = [value for _, value in points]
        middle = [value["median"] for value in values]
        below = [value["median"] - value["low"] for value in values]
        above = [value["high"] - value["median"] for value in values]
        axis.errorbar([x for x, _ in points], middle, yerr=[below, above], label=name, marker="o", capsize=2)
    axis.set_yscale("log")
    axis.legend()


def _draw_bars(axis: Any, cells: list[Cell]) -> None:
    axis.barh([f"{label}, {column}" for label, column, _ in cells], [cell.value["median"] for cell in cells])
    axis.invert_yaxis()


if __name__ == "__main__":
    main()
