"""Which cells of a context its sequences have: llama.cpp does not tell."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from emberkeep.values import dataclass

Cells: TypeAlias = "array[int]"
"""A number for the cell of each position. No number is ever used for another cell."""


@dataclass(slots=True)
class SequenceCells:
    """The cells of one sequence, by position."""

    cells: Cells = field(default_factory=lambda: array("q"))
    is_whole: bool = True
    """False between the import of ranges and that of the snapshot that belongs to them."""

    @property
    def end(self) -> int:
        return len(self.cells)


class CellMap:
    """How far each sequence has come, and which cells it shares with others: llama.cpp does not tell.

    Sequences share cells only at equal positions, since a cell has one.
    """

    def __init__(self) -> None:
        self._of: defaultdict[int, SequenceCells] = defaultdict(SequenceCells)
        self._numbers = 0
        self.used = 0
        """Cells that sequences have, each counted once."""

    def __getitem__(self, sequence: int) -> SequenceCells:
        return self._of[sequence]

    @property
    def entries(self) -> int:
        """Cells that sequences have, each counted for each of them."""
        return sum(held.end for held in self._of.values())

    def grow(self, sequence: int, end: int) -> None:
        """Cells of its own for all positions up to `end`."""
        held = self._of[sequence]
        begin, self._numbers = self._numbers, self._numbers + end - held.end
        self.used += end - held.end
        held.cells.extend(range(begin, self._numbers))

    def share(self, source: int, target: int, end: int) -> None:
        self._of[target] = SequenceCells(self._of[source].cells[:end])

    def trim(self, sequence: int, start: int) -> None:
        """A sequence of which nothing is left lacks nothing."""
        self.used -= self.count_unshared(sequence, start, self._of[sequence].end)
        del self._of[sequence].cells[start:]
        if start == 0:
            del self._of[sequence]

    @property
    def is_whole(self) -> bool:
        return all(held.is_whole for held in self._of.values())

    def branches(self) -> Iterator[tuple[int, int | None, int]]:
        """Every sequence that has cells, with an earlier one of these and how many cells it shares with that.

        It shares none of the others with anyone before it: cells are shared from the first position on.
        """
        before: list[int] = []
        for sequence, held in self._of.items():
            shared = [(_common(held.cells, self._of[other].cells), other) for other in before]
            count, other = max(shared, default=(0, None), key=itemgetter(0))
            if held.end:
                yield sequence, other if count else None, count
                before.append(sequence)

    def unshared(self) -> CellMap:
        """As if nobody shared anything."""
        cells = CellMap()
        for sequence, held in self._of.items():
            cells.grow(sequence, held.end)
            cells[sequence].is_whole = held.is_whole
        return cells

    def count_unshared(self, sequence: int, start: int, end: int) -> int:
        """How many of the cells of [start, end) no other sequence has."""
        mine = np.frombuffer(self._of[sequence].cells, np.int64)[start:end]
        is_shared: npt.NDArray[np.bool_] = np.zeros(len(mine), bool)
        for other, held in self._of.items():
            if other != sequence:
                theirs = np.frombuffer(held.cells, np.int64)[start:end]
                is_shared[: len(theirs)] |= mine[: len(theirs)] == theirs[: len(mine)]
        return len(mine) - int(is_shared.sum())


def _common(cells: Cells, others: Cells) -> int:
    """How many of the first ones are the same."""
    mine, theirs = np.frombuffer(cells, np.int64), np.frombuffer(others, np.int64)
    length = min(len(mine), len(theirs))
    differing = np.flatnonzero(mine[:length] != theirs[:length])
    return int(differing[0]) if len(differing) else length
