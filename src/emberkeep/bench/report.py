"""What a benchmark found: tables of rows, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberkeep.bench.figures import Series
from emberkeep.types import Json

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
class Result:
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


def report_json(results: Sequence[Result], surroundings: Mapping[str, Json]) -> dict[str, Json]:
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
