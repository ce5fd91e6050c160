"""What of a benchmark is worth a picture: a table becomes lines over what grows, or bars below each other.

2,048 tokens, cold   TTFT      lines: one for `cold` and one for `disk`, over tokens
2,048 tokens, disk   TTFT
turn 1               TTFT      lines: one for each column, over turns
streaming            tokens/s  bars: one for each column, below the row's label
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from emberkeep.bench.figures import Series
from emberkeep.bench.report import BenchResult, Table
from emberkeep.values import dataclass

_GROWING = re.compile(r"(?:(?P<what>turn) )?(?P<number>\d[\d,]{0,20})(?: (?P<unit>\w+))?(?:, (?P<rest>.+))?$")
_COMPARED = frozenset({"", "×", "%"})
"""Units of what was computed from something else that is drawn."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: Series


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[Point, ...]
    """From left to right."""


@dataclass(frozen=True, slots=True)
class Lines:
    title: str
    unit: str
    along: str
    """What grows from left to right."""
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    name: str
    """What is compared within a label; empty if there is only one."""
    value: Series


@dataclass(frozen=True, slots=True)
class Bars:
    title: str
    unit: str
    bars: tuple[Bar, ...]


Chart = Lines | Bars


def charts_of(results: Iterable[BenchResult]) -> list[Chart]:
    charts = (_chart(f"{result.name}: {table.title}", table) for result in results for table in result.tables)
    return [chart for chart in charts if chart is not None]


def _chart(title: str, table: Table) -> Chart | None:
    """None: there is nothing in it that was measured."""
    bars = list(_measured(table))
    if not bars:
        return None
    unit = bars[0].value.unit
    bars = [bar for bar in bars if bar.value.unit == unit]
    if len({bar.name for bar in bars}) == 1:
        bars = [Bar(bar.label, "", bar.value) for bar in bars]
        title = f"{title}, {next(_measured(table)).name}"
    return _lines(title, unit, bars) or Bars(title, unit, tuple(bars))


def _measured(table: Table) -> Iterator[Bar]:
    for row in table.rows:
        for column, value in row.values.items():
            if isinstance(value, Series) and value.unit not in _COMPARED:
                yield Bar(row.label, column, value)


def _lines(title: str, unit: str, bars: list[Bar]) -> Lines | None:
    """None unless every label is a number of the same thing, and there are several."""
    found = [_GROWING.match(bar.label) for bar in bars]
    things = {(match["what"] or match["unit"] or "") for match in found if match}
    by_name: dict[str, list[Point]] = {}
    for match, bar in zip(found, bars, strict=True):
        if match is None or len(things) > 1:
            return None
        name = ", ".join(part for part in (match["rest"], bar.name) if part)
        by_name.setdefault(name, []).append(Point(float(match["number"].replace(",", "")), bar.value))
    if len({point.x for points in by_name.values() for point in points}) < 2:
        return None
    lines = (Line(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in by_name.items())
    return Lines(title, unit, things.pop(), tuple(lines))
