"""With flash attention or without: which of both is possible, how long steps take in each way, and in which the
next step is computed (`FlashSwitch`).

Steps are measured once a model is loaded and nothing waits for it, in contexts of their own, and remembered by
library, CPU, model and number of threads. On a CPU neither way is always the quicker one. With flash attention
a step has fewer operations, and a row skips the cells of other sequences; but fewer than 64 rows are taken one
by one. Without, rows are taken together from 8 on, over all cells in use: a turn or a draft deep in a single
conversation takes a third of the time, and a token of each of eight conversations twice as much. So a context
is opened the other way when the time that was lost, step by step, exceeds some times what that costs: whatever
comes, not much more is lost than must be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from emberkeep.config.machine import total_ram
from emberkeep.engine.base import Rows
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.context import LlamaSettings, score_bytes
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import facts_about, llama
from emberkeep.engine.llamacpp.step_timing import Measured, measure
from emberkeep.engine.llamacpp.threads import available_cores
from emberkeep.engine.llamacpp.trial import survives_without_flash
from emberkeep.engine.step_table import Interrupted, StepTable
from emberkeep.errors import EngineError
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured of a model on this machine, and what follows from it."""

    reason: str
    """Why flash attention is on or off, in a few words."""
    tables: Mapping[bool, StepTable] = field(default_factory=dict)
    """What steps take with flash attention and without: of the one way there is, or of both."""
    wide_rows: int | None = None
    """See `Capabilities.wide_rows`."""
    has_choice: bool = False
    """Whether the engine may change between both ways."""
    measure: Callable[[Callable[[], bool]], Tuning | None] | None = None
    """What measures all of it anew, unless the function that it is given says that something waits: None then.
    None where there is nothing to measure."""


NOT_TUNED = Tuning("nothing was measured")
logger = logging.getLogger("emberkeep.engine")
_MOST_SCORES = 1 << 30
_SHARE_OF_SCORES = 16
"""At most this part of RAM."""
_LEAST_BATCH = 128
_SMALLEST = 16 << 20
"""Bytes of a model from which on it is worth the time."""


def tune(
    model: LlamaModel, settings: LlamaSettings, weights_digest: str, flash: bool | None, folder: Path | None = None
) -> tuple[LlamaSettings, Tuning]:
    """`settings` with flash attention as `flash` says, or as a choice for every step; and what is known of its
    times.

    Never an error: where nothing can be found out, flash attention is on. What was not measured yet is measured
    by the result's `measure`, and remembered in `folder`.
    """
    ways, reason = [flash is not False], "as asked"
    if not flash and (needed := _why_needed(model, settings, weights_digest, is_asked=flash is False)):
        ways, reason = [True], needed
    elif flash is None:
        ways, reason = [True, False], "what is quicker, step by step"
    logger.debug("flash attention: %s", reason)
    if False in ways:
        batch = batch_without_flash(model, settings) or max(_LEAST_BATCH, settings.sequences)
        settings = replace(settings, flash=ways[0], batch=batch)
    subject = Subject(weights_digest, settings.threads, settings.kv_type, model.placement)
    return settings, Results(model, settings, subject, folder).tuning(ways, reason)


def _why_needed(model: LlamaModel, settings: LlamaSettings, weights_digest: str, *, is_asked: bool) -> str | None:
    """Why flash attention cannot be off; `is_asked`: although it should be."""
    if settings.kv_type != "f16":
        return f"{settings.kv_type} values need it"
    if model.offloads:
        return "layers are on a GPU"
    if not is_asked and llama().llama_model_size(model.handle) < _SMALLEST:
        return "the model is small"
    if not is_asked and batch_without_flash(model, settings) is None:
        return f"without it {settings.cells} tokens of context would take too much memory"
    if not survives_without_flash(model.path, weights_digest):
        return "the model does not run without it"
    return None


def batch_without_flash(model: LlamaModel, settings: LlamaSettings) -> int | None:
    """The most rows of a step whose scores have room: one for each row, cell and head. None if that is too few.

    On a CPU a prompt in steps of 128 tokens is no slower than in steps of 512.
    """
    # Not of what is free now: what is stored is of use only while the answer stays the same.
    room = min(_MOST_SCORES, total_ram() // _SHARE_OF_SCORES)
    of_a_row = score_bytes(model, replace(settings, batch=1))
    smaller = (batch for batch in (256, _LEAST_BATCH) if settings.sequences <= batch < settings.batch)
    return next((batch for batch in (settings.batch, *smaller) if batch * of_a_row <= room), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """What it was that was measured, with the library in use and on this CPU."""

    weights_digest: str
    threads: int | None
    kv_type: str
    placement: object = "CPU"

    def measured(self, flash: bool, folder: Path | None) -> Measured | None:
        """None where nothing is remembered that can be read."""
        return self._facts(folder).read_json(f"steps {flash}", Measured.from_json)

    def is_measured(self, folder: Path | None = None) -> bool:
        """Whether both ways were. Raises EngineError."""
        return all(self.measured(flash, folder) is not None for flash in (True, False))

    def remember(self, flash: bool, measured: Measured, folder: Path | None) -> None:
        self._facts(folder).remember_json(f"steps {flash}", measured.json())

    def _facts(self, folder: Path | None) -> Facts:
        about = (self.weights_digest, self.threads or available_cores(), self.kv_type, self.placement)
        return facts_about(*about, folder=folder)


class Results:
    """What was measured of a model before, or is measured now."""

    def __init__(
        self, model: LlamaModel, settings: LlamaSettings, subject: Subject, folder: Path | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._subject = subject
        self._folder = folder

    def tuning(self, ways: Sequence[bool], reason: str) -> Tuning:
        """What is known of `ways`, with flash attention or without."""
        found = {way: self._subject.measured(way, self._folder) for way in ways}
        known = {way: measured for way, measured in found.items() if measured is not None}

        def measure(is_wanted: Callable[[], bool]) -> Tuning | None:
            try:
                return self._tuning(ways, reason, known | self._measure(ways, known, is_wanted))
            except Interrupted:
                return None

        # What was measured beside other programs is measured again at the next start, and what is less counts.
        is_enough = len(known) == len(ways) and all(each.is_whole for each in known.values())
        return self._tuning(ways, reason, known, None if is_enough or self._is_small else measure)

    def _tuning(
        self,
        ways: Sequence[bool],
        reason: str,
        known: Mapping[bool, Measured],
        measure: Callable[[Callable[[], bool]], Tuning | None] | None = None,
    ) -> Tuning:
        tables = {way: known[way].table for way in ways if way in known}
        wide_rows = known[False].wide_rows if False in known else None
        return Tuning(reason, tables, wide_rows, has_choice=len(ways) > 1, measure=measure)

    @property
    def _is_small(self) -> bool:
        return bool(llama().llama_model_size(self._model.handle) < _SMALLEST)

    def _measure(
        self, ways: Sequence[bool], known: Mapping[bool, Measured], is_wanted: Callable[[], bool]
    ) -> dict[bool, Measured]:
        """All of `ways` side by side. Raises Interrupted."""
        try:
            measured = measure(self._model, [replace(self._settings, flash=way) for way in ways], is_wanted)
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return {}
        found = dict(zip(ways, measured, strict=True))
        found |= {way: known[way].join(new) for way, new in found.items() if way in known}
        for way, new in found.items():
            self._subject.remember(way, new, self._folder)
        return found


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
