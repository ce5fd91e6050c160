"""The llama.cpp engine: one context over one model, with a unified KV cache."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import isnan
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import free_ram, peak_ram
from emberkeep.engine.base import (
    Blended,
    Capabilities,
    Exported,
    KvExport,
    KvUnit,
    Logits,
    Outcome,
    Payload,
    Piece,
    Rows,
    check_splice,
)
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.cells import CellMap
from emberkeep.engine.llamacpp.context import (
    NOT_TUNED,
    LlamaSettings,
    ThreadPool,
    Tuning,
    available_cores,
    fingerprint,
    one_core_each,
    open_context,
    outputs,
    score_bytes,
    windows_suffice,
)
from emberkeep.engine.llamacpp.expert_counter import ExpertCounter
from emberkeep.engine.llamacpp.flash_switch import FlashSwitch
from emberkeep.engine.llamacpp.footprint import footprint_of
from emberkeep.engine.llamacpp.kv_packing import pack_range, packs, unpack_range
from emberkeep.engine.llamacpp.kv_state import (
    PARTIAL,
    BatchBuffer,
    Bytes,
    Layout,
    read_state,
    share_range,
    write_state,
)
from emberkeep.engine.llamacpp.learning import StateFacts
from emberkeep.engine.llamacpp.model import LlamaModel, gpus
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, llama, take_buffers, take_errors
from emberkeep.engine.llamacpp.staging import Staging
from emberkeep.engine.llamacpp.transpose import Layouts
from emberkeep.engine.packing import is_packed
from emberkeep.errors import EngineError, StepFailed
from emberkeep.types.request import Json

logger = logging.getLogger("emberkeep.engine")

_SCRATCH = 0
"""llama.cpp's sequence that exports and imports go through; the scheduler's sequence n is its n + 1."""


WIDE_ROWS = 64
"""A CPU's flash attention takes so many queries at once, and fewer one by one. Of GPUs this is not known, and
without flash attention it is measured."""


_FEW = 256
"""Rows of a step that is taken for nothing."""
FIRST_CELLS = 2048
"""Of a context that grows: it has more when they are needed."""
_GRAIN = 256
"""llama.cpp rounds the number of cells up to a multiple of it."""
_TIMES_LOST = 4
"""So many times must be lost what changing attention costs: prompt and answer of a short turn, each quicker in
another way, would else pay for a change each."""
_MOVED_PER_S = 1 << 30
"""Bytes of state that are taken out of one context and put into another, about."""


def _rounded(cells: int) -> int:
    return -(-cells // _GRAIN) * _GRAIN


class _Branch(NamedTuple):
    """A sequence on its way into another context: what it does not share is in `state`."""

    sequence: int
    shared_with: int | None
    start: int
    """How many cells it shares with that one."""
    state: Bytes


class LlamaEngine:
    """Owns `model` and its context; `close` frees both. See `Engine` for the contracts.

    On a CPU a context begins with few cells, and one with more takes its place when they are needed, up to those
    of the settings. `rest` goes back to fewer.

    Raises EngineError, and has freed them then, where there is no room.
    """

    def __init__(
        self,
        model: LlamaModel,
        settings: LlamaSettings,
        weights_digest: str,
        tuning: Tuning = NOT_TUNED,
        facts: Facts | None = None,
        *,
        owns_thread: bool = False,
    ) -> None:
        """`facts`: what is remembered of the model. `owns_thread`: this thread is there for the engine alone, and
        may be bound to a core."""
        self._model = model
        self.vocab = model.vocab
        self._settings = settings
        self.attention = None
        self._tuning = tuning
        self._switch = FlashSwitch(tuning.tables, settings.flash, has_choice=tuning.has_choice)
        self._changes = 0
        self.experts = ExpertCounter.of(model, self._reopen)
        self._threads = ThreadPool()
        self._staging: Staging | None = None
        self._opened: Handle = 0
        self._cells = CellMap()
        self._batch = BatchBuffer(settings.batch)
        self._first_outputs: list[int] = []
        self._logits: dict[int, Logits] = {}
        """Views, by address, of what the context has for them."""
        self._is_settled = not owns_thread
        try:
            self._threads.start(settings.threads or available_cores())
            self._state_facts = StateFacts(facts, model, settings, both=self._switch.has_choice)
            self._learn()
            self._open()
            self._share_windows = self._layout is None or windows_suffice(self._context, self._layout, settings)
            allocated = take_buffers()
            if model.offloads and self._layout is not None and self._unit.has_ranges:
                self._staging = Staging(gpus()[0].handle, self._layout.range_bytes(settings.chunk))
            self.capabilities = self._learn_capabilities()
            self.fingerprint = fingerprint(
                model, weights_digest, settings, self._context, self._layout, either=self._switch.has_choice
            )
            if model.offloads:
                self._take_a_step()
            has_scores = self._switch.has_choice or (not settings.flash and self._room < settings.cells)
            self.footprint = footprint_of(model, settings, allocated, self._row_bytes(), has_scores)
        except EngineError:
            self.close()
            raise

    def _learn(self) -> None:
        """How state lies; no choice where it does not lie as it should with the other kind of attention."""
        learned = self._state_facts.learned()
        self._layout, self._other_layout, self._can_shift = learned.layout, learned.other, learned.can_shift
        self._is_layout_seen = False
        self._unit = self._layout.unit if self._layout else KvUnit.SNAPSHOT
        if self._other_layout is None:
            self._switch.settle()
        # What is on a GPU is planned as a whole, and with the number of cells some models rotate in another way.
        is_steady = self._model.offloads or self._settings.rope_switches or self._unit is not KvUnit.RANGE
        # llama.cpp takes no more rows in a step than a context has cells.
        first = max(FIRST_CELLS, _rounded(self._settings.batch))
        self._room = self._settings.cells if is_steady else min(first, self._settings.cells)
        """Cells of the context."""
        self._least_room = self._room

    def _take_a_step(self) -> None:
        """So that threads are there and memory was touched; and a GPU has loaded its kernels, and given its
        libraries what they compute with, before it is asked what is free there: about 90 MiB."""
        self.evaluate([Rows(0, 0, np.zeros(min(_FEW, self._settings.batch), np.int32), outputs=1)])
        self.logits(0)
        self.trim(0, 0)

    def _learn_capabilities(self) -> Capabilities:
        layout, settings = self._layout, self._settings
        return Capabilities(
            kv_unit=self._unit,
            can_shift=self._can_shift,
            max_sequences=settings.sequences,
            cells=settings.cells,
            context=min(settings.context, settings.cells),
            batch=settings.batch,
            outputs=outputs(settings),
            kv_bytes_per_token=self._row_bytes(),
            snapshot_bytes=self._snapshot_bytes(),
            packs=packs(layout),
            # Snapshots are taken where a step ends, so they cannot come later.
            runs_ahead=self._model.offloads and not self._unit.has_snapshots,
            wide_rows=self._wide_rows(),
            resting_cells=self._least_room if self._least_room < settings.cells else None,
        )

    def _wide_rows(self) -> int | None:
        """None with a choice: the same step rounds in two ways then."""
        if self._model.offloads or self._switch.has_choice:
            return None
        return WIDE_ROWS if self._settings.flash else self._tuning.wide_rows

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return self._switch.seconds(rows, depth, self._cells.used, outputs)

    @property
    def _layouts(self) -> Layouts:
        assert self._layout is not None
        return Layouts(self._layout, self._other_layout)

    def _row_bytes(self) -> int:
        return self._layout.row_bytes if self._layout else 0

    # ── evaluation ──

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if not self._is_settled:
            return self._evaluate_first(batch)
        for rows in batch:
            self._require(rows.sequence, end=rows.start)
        if self._switch.is_due(batch, self._cells.used, _TIMES_LOST * self._changing_seconds()):
            self._change_attention()
        filler = self._filler(batch)
        is_done = filler is not None and self._decode_filled(batch, filler)
        while not is_done and not self._decode(batch):
            if not self._grow(sum(len(rows.tokens) for rows in batch)):
                return Outcome.NO_ROOM
        for rows in batch:
            self._cells.grow(rows.sequence, rows.start + len(rows.tokens))
        if self.experts is not None:
            self.experts.step_done()
        return Outcome.DONE

    def _evaluate_first(self, batch: Sequence[Rows]) -> Outcome:
        """The workers of the thread come with its first step."""
        self._is_settled = True
        with one_core_each():
            return self.evaluate(batch)

    def _filler(self, batch: Sequence[Rows]) -> Rows | None:
        """Rows that mean nothing, and with which the step is quicker than without."""
        # A recurrent layer takes sequences of different lengths one after the other, and experts are counted.
        is_plain = self._unit is KvUnit.RANGE and not (self.experts and self.experts.enabled)
        table = self._switch.table
        if table is None or not is_plain:
            return None
        count = sum(len(rows.tokens) for rows in batch)
        depth = max(rows.start for rows in batch)
        more = table.filled(count, depth, self._settings.batch) - count
        return Rows(_SCRATCH - 1, 0, np.zeros(more, np.int32), outputs=0) if more else None

    def _decode_filled(self, batch: Sequence[Rows], filler: Rows) -> bool:
        """As `_decode`. No sequence sees the rows of `filler`, and nothing is left of them."""
        try:
            return self._decode([*batch, filler])
        finally:
            llama().llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)

    def _decode(self, batch: Sequence[Rows]) -> bool:
        """False where there is no room: nothing has changed then. Raises EngineError."""
        llama_batch, self._first_outputs = self._batch.fill(batch)
        if not self._switch.flash:
            self._batch.want_any()
        code: int = llama().llama_decode(self._context, llama_batch)
        if code > 1 or code < 0:
            raise EngineError(f"llama.cpp could not evaluate a batch: {take_errors() or f'code {code}'}.")
        if code == 1:
            take_errors()
        elif not self._switch.flash:
            self._check_numbers()
        return code == 0

    def _check_numbers(self) -> None:
        """Raises FloatingPointError, and has forgotten every sequence then, if the step computed no numbers.

        Without flash attention what is not seen is multiplied by 0. That is nothing, unless it is infinite or no
        number: one cell of that kind spoils every sequence, and goes on doing so when it is free.
        """
        address = llama().llama_get_logits_ith(self._context, self._batch.wanted)
        if isnan(ctypes.c_float.from_address(address).value):
            llama().llama_memory_clear(self._memory, True)
            self._cells = CellMap()
            raise FloatingPointError("The model computed something else than numbers: try flash_attention = on.")

    def logits(self, index: int, row: int = 0) -> Logits:
        address: int | None = llama().llama_get_logits_ith(self._context, self._first_outputs[index] + row)
        if address is None:
            raise EngineError("llama.cpp has no logits for that row.")
        # The same few addresses at every step: making a view takes as long as finding the highest number in it.
        view = self._logits.get(address)
        if view is None:
            array = (ctypes.c_float * self.vocab.size).from_address(address)
            view = self._logits[address] = np.frombuffer(memoryview(array), np.float32)
            view.flags.writeable = False
        return view

    def likeliest(self, index: int, row: int = 0) -> int:
        return int(self.logits(index, row).argmax())

    # ── state ──

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        if borders[-1] > self._cells[sequence].end:
            raise EngineError(f"Sequence {sequence} does not reach from {borders[0]} to {borders[-1]}.")
        if self._layout is None or not self._unit.has_ranges:
            return Exported([memoryview(b"")] * (len(borders) - 1))
        return self._export_ranges(self._layout, sequence, borders, bits)

    def _export_ranges(self, layout: Layout, sequence: int, borders: Sequence[int], bits: int) -> KvExport:
        def read(start: int, end: int, into: Bytes | None = None) -> Bytes:
            with share_range(self._memory, sequence + 1, _SCRATCH, start, end):
                if layout.recurrent:
                    # Takes the recurrent state, which may be large, out of the copy.
                    write_state(self._context, _SCRATCH, layout.empty_snapshot, PARTIAL)
                return read_state(self._context, _SCRATCH, into=into)

        if not self._is_layout_seen:
            self._check_layout(layout, read(borders[0], borders[1]), borders[0], borders[1])

        if self._staging is not None and len(borders) > 2:
            return self._staging.export(layout, borders, read, bits)
        # Cut outside of the library where an export brings the windows with it: once is enough.
        spans = pairwise(borders) if self._unit is KvUnit.RANGE else [borders]
        payloads = [payload for span in spans for payload in layout.split(read(span[0], span[-1]), span)]
        if bits == 16:
            return Exported(payloads)
        ranges = zip(payloads, pairwise(borders), strict=True)
        return Exported([pack_range(layout, payload, end - start, bits) for payload, (start, end) in ranges])

    def _check_layout(self, layout: Layout, state: Bytes, start: int, end: int) -> None:
        """Once: what was remembered of the layout is that of this very context. Raises EngineError."""
        with self._remembered_rightly():
            (payload,) = layout.split(state, (start, end))
            if layout.check_range(payload, start) != end:
                raise EngineError("it holds another number of tokens")
        self._is_layout_seen = True

    @contextmanager
    def _remembered_rightly(self) -> Iterator[None]:
        """An EngineError says that the layout is not that of this context: it is forgotten. Raises EngineError."""
        try:
            yield
        except EngineError as error:
            self._state_facts.forget()
            raise EngineError(
                f"llama.cpp's state is not as it was remembered ({error}): nothing is stored until a restart."
            ) from error

    def export_snapshot(self, sequence: int) -> Payload:
        layout, end = self._snapshot_layout(), self._cells[sequence].end
        self._require(sequence, end=end)
        state = self._read_rest(sequence)
        with self._remembered_rightly():
            layout.check_snapshot(memoryview(state), end)
        return memoryview(state)

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        payloads = [self._unpacked(payload) for payload in payloads]
        ends = self._payload_ends(payloads, payload_start, end)
        if not payload_start <= start < end <= ends[-1]:
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        held = self._cells[sequence]
        if held.end != start:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        while self._unit.has_ranges and not self._import_ranges(sequence, start, end, payloads, ends):
            # A part of it may be there.
            llama().llama_memory_seq_rm(self._memory, sequence + 1, start, -1)
            if not self._grow(ends[-1] - payload_start):
                return Outcome.NO_ROOM
        self._cells.grow(sequence, end)
        held.is_whole = not self._unit.has_snapshots
        return Outcome.DONE

    def _unpacked(self, payload: Payload) -> Payload:
        if self._layout is None or not self._unit.has_ranges or self._layout.begins(payload):
            return payload
        return unpack_range(self._layouts, payload) if is_packed(payload) else payload

    def _payload_ends(self, payloads: Sequence[Payload], start: int, end: int) -> list[int]:
        if self._layout is not None and self._unit.has_ranges:
            ends = [start]
            for payload in payloads:
                ends.append(self._layouts.of(np.frombuffer(payload, np.uint8)).check_range(payload, ends[-1]))
            return ends[1:]
        if any(len(payload) for payload in payloads):
            raise EngineError("A stored KV payload holds ranges, and this model's state has none.")
        return [end]

    def _import_ranges(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], ends: Sequence[int]
    ) -> bool:
        """They were checked. False: there is no room for all of them."""
        states = [np.frombuffer(payload, np.uint8) for payload in payloads]

        def write(until: int, state: Bytes) -> bool:
            nonlocal start
            begin, start = start, min(until, end)
            return begin >= start or self._import_range(sequence, begin, start, state)

        if self._staging is not None and len(states) > 1:
            own = [self._layouts.rearrange(state) for state in states]
            return self._staging.load(self._layouts.own, own, ends, write)
        return all(write(until, state) for until, state in zip(ends, states, strict=True))

    def _import_range(self, sequence: int, start: int, end: int, state: Bytes) -> bool:
        """`state` was checked. False: there is no room, and nothing has changed."""
        has_room = write_state(self._context, _SCRATCH, self._layouts.rearrange(state))
        if has_room:
            llama().llama_memory_seq_cp(self._memory, _SCRATCH, sequence + 1, start, end)
        llama().llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return has_room

    def payload_buffer(self, size: int) -> memoryview | None:
        return None

    def is_loading(self, sequence: int) -> bool:
        return False

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        layout, held = self._snapshot_layout(), self._cells[sequence]
        if held.end != position and (self._unit.has_ranges or held.end):
            raise EngineError(f"Sequence {sequence} ends at {held.end}, not where the snapshot was taken.")
        state = np.frombuffer(payload, np.uint8)
        (self._layouts.of(state) if layout.windows else layout).check_snapshot(payload, position)
        if layout.windows:
            state = self._layouts.rearrange_snapshot(state)
        self._cells.grow(sequence, position)
        held.is_whole = write_state(self._context, sequence + 1, state, PARTIAL)
        return Outcome.DONE if held.is_whole else Outcome.NO_ROOM

    def copy_kv(self, source: int, target: int, end: int) -> None:
        held = self._cells[source]
        if self._unit.has_snapshots and end != held.end:
            raise EngineError(f"This model's state can be shared only as a whole, and {end} is not where it ends.")
        llama().llama_memory_seq_cp(self._memory, source + 1, target + 1, 0, end)
        is_whole = held.is_whole
        if is_whole and not self._share_windows:
            is_whole = write_state(self._context, target + 1, self._read_rest(source), PARTIAL)
        self._cells.share(source, target, end)
        self._cells[target].is_whole = is_whole

    def trim(self, sequence: int, start: int) -> None:
        held = self._cells[sequence]
        is_possible = not self._unit.has_snapshots or start == 0 or start >= held.end
        if not is_possible or not llama().llama_memory_seq_rm(self._memory, sequence + 1, start, -1):
            raise EngineError(f"This model's state cannot be cut back to {start} tokens.")
        self._cells.trim(sequence, start)

    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        """Should llama.cpp fail in the middle of it, the sequence is emptied and StepFailed is raised."""
        length = self._cells[sequence].end
        check_splice(self.capabilities, length, start, end, insert)
        shared = length - end - self._cells.count_unshared(sequence, end, length)
        more = len(insert) + shared - self._cells.count_unshared(sequence, start, end)
        # Asked before anything changes: llama.cpp finds out when it has already rotated, which cannot be undone.
        if self._cells.used + more > self._room and not self._grow(more):
            return Outcome.NO_ROOM
        try:
            self._set_aside(sequence, start, end, is_shared=shared > 0)
            self._insert(sequence, start, insert, by=start + len(insert) - end)
            llama().llama_memory_seq_cp(self._memory, _SCRATCH, sequence + 1, -1, -1)
            self._cells.grow(sequence, length + start + len(insert) - end)
        except EngineError as error:
            self.trim(sequence, 0)
            raise StepFailed(f"State that was being moved is lost, so evaluate it again: {error}") from error
        finally:
            llama().llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return Outcome.DONE

    def _set_aside(self, sequence: int, start: int, end: int, *, is_shared: bool) -> None:
        """Forget positions from `start` on, and leave those from `end` on in the scratch sequence.

        A cell has one position for all who share it, so what is shared gets cells of its own: it will move.
        """
        if is_shared:
            with share_range(self._memory, sequence + 1, _SCRATCH, end, -1):
                followers = read_state(self._context, _SCRATCH)
            self.trim(sequence, start)
            if not write_state(self._context, _SCRATCH, followers):
                raise EngineError("llama.cpp has fewer free cells than were counted.")
        else:
            llama().llama_memory_seq_cp(self._memory, sequence + 1, _SCRATCH, end, -1)
            self.trim(sequence, start)

    def _insert(self, sequence: int, start: int, insert: npt.NDArray[np.int32], *, by: int) -> None:
        """Evaluate `insert`, and move what was set aside. Raises EngineError.

        llama.cpp only notes what is to move; it rotates the keys in the next step, before anything else.
        """
        take_errors()
        llama().llama_memory_seq_add(self._memory, _SCRATCH, -1, -1, by)
        step = self._settings.batch
        for begin in range(0, len(insert), step):
            rows = Rows(sequence, start + begin, insert[begin : begin + step], outputs=0)
            if not self._decode([rows]):  # not filled up: the scratch sequence is in use
                raise EngineError("llama.cpp has fewer free cells than were counted.")
            self._cells.grow(sequence, rows.start + len(rows.tokens))
        self._first_outputs = []
        # It goes on without rotating when that fails.
        if complaint := take_errors():
            raise EngineError(f"llama.cpp could not rotate keys: {complaint}.")

    def _require(self, sequence: int, *, end: int) -> None:
        """Raises EngineError unless `sequence` ends at `end` and has all of its state."""
        held = self._cells[sequence]
        if held.end != end:
            raise EngineError(f"Sequence {sequence} ends at {held.end}, not at {end}.")
        if not held.is_whole:
            raise EngineError(f"Sequence {sequence} has no snapshot of its first {end} tokens to go on from.")

    def _read_rest(self, sequence: int) -> Bytes:
        """What is not by range."""
        with share_range(self._memory, sequence + 1, _SCRATCH, 0, self._cells[sequence].end):
            return read_state(self._context, _SCRATCH, PARTIAL)

    # ── other contexts: more cells or fewer, the other kind of attention ──

    def _grow(self, more: int) -> bool:
        """Open a context that has room for so many more cells, or for as many as there may be. False: it stays."""
        if self._room >= self._settings.cells:
            return False
        least = min(self._settings.cells, _rounded(self._cells.used + more))
        room = min(self._settings.cells, max(2 * self._room, least))
        free = free_ram()
        if free is not None:  # beside the new one there is a copy of all state
            room = min(room, (free // self._row_bytes() - self._cells.used) // _GRAIN * _GRAIN)
        return max(least, self._room + 1) <= room and self._resize(room)

    def rest(self) -> None:
        room = max(self._least_room, _rounded(self._cells.used))
        if 2 * room <= self._room:
            self._resize(room)

    def _resize(self, room: int) -> bool:
        before, self._room = self._room, room
        if self._move_into(self._reopen, self._reopen_with(before)):
            return True
        self._room = before
        return False

    def _reopen_with(self, room: int) -> Callable[[], None]:
        def reopen() -> None:
            self._room = room
            self._reopen()

        return reopen

    @property
    def can_improve(self) -> bool:
        return not self._is_settled or self._tuning.measure is not None

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        if not self._is_settled:
            self._take_a_step()
        if self._tuning.measure is not None:
            tuning = self._tuning.measure(is_wanted)
            if tuning is None:
                return False
            self._tuning = tuning
            self._switch.measured(tuning.tables)
        return True

    def _changing_seconds(self) -> float:
        return self._opening_seconds + self._cells.used * self.capabilities.kv_bytes_per_token / _MOVED_PER_S

    def _change_attention(self) -> None:
        """Everything goes into a context with the other kind of attention, if there is room for it.

        Raises MemoryError, and every sequence is empty then.
        """
        if not self._has_room_to_change() or not self._move_into(self._open_other_way, self._open_back):
            self._switch.stay()

    def _move_into(self, reopen: Callable[[], None], go_back: Callable[[], None]) -> bool:
        """All state goes into the context that `reopen` opens in the place of this one, or that `go_back` opens
        where that fails. False: it is as before.

        Raises MemoryError, and every sequence is empty then.
        """
        cells = self._cells if self._unit is KvUnit.RANGE else self._cells.unshared()
        if cells.used > self._settings.cells or not cells.is_whole:
            return False
        try:
            moved = [_Branch(*branch, self._take_out(*branch)) for branch in cells.branches()]
        except (EngineError, MemoryError) as error:
            logger.warning("the context stays as it is: %s", error)
            return False
        is_new = True
        try:
            reopen()
        except EngineError as error:
            logger.warning("the context stays as it is: %s", error)
            is_new = False
            self._insist(go_back)
        self._put_back(moved)
        self._cells = cells
        return is_new

    def _insist(self, go_back: Callable[[], None]) -> None:
        """Raises MemoryError, and the engine is then unusable."""
        try:
            go_back()
        except EngineError as error:
            raise MemoryError(str(error)) from error

    def _has_room_to_change(self) -> bool:
        """For a copy of all state, and for scores where they are needed then."""
        free = free_ram()
        scores = score_bytes(self._model, self._settings) if self._switch.flash else 0
        return free is None or self._cells.used * self._row_bytes() + scores < free

    def _take_out(self, sequence: int, _: int | None, start: int) -> Bytes:
        """A copy of the state from `start` on."""
        end = self._cells[sequence].end
        if start == end:
            return np.empty(0, np.uint8)
        with share_range(self._memory, sequence + 1, _SCRATCH, start, end):
            return read_state(self._context, _SCRATCH)

    def _put_back(self, moved: Sequence[_Branch]) -> None:
        """Into an empty context. Raises MemoryError, and it is empty again then."""
        try:
            for branch in moved:
                if branch.shared_with is not None:
                    source, target = branch.shared_with + 1, branch.sequence + 1
                    llama().llama_memory_seq_cp(self._memory, source, target, 0, branch.start)
                if len(branch.state) and not self._write_branch(branch):
                    raise MemoryError("llama.cpp has fewer cells than before.")
        except MemoryError:
            llama().llama_memory_clear(self._memory, True)
            raise

    def _write_branch(self, branch: _Branch) -> bool:
        if self._unit is KvUnit.RANGE:
            return self._import_range(branch.sequence, branch.start, -1, branch.state)
        return write_state(self._context, branch.sequence + 1, self._layouts.rearrange(branch.state))

    def _open_other_way(self) -> None:
        self._turn_switch()
        self._reopen()
        self._changes += 1

    def _turn_switch(self) -> None:
        self._switch.change()
        self._layout, self._other_layout = self._other_layout, self._layout

    def _open_back(self) -> None:
        """After `_open_other_way` has failed."""
        self._turn_switch()
        self._switch.settle()
        self._reopen()

    def blend(self, rows: Rows, pieces: Sequence[Piece], ratio: float) -> Blended:
        raise EngineError("llama.cpp's state cannot be moved: use the Hugging Face engine (--engine hf).")

    def peak_bytes(self) -> int | None:
        if not self._model.offloads:
            return peak_ram()
        if self.footprint is None:
            return None
        # What a GPU was given it keeps.
        free = next((gpu.free for gpu in gpus() if gpu.name == self.footprint.device), None)
        return None if free is None else max(self.footprint.capacity - free, 0)

    def stats(self) -> dict[str, Json]:
        return {
            "cells": self._room,
            "flash_attention": "on" if self._switch.flash else "off",
            "flash_attention_reason": self._tuning.reason,
            "flash_attention_changes": self._changes,
        }

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._free()
        self._threads.close()
        self._model.close()

    def _open(self) -> None:
        on_node = self.experts.callback if self.experts is not None else None
        begin = perf_counter()
        self._opened = open_context(self._model, self._settings_now, on_node)
        self._opening_seconds = perf_counter() - begin
        self._threads.attach(self._context)

    @property
    def _settings_now(self) -> LlamaSettings:
        return replace(self._settings, flash=self._switch.flash, cells=self._room)

    def _free(self) -> None:
        self._cells = CellMap()
        self._logits.clear()
        if self._opened:
            llama().llama_free(self._opened)
            self._opened = 0

    @property
    def _context(self) -> Handle:
        """Raises EngineError where there is none any more."""
        if not self._opened:
            raise EngineError("llama.cpp's context could not be opened again: restart.")
        return self._opened

    @property
    def _memory(self) -> Handle:
        memory: Handle = llama().llama_get_memory(self._context)
        return memory

    def _reopen(self) -> None:
        self._free()  # before the other is opened: there may not be room for both
        with buffers_that_go():
            self._open()

    def _snapshot_layout(self) -> Layout:
        if self._layout is None or not self._unit.has_snapshots:
            raise EngineError("This model's state has nothing that could be kept as a snapshot.")
        return self._layout

    def _snapshot_bytes(self) -> int:
        if self._layout is None or not self._unit.has_snapshots:
            return 0
        return self._layout.snapshot_bytes(min(self._layout.window, self._settings.cells))
