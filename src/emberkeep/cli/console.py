"""How every command prints: folded to a terminal, whole in a pipe, and never driving either."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from emberkeep.errors import EmberkeepError
from emberkeep.text import HIDDEN

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PIPE_WIDTH = 1000

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_UNPRINTABLE = re.compile(rf"{HIDDEN.pattern}|[\u2028\u2029\ud800-\udfff]")
"""What drives a terminal or is not seen, other ends of lines, and halves of characters, which no file can hold."""


def printable(text: str, instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """With `instead` for what drives a terminal or is not seen: for all that models, users and servers wrote."""
    return _UNPRINTABLE.sub(instead, text)


def console(*, stderr: bool = False) -> Console:
    """Colours and cursor movements only reach a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def complain(sentence: str) -> None:
    """One sentence on stderr, red where a person reads it. What others have said in it stays text."""
    sentence = printable(sentence)
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{sentence}\033[0m" if red else sentence, file=sys.stderr)


def ask_first(question: str) -> None:
    """Go on only if the answer is yes. Raises EmberkeepError where there is no person to ask."""
    if not _is_terminal():
        raise EmberkeepError(f"{question} There is no user to ask: say --yes.")
    typer.confirm(question, abort=True, err=True)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def texts(*cells: str) -> list[Text]:
    """Cells as they are: what models and users wrote must neither be styled nor reach the terminal's controls."""
    from rich.text import Text

    return [Text(printable(cell), overflow="fold") for cell in cells]


def show(*parts: RenderableType) -> None:
    output = console()
    output.width = width()
    for part in parts:
        output.print(part)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Nothing where there are no rows."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*texts(*row))
    if table.row_count:
        show(table)


def show_facts(lines: Iterable[tuple[str, str]]) -> None:
    """A label and its value per line."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for line in lines:
        grid.add_row(*texts(*line))
    show(grid)


def width() -> int:
    """How wide the terminal is. A pipe has no width: nothing may be folded or cut there."""
    output = console()
    return output.width if output.is_terminal else PIPE_WIDTH


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in columns that are as wide as they have to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plural(number: int, one: str = "entry", many: str = "entries") -> str:
    return f"{number:,} {one if number == 1 else many}"


def ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} days"


def whose(user: str) -> str:
    return f"the user {user}" if user else "those who gave no name"
