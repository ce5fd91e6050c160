"""Tables as every command prints them: folded to a terminal, whole in a pipe, and never driving either."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from emberkeep.cli.common import console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

PIPE_WIDTH = 1000

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def texts(*cells: str) -> list[Text]:
    """Cells as they are: what models and users wrote must neither be styled nor reach the terminal's controls."""
    from rich.text import Text

    return [Text(printable(cell), overflow="fold") for cell in cells]


def printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def counted(number: int, one: str = "entry", many: str = "entries") -> str:
    return f"{number:,} {one if number == 1 else many}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in columns that are as wide as they have to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} days"


def show_facts(lines: Iterable[tuple[str, str]]) -> None:
    """A label and its value per line."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for line in lines:
        grid.add_row(*texts(*line))
    show(grid)


def show(*parts: RenderableType) -> None:
    output = console()
    output.width = width()
    for part in parts:
        output.print(part)


def width() -> int:
    """Of the terminal. A pipe has none: nothing may be folded or cut there."""
    output = console()
    return output.width if output.is_terminal else PIPE_WIDTH
