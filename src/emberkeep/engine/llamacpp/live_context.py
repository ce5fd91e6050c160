"""The context that an engine computes in, the cells that its sequences have there, and how another one takes its
place: with more cells or fewer, or with the other kind of attention.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter

import numpy as np

from emberkeep.config.machine import free_ram
from emberkeep.engine.base import KvUnit, Logits, Rows
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.cell_map import CellMap
from emberkeep.engine.llamacpp.context import (
    WHOLE,
    GraphExpertCounter,
    LlamaSettings,
    open_context,
    read_state,
    score_bytes,
    share_ranges,
    thread_count,
    write_state,
)
from emberkeep.engine.llamacpp.kv_layout import Bytes, Layouts
from emberkeep.engine.llamacpp.learning import Learned
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, llama
from emberkeep.engine.llamacpp.threads import ThreadPool
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import EngineError

log = logging.getLogger("emberkeep.engine")

SCRATCH = 0
"""llama.cpp's sequence that exports and imports go through; the scheduler's sequence n is its n + 1."""
FIRST_CELLS = 2048
"""Cells of a context that grows: it has more when they are needed."""
_GRAIN = 256
"""llama.cpp rounds the number of cells up to a multiple of it."""
_TIMES_LOST = 4
"""So many times must be lost what changing attention costs: prompt and answer of a short turn, each quicker in
another way, would else pay for a change each."""
_MOVED_PER_S = 1 << 30
"""Bytes of state that are taken out of one context and put into another, about."""


class LiveContext:
    """Belongs to the engine's thread.

    On a CPU it begins with few cells, and a context with more takes its place when they are needed (`grow`), up to
    those of the settings; `rest` goes back to fewer.
    """

    def __init__(self, model: LlamaModel, settings: LlamaSettings, switch: FlashSwitch) -> None:
        self._model = model
        self._settings = settings
        self.switch = switch
        self.experts = GraphExpertCounter.of(model, self._reopen)
        self.cells = CellMap()
        self.views: dict[int, Logits] = {}
        """Arrays, by address, over the memory in which the context has its logits."""
        self.changes = 0
        """How often the kind of attention was changed."""
        self._threads = ThreadPool()
        self._opened: Handle = 0

    def open(self, learned: Learned) -> None:
        """Open it, where state lies as was `learned`. Raises EngineError."""
        self.layout, self._other_layout = learned.layout, learned.other
        """How its state lies; None where this version does not know it."""
        self.row_bytes = self.layout.row_bytes if self.layout else 0
        """Bytes by range of one token."""
        self.unit = self.layout.unit if self.layout else KvUnit.SNAPSHOT
        if self._other_layout is None:
            self.switch.settle()
        settings = self._settings
        # What is on a GPU is planned as a whole, and with the number of cells some models rotate in another way.
        is_steady = self._model.offloads or settings.rope_switches or self.unit is not KvUnit.RANGE
        # llama.cpp takes no more rows in a step than a context has cells.
        first = max(FIRST_CELLS, _rounded(settings.batch))
        self.room = self.least_room = settings.cells if is_steady else min(first, settings.cells)
        """Its cells."""
        self._threads.start(thread_count(self._model, settings))
        self._open()

    @property
    def handle(self) -> Handle:
        """Raises EngineError where there is none any more."""
        if not self._opened:
            raise EngineError("llama.cpp's context could not be opened again: restart.")
        return self._opened

    @property
    def memory(self) -> Handle:
        memory: Handle = llama().llama_get_memory(self.handle)
        return memory

    @property
    def layouts(self) -> Layouts:
        assert self.layout is not None
        return Layouts(self.layout, self._other_layout)

    def close(self) -> None:
        self._free()
        self._threads.close()

    # ── state of single sequences ──

    def read(self, sequence: int, start: int, end: int, flags: int = WHOLE, into: Bytes | None = None) -> Bytes:
        """A copy of the state of positions [start, end). Raises EngineError."""
        with share_ranges(self.memory, SCRATCH, [(sequence + 1, start, end)]):
            return read_state(self.handle, SCRATCH, flags, into)

    def append(self, sequence: int, start: int, end: int, state: Bytes) -> bool:
        """Put `state`, which was checked, behind the sequence. False: there is no room, as before."""
        has_room = write_state(self.handle, SCRATCH, self.layouts.rearrange(state))
        if has_room:
            llama().llama_memory_seq_cp(self.memory, SCRATCH, sequence + 1, start, end)
        self.empty_scratch()
        return has_room

    def empty_scratch(self) -> None:
        llama().llama_memory_seq_rm(self.memory, SCRATCH, -1, -1)

    def empty(self) -> None:
        """Forget every sequence."""
        llama().llama_memory_clear(self.memory, True)
        self.cells = CellMap()

    # ── other contexts: more cells or fewer, the other kind of attention ──

    def grow(self, more: int) -> bool:
        """Open a context that has room for so many more cells, or for as many as there may be. False: it stays.

        Raises MemoryError, as everything here does that moves state: every sequence is empty then.
        """
        if self.room >= self._settings.cells:
            return False
        least = min(self._settings.cells, _rounded(self.cells.used + more))
        room = min(self._settings.cells, max(2 * self.room, least))
        free = free_ram()
        if free is not None:  # beside the new one there is a copy of all state
            room = min(room, (free // self.row_bytes - self.cells.used) // _GRAIN * _GRAIN)
        return max(least, self.room + 1) <= room and self._move_into(room, self.switch.flash)

    def rest(self) -> None:
        """Go back to fewer cells where that saves half of them."""
        room = max(self.least_room, _rounded(self.cells.used))
        if 2 * room <= self.room:
            self._move_into(room, self.switch.flash)

    def seconds_to_lose(self) -> float:
        """How much time must have been lost before changing attention is worth it."""
        return _TIMES_LOST * (self._opening_seconds + self.cells.used * self.row_bytes / _MOVED_PER_S)

    def change_attention(self) -> None:
        """Everything goes into a context with the other kind of attention, if there is room for it."""
        if self._has_room_to_change() and self._move_into(self.room, not self.switch.flash):
            self.changes += 1
        else:
            self.switch.stay()

    def _has_room_to_change(self) -> bool:
        """For a copy of all state, and for scores where they are needed then."""
        free = free_ram()
        scores = score_bytes(self._model, self._settings) if self.switch.flash else 0
        return free is None or self.cells.used * self.row_bytes + scores < free

    def _move_into(self, room: int, flash: bool) -> bool:
        """All state goes into a context of so many cells with this kind of attention. False: it is as before.

        Raises MemoryError, and every sequence is empty then; where none can be opened the engine is unusable.
        """
        cells = self.cells if self.unit is KvUnit.RANGE else self.cells.unshared()
        if cells.used > self._settings.cells or not cells.is_whole:
            return False
        is_new, before = True, (self.room, self.switch.flash)
        try:
            moved = [(*branch, self._take_out(cells, branch[0], branch[2])) for branch in cells.branches()]
        except (EngineError, MemoryError) as error:
            log.warning("the context stays as it is: %s", error)
            return False
        try:
            self._reopen_as(room, flash)
        except EngineError as error:
            log.warning("the context stays as it is: %s", error)
            is_new = False
            try:
                self._reopen_as(*before)
            except EngineError as failure:
                raise MemoryError(str(failure)) from failure
            finally:
                if flash != self.switch.flash:
                    self.switch.settle()
        self._put_back(moved)
        self.cells = cells
        return is_new

    def _reopen_as(self, room: int, flash: bool) -> None:
        self.room = room
        if flash != self.switch.flash:
            self.switch.change()
            self.layout, self._other_layout = self._other_layout, self.layout
        self._reopen()

    def _take_out(self, cells: CellMap, sequence: int, start: int) -> Bytes:
        """A copy of the state from `start` on."""
        end = cells[sequence].end
        return np.empty(0, np.uint8) if start == end else self.read(sequence, start, end)

    def _put_back(self, moved: Sequence[tuple[int, int | None, int, Bytes]]) -> None:
        """Into an empty context: `CellMap.branches`, each with the state that it does not share. Raises
        MemoryError, and the context is empty again then."""
        try:
            for sequence, other, start, state in moved:
                if other is not None:
                    llama().llama_memory_seq_cp(self.memory, other + 1, sequence + 1, 0, start)
                if not len(state):
                    has_room = True
                elif self.unit is KvUnit.RANGE:
                    has_room = self.append(sequence, start, -1, state)
                else:
                    has_room = write_state(self.handle, sequence + 1, self.layouts.rearrange(state))
                if not has_room:
                    raise MemoryError("llama.cpp has fewer cells than before.")
        except MemoryError:
            llama().llama_memory_clear(self.memory, True)
            raise

    def _open(self) -> None:
        on_node = self.experts.callback if self.experts is not None else None
        begin = perf_counter()
        settings = replace(self._settings, flash=self.switch.flash, cells=self.room)
        self._opened = open_context(self._model, settings, on_node)
        self._opening_seconds = perf_counter() - begin
        self._threads.attach(self._opened)

    def _reopen(self) -> None:
        self._free()  # before the other is opened: there may not be room for both
        with buffers_that_go():
            self._open()

    def _free(self) -> None:
        self.cells = CellMap()
        self.views.clear()
        if self._opened:
            llama().llama_free(self._opened)
            self._opened = 0


def _rounded(cells: int) -> int:
    return -(-cells // _GRAIN) * _GRAIN


# ── with flash attention or without ──

_SKIPPED = 0.1
"""What a cell of another sequence costs a row with flash attention, as a share of one of its own."""
_NEAR = 128
"""Tokens: steps are told apart no better, so that most are looked up."""
_LOOKED_UP = 4096
"""Kinds of steps that are remembered."""


class FlashSwitch:
    """In which way the next step is computed. Belongs to the engine's thread, but for `flash`, `table` and
    `seconds`, which any may ask for.

    With flash attention a row skips the cells of other sequences, but fewer than 64 rows are taken one by one.
    Without, rows are taken together from 8 on, over all cells in use. So a context is opened the other way when
    the time that was lost, step by step, exceeds some times what that costs: whatever comes, not much more is lost
    than must be.
    """

    def __init__(self, tables: Mapping[bool, StepTable], flash: bool, *, has_choice: bool) -> None:
        """`tables`: what steps take with flash attention and without, as far as that was measured; `flash`: how it
        begins; `has_choice`: it may change."""
        self.flash = flash
        self.has_choice = has_choice
        self._tables = tables
        self._lost = 0.0
        self._seconds = lru_cache(_LOOKED_UP)(self._find_seconds)
        self._losses = lru_cache(_LOOKED_UP)(self._find_loss)

    @property
    def table(self) -> StepTable | None:
        """What steps take now."""
        return self._tables.get(self.flash)

    def measured(self, tables: Mapping[bool, StepTable]) -> None:
        """So long do steps take, as far as is known now."""
        self._tables = {flash: table for flash, table in tables.items() if self.has_choice or flash == self.flash}
        self._losses.cache_clear()
        self._seconds.cache_clear()

    def seconds(self, rows: int, depth: int, cells: int, outputs: int) -> float | None:
        """What a step takes if the kind of attention follows it. Who plans steps goes by it: plans that know of
        one kind only would never give a reason to change."""
        return self._seconds(rows, depth // _NEAR, cells // _NEAR, outputs)

    def _find_seconds(self, rows: int, depth: int, cells: int, outputs: int) -> float | None:
        tables = self._tables.items()
        return min(
            (table.seconds(rows, _attended(flash, depth, cells), outputs) for flash, table in tables), default=None
        )

    def is_due(self, batch: Sequence[Rows], cells: int, seconds: float) -> bool:
        """Whether to change before this step, with so many `cells` in use, where that is worth `seconds`."""
        if not self.has_choice or len(self._tables) < 2:
            return False
        rows = depths = 0
        for each in batch:
            count = len(each.tokens)
            rows, depths = rows + count, depths + count * each.start
        self._lost = max(self._lost + self._losses(rows, depths // max(rows, 1) // _NEAR, cells // _NEAR), 0.0)
        return self._lost > seconds

    def _find_loss(self, rows: int, depth: int, cells: int) -> float:
        """Seconds of a step of so many rows, at that depth on average, which it would not take the other way."""
        ways = (self.flash, not self.flash)
        now, then = (self._tables[flash].seconds(rows, _attended(flash, depth, cells)) for flash in ways)
        return now - then

    def change(self) -> None:
        self.flash = not self.flash
        self._lost = 0.0
        self._losses.cache_clear()

    def stay(self) -> None:
        """It cannot be changed now."""
        self._lost = 0.0

    def settle(self) -> None:
        """It cannot be changed any more, or only back."""
        self.has_choice = False
        self.measured(self._tables)


def _attended(flash: bool, depth: int, cells: int) -> int:
    """How many tokens a row looks at, of `depth` before it in its sequence and `cells` in use, both in steps of
    `_NEAR`."""
    own, used = _NEAR * depth, _NEAR * cells
    return own + int(_SKIPPED * max(used - own, 0)) if flash else used
