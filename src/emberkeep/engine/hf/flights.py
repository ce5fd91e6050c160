"""Steps on CUDA on their way: launched, and landed when the tokens that they chose are in RAM.

Where all sequences of a step most likely go on with what it chooses, the step after it is launched before it has
landed: it takes its tokens on the device. So the device computes while the host reads, and never waits for it.

    host     launch 1, 2 | read 1 | launch 3 | read 2 | launch 4 | ...
    device      step 1     |  step 2           |  step 3          | ...

Of many sequences a host has much to do in each step. So one flight takes them through some steps at once: the host
reads them together, and the device does not feel what delays it.

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
from emberkeep.engine.hf.staging import ChosenTokens, Found
from emberkeep.engine.hf.step_batch import MOST_STEPS
from emberkeep.values import dataclass

_MANY = 16
"""Rows from which on a flight takes `MOST_STEPS` steps."""


class _Flight:
    """Some steps with the same sequences, of which those that end sooner come last."""

    def __init__(self, outputs: int) -> None:
        self._host = torch.empty((MOST_STEPS, outputs), dtype=torch.int64).pin_memory()
        self._chosen = self._host.numpy()
        self._told: torch.Tensor | None = None
        self._tells = False
        self._has_landed = torch.cuda.Event()
        self._count = 0
        self.steps = 0

    def launched(self, step: int, chosen: torch.Tensor, told: torch.Tensor | None) -> None:
        count, self.steps = len(chosen), step + 1
        self._host[step, :count].copy_(chosen, non_blocking=True)
        if step == 0:
            self._count, self._tells = count, told is not None
        if told is not None:
            if self._told is None:
                shape = (self._host.shape[1], told.shape[1])
                self._told = torch.empty(shape, dtype=told.dtype).pin_memory()
            self._told[:count].copy_(told, non_blocking=True)

    def ended(self) -> None:
        """All of its steps are launched."""
        self._has_landed.record()

    def land(self) -> ChosenTokens:
        """What it chose, by output and then by step. Blocks until it has landed."""
        self._has_landed.synchronize()
        told = self._told[: self._count].tolist() if self._told is not None and self._tells else []
        return ChosenTokens(self._chosen[: self.steps, : self._count].ravel("F").tolist(), told)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A sequence that was launched ahead."""

    start: int
    before: int
    """Which of the tokens that the flight before it chose is its own."""
    place: int
    """Which output is its own, in every step."""
    steps: int
    """In how many it is."""


class Flights:
    """Belongs to the engine's thread."""

    def __init__(self, outputs: int, reserve: Callable[[Sequence[BlockTable], Sequence[int]], bool]) -> None:
        """`reserve` makes room for so many more tokens of each; False: there is none."""
        self._reserve = reserve
        # One that was read, one that was launched ahead, and one beside it.
        self._flights = cycle([_Flight(outputs) for _ in range(4)])
        self._before: list[int] = []
        """What the flight before the one ahead chose."""
        self._next: _Flight | None = None
        self._ahead: dict[int, _Ahead] = {}
        """By sequence: what of the one ahead counts."""

    @property
    def is_ahead(self) -> bool:
        return self._next is not None

    def forget(self, sequence: int) -> None:
        """Something happens to its state: what was launched for it does not count."""
        self._ahead.pop(sequence, None)

    def known(self, batch: Sequence[Rows]) -> dict[int, _Ahead]:
        """What the flight ahead has of this batch, by index."""
        known = {}
        for index, rows in enumerate(batch) if self._next else ():
            ahead = self._ahead.get(rows.sequence)
            is_next = ahead is not None and rows.start == ahead.start and rows.outputs == len(rows.tokens) == 1
            is_chosen = rows.choosing is not None and rows.choosing.mask is None
            if ahead and is_next and is_chosen and rows.tokens[0] == self._before[ahead.before]:
                known[index] = ahead
        return known

    def run(
        self,
        graphs: StepGraphs,
        batch: Sequence[Rows],
        tables: Sequence[BlockTable],
        known: dict[int, _Ahead],
        meanwhile: Callable[[], None],
        *,
        may_run_ahead: bool,
    ) -> tuple[list[Found], torch.Tensor | None]:
        """What was chosen, and the logits, if someone may want them. Every table has room for the steps that are
        `known`. Blocks until all is there."""
        ahead, self._next, self._ahead = self._next if known else None, None, {}
        rest = [index for index in range(len(batch)) if index not in known]
        fresh, logits = None, None
        if rest:
            fresh = next(self._flights)
            logits, *chosen = graphs.run([batch[i] for i in rest], [tables[i] for i in rest])
            fresh.launched(0, *chosen)
            fresh.ended()
        firsts = dict(zip(rest, accumulate((batch[i].outputs for i in rest), initial=0), strict=False))
        # Who has a mask comes again and cannot run ahead: the others would be run apart from then on.
        may_run_ahead &= not (known and rest) and all(
            rows.choosing and rows.choosing.mask is None and len(rows.tokens) == 1 for rows in batch
        )
        taken = ahead.steps if ahead else 1
        sources = [known[i].place if i in known else firsts[i] for i in range(len(batch))]
        if may_run_ahead and self._launch_ahead(graphs, batch, tables, sources, taken):
            logits = None  # what is ahead overwrites them
        meanwhile()
        landed = [flight.land() if flight else None for flight in (ahead, fresh)]
        self._before = next((each.tokens for each in landed if each), [])
        found = [
            Found(landed[0], known[i].place * taken, known[i].steps) if i in known else Found(landed[1], firsts[i])
            for i in range(len(batch))
        ]
        return found, logits

    def _launch_ahead(
        self,
        graphs: StepGraphs,
        batch: Sequence[Rows],
        tables: Sequence[BlockTable],
        sources: Sequence[int],
        taken: int,
    ) -> bool:
        """The next flight of those that go on, whether any does. `taken`: the steps of the one before it."""
        left = [rows.goes_on - (taken - 1) for rows in batch]
        going = sorted((i for i, count in enumerate(left) if count > 0), key=lambda i: -left[i])
        most = MOST_STEPS if len(going) >= _MANY and not _any_adjusted(batch) else 1
        steps = [min(left[i], most) for i in going]
        tables = [tables[i] for i in going]
        if not going or not self._reserve(tables, steps):
            return False
        batch, sources = [batch[i] for i in going], [sources[i] for i in going]
        self._next = flight = next(self._flights)
        for step in range(steps[0]):
            count = sum(each > step for each in steps)
            latest = range(count) if step else sources
            flight.launched(step, *graphs.run(batch[:count], tables[:count], latest, taken + step)[1:])
        flight.ended()
        self._ahead = {
            rows.sequence: _Ahead(rows.start + taken, source * taken + taken - 1, place, steps[place])
            for place, (rows, source) in enumerate(zip(batch, sources, strict=True))
        }
        return True


def _any_adjusted(batch: Sequence[Rows]) -> bool:
    """Penalties count what the host was told: one token further is launched, and no more."""
    return any(rows.choosing is not None and rows.choosing.is_adjusted for rows in batch)
