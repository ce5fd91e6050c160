"""Results as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table as Grid
from rich.text import Text

from emberkeep.bench.figures import Series
from emberkeep.bench.report import Result, Table, Value


def render(result: Result) -> Iterator[Grid | Text]:
    """What to print, from top to bottom."""
    for table in result.tables:
        yield _grid(result.name, table)
    for note in result.notes:
        yield Text(f"  {note}")


def _grid(name: str, table: Table) -> Grid:
    grid = Grid(
        title=f"{name}: {table.title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    grid.add_column("")
    for column in table.columns:
        grid.add_column(column, justify="right")
    for row in table.rows:
        grid.add_row(row.label, *(_cell(row.values.get(column)) for column in table.columns))
    return grid


def _cell(value: Value | None) -> str:
    if value is None:
        return ""
    if isinstance(value, Series):
        return readable_series(value)
    return f"{value:,}" if isinstance(value, int) else value


def readable_series(value: Series) -> str:
    """`41.2 ms (39.8–44.0)`: median, then the lowest and the highest sample."""
    middle, low, high = (_number(n) for n in (value.median, value.low, value.high))
    spread = f" ({low}–{high})" if low != high else ""
    unit = f" {value.unit}" if value.unit not in ("", "×") else value.unit
    return f"{middle}{unit}{spread}"


def _number(number: float) -> str:
    """About three digits that mean something."""
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 10 else f"{number:.3f}" if size < 2 else f"{number:.2f}"
