"""What a benchmark found: tables of rows, as values, as JSON and as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from emberkeep.bench.figures import Series
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from rich.table import Table as Grid
    from rich.text import Text

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

    @property
    def columns(self) -> list[str]:
        """Every column of every row, in the order of first appearance."""
        return list(dict.fromkeys(column for row in self.rows for column in row.values))


@dataclass(frozen=True, slots=True)
class BenchResult:
    name: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know to believe the numbers."""

    def json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "tables": [_table_json(table) for table in self.tables],
            "notes": list(self.notes),
        }


def read_report(report: Mapping[str, Any]) -> list[BenchResult]:
    """What `report_json` has written. Raises KeyError, TypeError, ValueError or AttributeError otherwise."""
    return [
        BenchResult(
            str(one["name"]), tuple(_read_table(table) for table in one["tables"]), tuple(map(str, one["notes"]))
        )
        for one in report["results"]
    ]


def _read_table(table: Mapping[str, Any]) -> Table:
    rows = (
        Row(str(row["label"]), {column: _read_value(value) for column, value in row.items() if column != "label"})
        for row in table["rows"]
    )
    return Table(str(table["title"]), tuple(rows))


def _read_value(value: Any) -> Value:
    if isinstance(value, Mapping):
        samples = tuple(float(sample) for sample in value["samples"])
        if not samples or not all(map(isfinite, samples)):
            raise ValueError("a quantity without a number")
        return Series(samples, str(value["unit"]))
    return value if isinstance(value, int) else str(value)


def report_json(results: Sequence[BenchResult], surroundings: Mapping[str, Json]) -> dict[str, Json]:
    return {**surroundings, "results": [result.json() for result in results]}


def _table_json(table: Table) -> dict[str, Json]:
    return {
        "title": table.title,
        "rows": [
            {"label": row.label, **{column: _value_json(value) for column, value in row.values.items()}}
            for row in table.rows
        ],
    }


def _value_json(value: Value) -> Json:
    return value.json() if isinstance(value, Series) else value


# ── as a document ──


def markdown(result: BenchResult) -> str:
    """Tables in the form that most readers of Markdown know, then the notes."""
    parts = [f"## {result.name}: {table.title}\n\n{_markdown_table(table)}" for table in result.tables]
    notes = "\n".join(f"- {note}" for note in result.notes)
    return "\n\n".join([*parts, notes] if notes else parts) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [["", *table.columns], ["---", *("---:" for _ in table.columns)]]
    rows += [[row.label, *(readable_value(row.values.get(one)) for one in table.columns)] for row in table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


# ── as text for people; rich is imported late: benchmarks of an engine alone run without it ──


def render(result: BenchResult) -> Iterator[Grid | Text]:
    """What to print, from top to bottom."""
    from rich.text import Text

    for table in result.tables:
        yield _grid(result.name, table)
    for note in result.notes:
        yield Text(f"  {note}")


def _grid(name: str, table: Table) -> Grid:
    from rich.table import Table as Grid

    grid = Grid(
        title=f"{name}: {table.title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    grid.add_column("")
    for column in table.columns:
        grid.add_column(column, justify="right")
    for row in table.rows:
        grid.add_row(row.label, *(readable_value(row.values.get(column)) for column in table.columns))
    return grid


def readable_value(value: Value | None) -> str:
    if value is None:
        return ""
    if isinstance(value, Series):
        return readable_series(value)
    return f"{value:,}" if isinstance(value, int) else value


def readable_series(value: Series) -> str:
    """`41.2 ms (39.8–44.0)`: median, then the lowest and the highest sample."""
    middle, low, high = (readable_number(n) for n in (value.median, value.low, value.high))
    spread = f" ({low}–{high})" if low != high else ""
    unit = f" {value.unit}" if value.unit not in ("", "×") else value.unit
    return f"{middle}{unit}{spread}"


def readable_number(number: float) -> str:
    """About three digits that mean something."""
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 10 else f"{number:.3f}" if size < 2 else f"{number:.2f}"
