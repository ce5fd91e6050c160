"""The context that an engine computes in, the cells that its sequences have there, and how another one takes its
place: with more cells or fewer, or with the other kind of attention.
"""

from __future__ import annotations

import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from operator import itemgetter
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import free_ram
from emberkeep.engine.base import KvUnit, Logits
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import GraphExpertCounter, LlamaSettings, open_context, score_bytes
from emberkeep.engine.llamacpp.kv_forms import Layouts
from emberkeep.engine.llamacpp.kv_parts import Bytes
from emberkeep.engine.llamacpp.kv_state import WHOLE, read_state, share_range, write_state
from emberkeep.engine.llamacpp.learning import Learned
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, llama
from emberkeep.engine.llamacpp.threads import ThreadPool, available_cores
from emberkeep.engine.llamacpp.tuning import FlashSwitch
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

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
        self._threads.start(settings.threads or available_cores())
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
        with share_range(self.memory, sequence + 1, SCRATCH, start, end):
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
        return max(least, self.room + 1) <= room and self._resize(room)

    def rest(self) -> None:
        """Go back to fewer cells where that saves half of them."""
        room = max(self.least_room, _rounded(self.cells.used))
        if 2 * room <= self.room:
            self._resize(room)

    def _resize(self, room: int) -> bool:
        before = self.room

        def reopen_with(cells: int) -> None:
            self.room = cells
            self._reopen()

        is_moved = self._move_into(lambda: reopen_with(room), lambda: reopen_with(before))
        self.room = room if is_moved else before
        return is_moved

    def seconds_to_lose(self) -> float:
        """How much time must have been lost before changing attention is worth it."""
        return _TIMES_LOST * (self._opening_seconds + self.cells.used * self.row_bytes / _MOVED_PER_S)

    def change_attention(self) -> None:
        """Everything goes into a context with the other kind of attention, if there is room for it."""
        if not self._has_room_to_change() or not self._move_into(self._open_other_way, self._open_back):
            self.switch.stay()

    def _has_room_to_change(self) -> bool:
        """For a copy of all state, and for scores where they are needed then."""
        free = free_ram()
        scores = score_bytes(self._model, self._settings) if self.switch.flash else 0
        return free is None or self.cells.used * self.row_bytes + scores < free

    def _open_other_way(self) -> None:
        self._turn_switch()
        self._reopen()
        self.changes += 1

    def _turn_switch(self) -> None:
        self.switch.change()
        self.layout, self._other_layout = self._other_layout, self.layout

    def _open_back(self) -> None:
        """After `_open_other_way` has failed."""
        self._turn_switch()
        self.switch.settle()
        self._reopen()

    def _move_into(self, reopen: Callable[[], None], go_back: Callable[[], None]) -> bool:
        """All state goes into the context that `reopen` opens in the place of this one, or that `go_back` opens
        where that fails. False: it is as before.

        Raises MemoryError, and every sequence is empty then.
        """
        cells = self.cells if self.unit is KvUnit.RANGE else self.cells.unshared()
        if cells.used > self._settings.cells or not cells.is_whole:
            return False
        try:
            moved = [_Branch(*branch, self._take_out(*branch)) for branch in cells.branches()]
        except (EngineError, MemoryError) as error:
            log.warning("the context stays as it is: %s", error)
            return False
        is_new = True
        try:
            reopen()
        except EngineError as error:
            log.warning("the context stays as it is: %s", error)
            is_new = False
            self._insist(go_back)
        self._put_back(moved)
        self.cells = cells
        return is_new

    def _insist(self, go_back: Callable[[], None]) -> None:
        """Raises MemoryError, and the engine is then unusable."""
        try:
            go_back()
        except EngineError as error:
            raise MemoryError(str(error)) from error

    def _take_out(self, sequence: int, _: int | None, start: int) -> Bytes:
        """A copy of the state from `start` on."""
        end = self.cells[sequence].end
        return np.empty(0, np.uint8) if start == end else self.read(sequence, start, end)

    def _put_back(self, moved: Sequence[_Branch]) -> None:
        """Into an empty context. Raises MemoryError, and it is empty again then."""
        try:
            for branch in moved:
                if branch.shared_with is not None:
                    source, target = branch.shared_with + 1, branch.sequence + 1
                    llama().llama_memory_seq_cp(self.memory, source, target, 0, branch.start)
                if len(branch.state) and not self._write_branch(branch):
                    raise MemoryError("llama.cpp has fewer cells than before.")
        except MemoryError:
            llama().llama_memory_clear(self.memory, True)
            raise

    def _write_branch(self, branch: _Branch) -> bool:
        if self.unit is KvUnit.RANGE:
            return self.append(branch.sequence, branch.start, -1, branch.state)
        return write_state(self.handle, branch.sequence + 1, self.layouts.rearrange(branch.state))

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


class _Branch(NamedTuple):
    """A sequence on its way into another context: what it does not share is in `state`."""

    sequence: int
    shared_with: int | None
    start: int
    """How many cells it shares with that one."""
    state: Bytes


def _rounded(cells: int) -> int:
    return -(-cells // _GRAIN) * _GRAIN


# ── which cells sequences have ──

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
        others = [held.cells for other, held in self._of.items() if other != sequence]
        return _count_unlike(self._of[sequence].cells, others, start, end)


def _count_unlike(cells: Cells, others: Iterable[Cells], start: int, end: int) -> int:
    """How many of [start, end) are not in any of `others`."""
    mine = np.frombuffer(cells, np.int64)[start:end]
    is_shared: npt.NDArray[np.bool_] = np.zeros(len(mine), bool)
    for other in others:
        theirs = np.frombuffer(other, np.int64)[start:end]
        is_shared[: len(theirs)] |= mine[: len(theirs)] == theirs[: len(mine)]
    return len(mine) - int(is_shared.sum())


def _common(cells: Cells, others: Cells) -> int:
    """How many of the first ones are the same."""
    mine, theirs = np.frombuffer(cells, np.int64), np.frombuffer(others, np.int64)
    length = min(len(mine), len(theirs))
    differing = np.flatnonzero(mine[:length] != theirs[:length])
    return int(differing[0]) if len(differing) else length
