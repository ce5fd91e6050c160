"""How far each sequence has come, and which cells it shares with others: llama.cpp tells nobody.

Sequences share cells only at equal positions, since a cell has one.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Cells: TypeAlias = "array[int]"
"""A number for the cell of each position. No number is ever used for another cell."""


@dataclass(slots=True)
class Place:
    cells: Cells = field(default_factory=lambda: array("q"))
    is_whole: bool = True
    """False between the import of ranges and that of the snapshot that belongs to them."""

    @property
    def end(self) -> int:
        return len(self.cells)


class Places:
    def __init__(self) -> None:
        self._of: defaultdict[int, Place] = defaultdict(Place)
        self._numbers = 0

    def __getitem__(self, sequence: int) -> Place:
        return self._of[sequence]

    def grow(self, sequence: int, end: int) -> None:
        """Cells of its own for all positions up to `end`."""
        place = self._of[sequence]
        begin, self._numbers = self._numbers, self._numbers + end - place.end
        place.cells.extend(range(begin, self._numbers))

    def share(self, source: int, target: int, end: int) -> None:
        self._of[target] = Place(self._of[source].cells[:end])

    def cut(self, sequence: int, start: int) -> None:
        """A sequence of which nothing is left lacks nothing."""
        del self._of[sequence].cells[start:]
        if start == 0:
            del self._of[sequence]

    @property
    def used(self) -> int:
        """Cells that sequences have, each counted once."""
        cells = [place.cells for place in self._of.values()]
        return sum(_unlike(mine, cells[:index], 0, len(mine)) for index, mine in enumerate(cells))

    def alone(self, sequence: int, start: int, end: int) -> int:
        """How many of the cells of [start, end) no other sequence has."""
        others = [place.cells for other, place in self._of.items() if other != sequence]
        return _unlike(self._of[sequence].cells, others, start, end)


def _unlike(cells: Cells, others: Iterable[Cells], start: int, end: int) -> int:
    """How many of [start, end) are not in any of `others`."""
    mine = np.frombuffer(cells, np.int64)[start:end]
    is_shared: npt.NDArray[np.bool_] = np.zeros(len(mine), bool)
    for other in others:
        theirs = np.frombuffer(other, np.int64)[start:end]
        is_shared[: len(theirs)] |= mine[: len(theirs)] == theirs[: len(mine)]
    return len(mine) - int(is_shared.sum())
