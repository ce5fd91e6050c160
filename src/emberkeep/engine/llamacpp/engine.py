"""The llama.cpp engine: one context over one model, with a unified KV cache."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from threading import Timer

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import peak_ram
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
from emberkeep.engine.llamacpp.context import (
    PARTIAL,
    BatchBuffer,
    LlamaSettings,
    fingerprint,
    footprint_of,
    outputs,
    windows_suffice,
    write_state,
)
from emberkeep.engine.llamacpp.gpus import gpus
from emberkeep.engine.llamacpp.learning import StateFacts
from emberkeep.engine.llamacpp.live_context import SCRATCH, FlashSwitch, LiveContext
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama, take_buffers, take_errors
from emberkeep.engine.llamacpp.staging import Staging, StateTransfer, packs
from emberkeep.engine.llamacpp.threads import one_core_each
from emberkeep.engine.llamacpp.tuning import NOT_TUNED, Tuning
from emberkeep.errors import EngineError, StepFailed
from emberkeep.types.request import Json

logger = logging.getLogger("emberkeep.engine")
WIDE_ROWS = 64
"""A CPU's flash attention takes so many queries at once, and fewer one by one. Of GPUs this is not known, and
without flash attention it is measured."""


_FEW = 256
"""Rows of a step that is taken for nothing."""
_SLOW_S = 4.0


class LlamaEngine:
    """Owns `model` and its context; `close` frees both. See `Engine` for the contracts.

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
        self._context = LiveContext(model, settings, self._switch)
        self.experts = self._context.experts
        state_facts = StateFacts(facts, model, settings, both=tuning.has_choice)
        self._transfer = StateTransfer(self._context, state_facts)
        self._batch = BatchBuffer(settings.batch)
        self._first_outputs: list[int] = []
        self._views = self._context.views
        self._is_settled = not owns_thread
        try:
            learned = state_facts.learned()
            self._can_shift = learned.can_shift
            self._context.open(learned)
            self._unit = self._context.unit
            layout = self._context.layout
            self._share_windows = layout is None or windows_suffice(self._context.handle, layout, settings)
            allocated = take_buffers()
            if model.offloads and layout is not None and self._unit.has_ranges:
                self._transfer.stage(Staging(gpus()[0].handle, layout.range_bytes(settings.chunk)))
            self.capabilities = self._learn_capabilities()
            has_choice = self._switch.has_choice
            self.fingerprint = fingerprint(
                model, weights_digest, settings, self._context.handle, layout, either=has_choice
            )
            if model.offloads:
                with _told_if_slow("The first step takes long: a GPU's driver may be compiling kernels, once."):
                    self._take_a_step()
            has_scores = has_choice or (not settings.flash and self._context.room < settings.cells)
            self.footprint = footprint_of(model, settings, allocated, self._context.row_bytes, has_scores)
        except EngineError:
            self.close()
            raise

    def _take_a_step(self) -> None:
        """So that threads are there and memory was touched; and a GPU has loaded its kernels, and given its
        libraries what they compute with, before it is asked what is free there: about 90 MiB."""
        self.evaluate([Rows(0, 0, np.zeros(min(_FEW, self._settings.batch), np.int32), outputs=1)])
        self.logits(0)
        self.trim(0, 0)

    def _learn_capabilities(self) -> Capabilities:
        context, settings = self._context, self._settings
        return Capabilities(
            kv_unit=self._unit,
            can_shift=self._can_shift,
            max_sequences=settings.sequences,
            cells=settings.cells,
            context=min(settings.context, settings.cells),
            batch=settings.batch,
            outputs=outputs(settings),
            kv_bytes_per_token=context.row_bytes,
            snapshot_bytes=self._transfer.snapshot_bytes(settings.cells),
            packs=packs(context.layout),
            # Snapshots are taken where a step ends, so they cannot come later.
            runs_ahead=self._model.offloads and not self._unit.has_snapshots,
            wide_rows=self._wide_rows(),
            joins_last=self._model.offloads and not self._unit.has_snapshots,
            resting_cells=context.least_room if context.least_room < settings.cells else None,
        )

    def _wide_rows(self) -> int | None:
        """None with a choice: the same step rounds in two ways then."""
        if self._model.offloads or self._switch.has_choice:
            return None
        return WIDE_ROWS if self._settings.flash else self._tuning.wide_rows

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return self._switch.seconds(rows, depth, self._context.cells.used, outputs)

    # ── evaluation ──

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if not self._is_settled:
            return self._evaluate_first(batch)
        for rows in batch:
            self._require(rows.sequence, end=rows.start)
        context = self._context
        if self._switch.is_due(batch, context.cells.used, context.seconds_to_lose()):
            context.change_attention()
        filler = self._filler(batch)
        is_done = filler is not None and self._decode_filled(batch, filler)
        while not is_done and not self._decode(batch):
            if not context.grow(sum(len(rows.tokens) for rows in batch)):
                return Outcome.NO_ROOM
        for rows in batch:
            context.cells.grow(rows.sequence, rows.start + len(rows.tokens))
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
        return Rows(SCRATCH - 1, 0, np.zeros(more, np.int32), outputs=0) if more else None

    def _decode_filled(self, batch: Sequence[Rows], filler: Rows) -> bool:
        """As `_decode`. No sequence sees the rows of `filler`, and nothing is left of them."""
        try:
            return self._decode([*batch, filler])
        finally:
            self._context.empty_scratch()

    def _decode(self, batch: Sequence[Rows]) -> bool:
        """False where there is no room: nothing has changed then. Raises EngineError."""
        llama_batch, self._first_outputs = self._batch.fill(batch)
        row = None if self._switch.flash else self._batch.want_any()
        code: int = llama().llama_decode(self._context.handle, llama_batch)
        if code > 1 or code < 0:
            raise EngineError(f"llama.cpp could not evaluate a batch: {take_errors() or f'code {code}'}.")
        if code == 1:
            take_errors()
        elif row is not None:
            self._check_numbers(row)
        return code == 0

    def _check_numbers(self, row: int) -> None:
        """Raises FloatingPointError, and has forgotten every sequence then, if the step computed no numbers
        for `row`.

        Without flash attention what is not seen is multiplied by 0. That is nothing, unless it is infinite or no
        number: one cell of that kind spoils every sequence, and goes on doing so when it is free.
        """
        address = llama().llama_get_logits_ith(self._context.handle, row)
        if isnan(ctypes.c_float.from_address(address).value):
            self._context.empty()
            raise FloatingPointError("The model computed something else than numbers: try flash_attention = on.")

    def logits(self, index: int, row: int = 0) -> Logits:
        address: int | None = llama().llama_get_logits_ith(self._context.handle, self._first_outputs[index] + row)
        if address is None:
            raise EngineError("llama.cpp has no logits for that row.")
        # The same few addresses at every step: making a view takes as long as finding the highest number in it.
        view = self._views.get(address)
        if view is None:
            array = (ctypes.c_float * self.vocab.size).from_address(address)
            view = self._views[address] = np.frombuffer(memoryview(array), np.float32)
            view.flags.writeable = False
        return view

    def likeliest(self, index: int, row: int = 0) -> int:
        return int(self.logits(index, row).argmax())

    # ── state ──

    draws = is_ahead = False
    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    logprobs = went_on = None

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        if borders[-1] > self._context.cells[sequence].end:
            raise EngineError(f"Sequence {sequence} does not reach from {borders[0]} to {borders[-1]}.")
        if not self._unit.has_ranges:
            return Exported([memoryview(b"")] * (len(borders) - 1))
        return self._transfer.export(sequence, borders, bits)

    def export_snapshot(self, sequence: int) -> Payload:
        layout, end = self._transfer.snapshot_layout(), self._context.cells[sequence].end
        self._require(sequence, end=end)
        return self._transfer.export_snapshot(layout, sequence, end)

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        if self._unit.has_ranges:
            states, ends = self._transfer.check(payloads, payload_start)
        elif any(len(payload) for payload in payloads):
            raise EngineError("A stored KV payload holds ranges, and this model's state has none.")
        else:
            states, ends = [], [end]
        if not payload_start <= start < end <= ends[-1]:
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        held = self._context.cells[sequence]
        if held.end != start:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        while self._unit.has_ranges and not self._transfer.load(sequence, start, end, states, ends):
            # A part of it may be there.
            llama().llama_memory_seq_rm(self._context.memory, sequence + 1, start, -1)
            if not self._context.grow(ends[-1] - payload_start):
                return Outcome.NO_ROOM
        self._context.cells.grow(sequence, end)
        held.is_whole = not self._unit.has_snapshots
        return Outcome.DONE

    def payload_buffer(self, size: int) -> memoryview | None:
        return None

    def is_loading(self, sequence: int) -> bool:
        return False

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        layout, held = self._transfer.snapshot_layout(), self._context.cells[sequence]
        if held.end != position and (self._unit.has_ranges or held.end):
            raise EngineError(f"Sequence {sequence} ends at {held.end}, not where the snapshot was taken.")
        state = self._transfer.check_snapshot(layout, payload, position)
        self._context.cells.grow(sequence, position)
        held.is_whole = write_state(self._context.handle, sequence + 1, state, PARTIAL)
        return Outcome.DONE if held.is_whole else Outcome.NO_ROOM

    def copy_kv(self, source: int, target: int, end: int) -> None:
        context = self._context
        held = context.cells[source]
        if self._unit.has_snapshots and end != held.end:
            raise EngineError(f"This model's state can be shared only as a whole, and {end} is not where it ends.")
        llama().llama_memory_seq_cp(context.memory, source + 1, target + 1, 0, end)
        is_whole = held.is_whole
        if is_whole and not self._share_windows:
            rest = context.read(source, 0, held.end, PARTIAL)
            is_whole = write_state(context.handle, target + 1, rest, PARTIAL)
        context.cells.share(source, target, end)
        context.cells[target].is_whole = is_whole

    def trim(self, sequence: int, start: int) -> None:
        held = self._context.cells[sequence]
        is_possible = not self._unit.has_snapshots or start == 0 or start >= held.end
        if not is_possible or not llama().llama_memory_seq_rm(self._context.memory, sequence + 1, start, -1):
            raise EngineError(f"This model's state cannot be cut back to {start} tokens.")
        self._context.cells.trim(sequence, start)

    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        """Should llama.cpp fail in the middle of it, the sequence is emptied and StepFailed is raised."""
        context, cells = self._context, self._context.cells
        length = cells[sequence].end
        check_splice(self.capabilities, length, start, end, insert)
        shared = length - end - cells.count_unshared(sequence, end, length)
        more = len(insert) + shared - cells.count_unshared(sequence, start, end)
        # Asked before anything changes: llama.cpp finds out when it has already rotated, which cannot be undone.
        if cells.used + more > context.room and not context.grow(more):
            return Outcome.NO_ROOM
        try:
            self._set_aside(sequence, start, end, is_shared=shared > 0)
            self._insert(sequence, start, insert, by=start + len(insert) - end)
            llama().llama_memory_seq_cp(context.memory, SCRATCH, sequence + 1, -1, -1)
            context.cells.grow(sequence, length + start + len(insert) - end)
        except EngineError as error:
            self.trim(sequence, 0)
            raise StepFailed(f"State that was being moved is lost, so evaluate it again: {error}") from error
        finally:
            context.empty_scratch()
        return Outcome.DONE

    def _set_aside(self, sequence: int, start: int, end: int, *, is_shared: bool) -> None:
        """Forget positions from `start` on, and leave those from `end` on in the scratch sequence.

        A cell has one position for all who share it, so what is shared gets cells of its own: it will move.
        """
        if is_shared:
            followers = self._context.read(sequence, end, -1)
            self.trim(sequence, start)
            if not write_state(self._context.handle, SCRATCH, followers):
                raise EngineError("llama.cpp has fewer free cells than were counted.")
        else:
            llama().llama_memory_seq_cp(self._context.memory, sequence + 1, SCRATCH, end, -1)
            self.trim(sequence, start)

    def _insert(self, sequence: int, start: int, insert: npt.NDArray[np.int32], *, by: int) -> None:
        """Evaluate `insert`, and move what was set aside. Raises EngineError.

        llama.cpp only notes what is to move; it rotates the keys in the next step, before anything else.
        """
        take_errors()
        llama().llama_memory_seq_add(self._context.memory, SCRATCH, -1, -1, by)
        step = self._settings.batch
        for begin in range(0, len(insert), step):
            rows = Rows(sequence, start + begin, insert[begin : begin + step], outputs=0)
            if not self._decode([rows]):  # not filled up: the scratch sequence is in use
                raise EngineError("llama.cpp has fewer free cells than were counted.")
            self._context.cells.grow(sequence, rows.start + len(rows.tokens))
        self._first_outputs = []
        # It goes on without rotating when that fails.
        if complaint := take_errors():
            raise EngineError(f"llama.cpp could not rotate keys: {complaint}.")

    def _require(self, sequence: int, *, end: int) -> None:
        """Raises EngineError unless `sequence` ends at `end` and has all of its state."""
        held = self._context.cells[sequence]
        if held.end != end:
            raise EngineError(f"Sequence {sequence} ends at {held.end}, not at {end}.")
        if not held.is_whole:
            raise EngineError(f"Sequence {sequence} has no snapshot of its first {end} tokens to go on from.")

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

    def rest(self) -> None:
        self._context.rest()

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
            "cells": self._context.room,
            "flash_attention": "on" if self._switch.flash else "off",
            "flash_attention_reason": self._tuning.reason,
            "flash_attention_changes": self._context.changes,
        }

    def close(self) -> None:
        self._transfer.close()
        self._context.close()
        self._model.close()


@contextmanager
def _told_if_slow(what: str) -> Iterator[None]:
    """Logs `what` if the block takes long, while it does."""
    timer = Timer(_SLOW_S, logger.info, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
