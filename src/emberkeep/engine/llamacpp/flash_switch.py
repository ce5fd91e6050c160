"""Whether the next step is computed with flash attention or without: what is quicker for the work at hand.

On a CPU neither way is always the quicker one. With flash attention a step has fewer operations, and a row skips
the cells of other sequences; but fewer than 64 rows are taken one by one. Without, rows are taken together from 8
on, over all cells in use: a turn or a draft deep in a single conversation takes a third of the time, and a token
of each of eight conversations twice as much. So a context is opened the other way when the time that was lost,
step by step, exceeds some times what that costs: whatever comes, not much more is lost than must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberkeep.engine.base import Rows
from emberkeep.engine.step_table import StepTable

_SKIPPED = 0.1
"""What a cell of another sequence costs a row with flash attention, as a share of one of its own."""
_NEAR = 128
"""Tokens: steps are told apart no better, so that most are looked up."""
_LOOKED_UP = 4096
"""Kinds of steps that are remembered."""


class FlashSwitch:
    """Belongs to the engine's thread, but for `flash` and the tables, which any may read."""

    def __init__(self, tables: Mapping[bool, StepTable], flash: bool, *, has_choice: bool) -> None:
        """`tables`: what steps take with flash attention and without, as far as that was measured; `flash`: how it
        begins; `has_choice`: it may change."""
        self.flash = flash
        self.has_choice = has_choice
        self._tables = tables
        self._lost = 0.0
        self._losses: dict[tuple[int, int, int], float] = {}
        self._seconds: dict[tuple[int, int, int, int], float] = {}

    @property
    def table(self) -> StepTable | None:
        """What steps take now."""
        return self._tables.get(self.flash)

    def measured(self, tables: Mapping[bool, StepTable]) -> None:
        """So long do steps take, as far as is known now."""
        self._tables = {flash: table for flash, table in tables.items() if self.has_choice or flash == self.flash}
        self._losses.clear()
        self._seconds.clear()

    def seconds(self, rows: int, depth: int, cells: int, outputs: int) -> float | None:
        """What a step takes if the kind of attention follows it. Who plans steps goes by it: plans that know of
        one kind only would never give a reason to change."""
        about = rows, outputs, depth // _NEAR, cells // _NEAR
        known = self._seconds.get(about)
        if known is None and self._tables:
            if len(self._seconds) >= _LOOKED_UP:
                self._seconds.clear()
            depths = {flash: _attended(flash, _NEAR * about[2], _NEAR * about[3]) for flash in self._tables}
            known = min(table.seconds(rows, depths[flash], outputs) for flash, table in self._tables.items())
            self._seconds[about] = known
        return known

    def is_due(self, batch: Sequence[Rows], cells: int, seconds: float) -> bool:
        """Whether to change before this step, with so many `cells` in use, where that is worth `seconds`."""
        if not self.has_choice or len(self._tables) < 2:
            return False
        rows = depths = 0
        for each in batch:
            count = len(each.tokens)
            rows, depths = rows + count, depths + count * each.start
        about = rows, depths // max(rows, 1) // _NEAR, cells // _NEAR
        loss = self._losses.get(about)
        if loss is None:
            if len(self._losses) >= _LOOKED_UP:
                self._losses.clear()
            loss = self._losses[about] = self._loss(rows, _NEAR * about[1], _NEAR * about[2])
        self._lost = max(self._lost + loss, 0.0)
        return self._lost > seconds

    def _loss(self, rows: int, own: int, cells: int) -> float:
        """Seconds of a step of so many rows, at that depth on average, which it would not take the other way."""
        ways = (self.flash, not self.flash)
        now, then = (self._tables[flash].seconds(rows, _attended(flash, own, cells)) for flash in ways)
        return now - then

    def change(self) -> None:
        self.flash = not self.flash
        self._lost = 0.0
        self._losses.clear()

    def stay(self) -> None:
        """It cannot be changed now."""
        self._lost = 0.0

    def settle(self) -> None:
        """It cannot be changed any more, or only back."""
        self.has_choice = False
        self._tables = {flash: table for flash, table in self._tables.items() if flash == self.flash}
        self._seconds.clear()


def _attended(flash: bool, depth: int, cells: int) -> int:
    """How many tokens a row looks at, of `depth` before it in its sequence and `cells` in use."""
    return depth + int(_SKIPPED * max(cells - depth, 0)) if flash else cells
