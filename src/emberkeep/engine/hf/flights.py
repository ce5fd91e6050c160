"""Steps on CUDA on their way: launched, and landed when the tokens that they chose are in RAM.

Where all sequences of a step most likely go on with what it chooses, the step after it is launched before it has
landed: it takes its tokens on the device. So the device computes while the host reads, and never waits for it.

    host     launch 1, 2 | read 1 | launch 3 | read 2 | launch 4 | ...
    device      step 1     |  step 2           |  step 3          | ...

What was launched ahead counts only where the next batch has the same sequences, at the same places, with the
tokens that were chosen, and nothing has happened to them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, cycle

import torch

from emberkeep.engine.base import Rows
from emberkeep.engine.hf.cuda_graphs import StepGraphs
from emberkeep.engine.hf.pool import BlockTable
from emberkeep.engine.hf.staging import ChosenTokens


class _Flight:
    """One step."""

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._host = torch.empty(outputs, dtype=torch.int64).pin_memory()
        self._told: torch.Tensor | None = None
        self._tells = False
        self._has_landed = torch.cuda.Event()
        self._count = 0

    def launched(self, chosen: torch.Tensor, told: torch.Tensor | None) -> None:
        self._count, self._tells = len(chosen), told is not None
        self._host[: self._count].copy_(chosen, non_blocking=True)
        if told is not None:
            if self._told is None:
                self._told = torch.empty((self._outputs, told.shape[1]), dtype=told.dtype).pin_memory()
            self._told[: self._count].copy_(told, non_blocking=True)
        self._has_landed.record()

    def land(self) -> ChosenTokens:
        """Blocks until it has landed."""
        self._has_landed.synchronize()
        told = self._told[: self._count].tolist() if self._told is not None and self._tells else []
        return ChosenTokens(self._host[: self._count].tolist(), told)


_Ahead = tuple[int, int, int]
"""A row that was launched ahead: where it starts, which of the tokens that the step before it chose is its own,
and which output is its own."""
_NOWHERE: _Ahead = (-1, 0, 0)


class Flights:
    """Belongs to the engine's thread."""

    def __init__(self, outputs: int, reserve: Callable[[Sequence[BlockTable]], bool]) -> None:
        """`reserve` makes room for one more token of each; False: there is none."""
        self._reserve = reserve
        # One that was read, one that was launched ahead, and one beside it.
        self._flights = cycle([_Flight(outputs) for _ in range(4)])
        self._before: list[int] = []
        """What the step before the one ahead chose."""
        self._next: _Flight | None = None
        self._ahead: dict[int, _Ahead] = {}
        """By sequence: what of the one ahead counts."""

    @property
    def is_ahead(self) -> bool:
        return self._next is not None

    def forget(self, sequence: int) -> None:
        """Something happens to its state: what was launched for it does not count."""
        self._ahead.pop(sequence, None)

    def run(
        self,
        graphs: StepGraphs,
        batch: Sequence[Rows],
        tables: Sequence[BlockTable],
        meanwhile: Callable[[], None],
        *,
        may_run_ahead: bool,
    ) -> tuple[list[tuple[ChosenTokens | None, int]], torch.Tensor | None]:
        """For each of the batch, what was chosen, and the place of its first output there; and the logits, if
        someone may want them. Blocks until all is there."""
        ahead, known = self._take_known(batch)
        rest = [index for index in range(len(batch)) if index not in known]
        fresh, logits = None, None
        if rest:
            fresh = next(self._flights)
            logits, *chosen = graphs.run([batch[i] for i in rest], [tables[i] for i in rest])
            fresh.launched(*chosen)
        firsts = accumulate((batch[i].outputs for i in rest), initial=0)
        places = known | dict(zip(rest, firsts, strict=False))
        # Who has a mask comes again and cannot run ahead: the others would be run apart from then on.
        may_run_ahead &= not (known and rest) and all(
            rows.choosing and rows.choosing.mask is None and len(rows.tokens) == 1 for rows in batch
        )
        going = (
            [i for i, rows in enumerate(batch) if rows.choosing and rows.choosing.goes_on] if may_run_ahead else []
        )
        if going and self._reserve([tables[i] for i in going]):
            logits = None  # the step ahead overwrites them
            sources = [places[i] for i in going]
            self._launch_ahead(graphs, [batch[i] for i in going], [tables[i] for i in going], sources)
        meanwhile()
        landed = [flight.land() if flight else ChosenTokens([]) for flight in (ahead if known else None, fresh)]
        self._before = landed[0].tokens or landed[1].tokens
        return [(landed[0 if i in known else 1], places[i]) for i in range(len(batch))], logits

    def _take_known(self, batch: Sequence[Rows]) -> tuple[_Flight | None, dict[int, int]]:
        """The step that was launched ahead, and what it has of this batch: by index, the place of its output."""
        flight, self._next = self._next, None
        rows_ahead, self._ahead = self._ahead, {}
        known = {}
        for index, rows in enumerate(batch) if flight else ():
            start, before, place = rows_ahead.get(rows.sequence, _NOWHERE)
            is_chosen = rows.choosing is not None and rows.choosing.mask is None
            is_next = rows.start == start and is_chosen and rows.outputs == len(rows.tokens) == 1
            if is_next and rows.tokens[0] == self._before[before]:
                known[index] = place
        return flight, known

    def _launch_ahead(
        self, graphs: StepGraphs, batch: Sequence[Rows], tables: Sequence[BlockTable], sources: list[int]
    ) -> None:
        _, *chosen = graphs.run(batch, tables, sources)
        self._next = next(self._flights)
        self._next.launched(*chosen)
        self._ahead = {
            rows.sequence: (rows.start + 1, source, place)
            for place, (rows, source) in enumerate(zip(batch, sources, strict=True))
        }
