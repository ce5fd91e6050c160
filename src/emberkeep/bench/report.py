"""What a benchmark measured: numbers that were taken more than once, in tables, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity in the order they were taken; never empty."""

    samples: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return median(self.samples)

    def json(self) -> dict[str, Json]:
        low, high = min(self.samples), max(self.samples)
        return {"median": self.median, "low": low, "high": high, "unit": self.unit, "samples": list(self.samples)}

    def __str__(self) -> str:
        """`41.2 ms (39.8–44.0)`: median, then the lowest and the highest sample."""
        middle, low, high = map(_three_digits, (self.median, min(self.samples), max(self.samples)))
        spread = f" ({low}–{high})" if low != high else ""
        return f"{middle}{'' if self.unit in ('', '×') else ' '}{self.unit}{spread}"


Value = Series | int | str
"""A measured quantity, a count, or a word."""


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    values: Mapping[str, Value]
    """By column. Rows of one table need not have the same columns."""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    rows: tuple[Row, ...]

    def json(self) -> dict[str, Json]:
        return {"title": self.title, "rows": [_row_json(row) for row in self.rows]}


@dataclass(frozen=True, slots=True)
class BenchResult:
    name: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know to believe the numbers."""

    def json(self) -> dict[str, Json]:
        return {"name": self.name, "tables": [table.json() for table in self.tables], "notes": list(self.notes)}


def _row_json(row: Row) -> dict[str, Json]:
    values = {name: value.json() if isinstance(value, Series) else value for name, value in row.values.items()}
    return {"label": row.label, **values}


def series(samples: Iterable[float], unit: str) -> Series:
    return Series(tuple(samples), unit)


def ratios(over: Series, under: Series, unit: str = "×") -> Series:
    """Pair by pair, for samples that were taken side by side."""
    return series((a / b for a, b in zip(over.samples, under.samples, strict=True)), unit)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


def render(result: BenchResult) -> Iterator[RenderableType]:
    """What rich prints: tables of Markdown, folded only where a terminal is too narrow, and the notes."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    for table in result.tables:
        grid = Grid("", box=box.MARKDOWN)
        columns = list(dict.fromkeys(column for row in table.rows for column in row.values))
        for column in columns:
            grid.add_column(Text(column), justify="right")
        for row in table.rows:
            grid.add_row(*(Text(cell) for cell in [row.label, *_cells(row, columns)]))
        yield Text(f"\n## {result.name}: {table.title}")
        yield grid
    for note in result.notes:
        yield Text(f"- {note}")


def _cells(row: Row, columns: Iterable[str]) -> Iterator[str]:
    for value in map(row.values.get, columns):
        yield "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _three_digits(number: float) -> str:
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 10 else f"{number:.3f}" if size < 2 else f"{number:.2f}"
