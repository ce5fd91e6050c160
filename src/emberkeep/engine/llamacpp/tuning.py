"""Flash attention on or off, and how long steps take: measured when a model is first loaded on a machine.

On a CPU neither way is always the quicker one. Flash attention takes queries together from 64 on and one by one
below, the other way from 8 on or so, and that is where the rows of a turn and of a draft are. Both are measured in
contexts of their own; what was found is remembered by library, CPU, model and number of threads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from emberkeep.config import free_ram
from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import (
    PROBE,
    Exports,
    LlamaSettings,
    ThreadPool,
    Tuning,
    available_cores,
    cores_kept,
    learn_layout,
    one_core_each,
    open_context,
)
from emberkeep.engine.llamacpp.kv_state import PARTIAL, BatchBuffer, Bytes, Layout, read_state, write_state
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import cache_folder, library_in_use, llama, take_errors
from emberkeep.engine.llamacpp.trial import file_name, survives_without_flash
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import EngineError
from emberkeep.files import private_folder, replace_file
from emberkeep.types import Json

logger = logging.getLogger("emberkeep.engine")

_FORMAT = 1
_WAITED_FOR = {1: 4, 8: 1, 16: 1, 45: 2, 512: 2}
"""How many rows the steps have that people wait for, and how much each counts: tokens, drafts, turns, prompts."""
_DEEP = 2048
_CLEARLY = 0.95
"""The share of the time that must be left without flash attention: another choice makes stored state useless."""
_MOST_SCORES = 1 << 30
_F32 = 4
_LEAST_BATCH = 128
_SMALLEST = 16 << 20
"""Bytes of a model from which on it is worth the time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one model, with flash attention or without."""

    table: StepTable
    wide_rows: int | None = None

    def json(self) -> dict[str, Json]:
        return {"format": _FORMAT, "table": self.table.json(), "wide_rows": self.wide_rows}

    @classmethod
    def from_json(cls, data: Json) -> Measured:
        """Raises ValueError."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError("This was written by another version.")
        wide_rows = data.get("wide_rows")
        return cls(StepTable.from_json(data.get("table")), wide_rows if isinstance(wide_rows, int) else None)


def tune(
    model: LlamaModel, settings: LlamaSettings, weights_digest: str, flash: bool | None, folder: Path | None = None
) -> tuple[LlamaSettings, Tuning]:
    """`settings` with flash attention on or off: what is quicker, or what `flash` says; and what was measured.

    Never an error: where nothing can be found out, flash attention is on. Blocks for some seconds the first time;
    `folder` remembers it.
    """
    subject = Subject(weights_digest, settings.threads, settings.kv_type, model.placement)
    results = partial(_results, model, settings, subject, folder=folder)
    if flash:
        is_on, reason = True, "as asked"
    elif needed := _why_needed(model, settings, weights_digest, is_asked=flash is False):
        is_on, reason = True, needed
    else:
        is_on, reason = (False, "as asked") if flash is False else compare(*results([True, False]))
    (measured,) = results([is_on])
    logger.info("flash attention is %s: %s", "on" if is_on else "off", reason)
    if not is_on:
        batch = batch_without_flash(model, settings) or max(_LEAST_BATCH, settings.sequences)
        settings = replace(settings, flash=False, batch=batch)
    return settings, Tuning(reason, measured.table, measured.wide_rows) if measured else Tuning(reason)


def compare(on: Measured | None, off: Measured | None) -> tuple[bool, str]:
    """Whether flash attention is to be on, and why. Pure."""
    if on is None or off is None:
        return True, "nothing was measured"
    shares = [
        (off.table.seconds(rows, _DEEP) / on.table.seconds(rows, _DEEP)) ** weight
        for rows, weight in _WAITED_FOR.items()
    ]
    share = prod(shares) ** (1 / sum(_WAITED_FOR.values()))
    return share >= _CLEARLY, f"without it steps take {share:.0%} of their time here"


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
    free = free_ram()
    room = min(_MOST_SCORES, free // 4) if free is not None else _MOST_SCORES
    of_a_row = settings.cells * max(llama().llama_model_n_head(model.handle), 1) * _F32
    smaller = (batch for batch in (256, _LEAST_BATCH) if settings.sequences <= batch < settings.batch)
    return next((batch for batch in (settings.batch, *smaller) if batch * of_a_row <= room), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """What it was that was measured, with the library in use and on this CPU."""

    weights_digest: str
    threads: int | None
    kv_type: str
    placement: object = "CPU"

    def choice(self, folder: Path | None = None) -> tuple[bool, str] | None:
        """What `compare` says, if both ways have been measured. Raises EngineError."""
        on, off = (self.read(flash, folder) for flash in (True, False))
        return compare(on, off) if on and off else None

    def read(self, flash: bool, folder: Path | None) -> Measured | None:
        """None where nothing is remembered that can be read."""
        try:
            return Measured.from_json(json.loads(self._file(flash, folder).read_bytes()))
        except (OSError, ValueError):
            return None

    def remember(self, flash: bool, folder: Path | None, measured: Measured) -> None:
        file = self._file(flash, folder)
        try:
            replace_file(private_folder(file.parent) / file.name, json.dumps(measured.json()).encode())
        except OSError as error:
            logger.debug("how long steps take is not remembered: %s", error)

    def _file(self, flash: bool, folder: Path | None) -> Path:
        about = (self.weights_digest, self.threads or available_cores(), self.kv_type, self.placement, flash)
        name = file_name(library_in_use(), *(str(part) for part in about))
        return (folder or cache_folder() / "steps") / f"{name}.json"


def _results(
    model: LlamaModel, settings: LlamaSettings, subject: Subject, ways: Sequence[bool], folder: Path | None
) -> list[Measured | None]:
    """With flash attention or without, for each of `ways`: as it is remembered, or measured now.

    None where nothing can be measured, or the model is so small that it does not matter.
    """
    known = {flash: subject.read(flash, folder) for flash in ways}
    missing = [flash for flash, measured in known.items() if measured is None]
    if missing and llama().llama_model_size(model.handle) >= _SMALLEST:
        try:
            measured = measure(model, [replace(settings, flash=flash) for flash in missing])
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return [known[flash] for flash in ways]
        known |= zip(missing, measured, strict=True)
        for flash, each in zip(missing, measured, strict=True):
            subject.remember(flash, folder, each)
    return [known[flash] for flash in ways]


# ── measuring ──

_GRID = (1, 8, 1, 64, 8, 1, 2, 4, 16, 2, 4, 32, 128, 3, 6, 7, 12, 24, 48, 63, 96, 256, 512)
"""Numbers of rows in the order in which they are measured: time may end before the last. What is asked for most is
measured more than once even then: the least counts."""
_GRID_S = 2.0
"""How long one depth may take, about."""
_BUSY = 2
"""How many times as long it may take on a machine that has other things to do."""
_FIRST_PASS, _PASSES = 0.7, 4
"""The share of it in which the first of several passes may take longer steps."""
_PIECE = 8
"""Tokens that are evaluated; what stands before the measured rows is their state, again and again."""
_SHALLOW = 64
_CELLS = _DEEP + 2 * max(_GRID)
_CUTS = (64, 32, 16, 8, 4, 2)
_CUTS_S = 2.0
_SCRATCH = 0
_BASE, _STEP = 0, 1
"""What stands before the rows, and what is taken back: sequences as `Rows` counts them, llama.cpp one higher."""

_Times = dict[int, float]
"""Seconds, by rows."""


def measure(model: LlamaModel, ways: Sequence[LlamaSettings]) -> list[Measured]:
    """Each of `ways`, which differ in nothing but `flash`, side by side: whatever else runs here slows down both.

    Blocks for a few seconds. Raises EngineError.
    """
    with _benches(model, ways) as benches:
        shallow = _time_grids(benches)
        first = benches[0].depth
        found = zip(ways, benches, shallow, strict=True)
        wide = [None if way.flash else _wide_rows(bench, times) for way, bench, times in found]
        for bench in benches:
            bench.fill(_DEEP)
        depth = min(bench.depth for bench in benches)
        if depth < 2 * first:
            return [Measured(_table({first: times}), rows) for times, rows in zip(shallow, wide, strict=True)]
        tables = [_table({first: a, depth: b}) for a, b in zip(shallow, _time_grids(benches), strict=True)]
        deep = zip(benches, tables, wide, strict=True)
        return [Measured(table, rows if bench.confirms(rows) else None) for bench, table, rows in deep]


def _time_grids(benches: Sequence[_Bench]) -> list[_Times]:
    times: list[_Times] = [{} for _ in benches]
    used = [0.0] * len(benches)
    deadline = perf_counter() + _BUSY * _GRID_S * len(benches)
    for number, rows in product(range(_PASSES), _GRID):
        if perf_counter() > deadline:
            break
        for index, (bench, known) in enumerate(zip(benches, times, strict=True)):
            if _is_affordable(rows, known, (_FIRST_PASS if number == 0 else 1.0) * _GRID_S - used[index]):
                seconds = bench.time(rows)
                known[rows] = min(seconds, known.get(rows, seconds))
                used[index] += seconds
    return times


def _is_affordable(rows: int, known: _Times, left: float) -> bool:
    if rows in known:
        return known[rows] < left
    below = max((count for count in known if count < rows), default=None)
    # More is risked than is left: it may take less than it looks like, and that is what is looked for.
    return below is None or known[below] * rows / below < 2 * left


def _table(times: dict[int, _Times]) -> StepTable:
    rows = sorted(set.intersection(*(set(line) for line in times.values())))
    lines = [_without_outliers([(count, line[count]) for count in rows]) for line in times.values()]
    return StepTable(tuple(rows), tuple(times), tuple(tuple(1e3 * seconds for seconds in line) for line in lines))


def _without_outliers(line: Sequence[tuple[int, float]]) -> list[float]:
    """No step takes longer than as many smaller ones as have its rows: then something else ran beside it."""
    return [
        min([seconds, *(-(-rows // count) * smaller for count, smaller in line[:index])])
        for index, (rows, seconds) in enumerate(line)
    ]


def _wide_rows(bench: _Bench, times: _Times) -> int | None:
    """The least rows from which on a step gives the same bytes however a prompt is cut, if any are found."""
    table, found = _table({bench.depth: times}), None
    for rows in _CUTS:
        cuts = [rows, rows + 1, rows + 3]
        if 2 * table.seconds(sum(cuts), bench.depth) > _CUTS_S:
            continue
        if not bench.gives_same_state(cuts):
            break
        found = rows
    return found


@contextmanager
def _benches(model: LlamaModel, ways: Sequence[LlamaSettings]) -> Iterator[list[_Bench]]:
    """A context for each, which is empty but for a few tokens. Raises EngineError."""
    contexts: list[Handle] = []
    threads = ThreadPool()
    try:
        with cores_kept():
            with one_core_each():
                count = ways[0].threads or available_cores()
                threads.start(count)
                for way in ways:
                    small = replace(way, context=_CELLS, cells=_CELLS, sequences=2, batch=max(_GRID))
                    contexts.append(open_context(model, small, None))
                    threads.attach(contexts[-1])
                benches = [_Bench(model, context, count) for context in contexts]
            yield benches
    finally:
        for context in contexts:
            llama().llama_free(context)
        threads.close()


class _Bench:
    """Steps that are taken back: the sequence in front of them is `depth` tokens long."""

    def __init__(self, model: LlamaModel, context: Handle, threads: int) -> None:
        self._context = context
        self._threads = 0 if model.offloads else threads
        self._memory = llama().llama_get_memory(context)
        self._batch = BatchBuffer(max(_GRID))
        self._tokens = np.random.default_rng(0).integers(0, model.vocab.size, _CELLS, dtype=np.int32)
        self._layout = self._learn_layout(llama().llama_model_n_swa(model.handle))
        self.depth = 0
        self._piece = self._first_piece()
        self.fill(_SHALLOW)

    def time(self, rows: int) -> float:
        """The seconds of a step, as if nothing else ran here.

        Threads that compute on a CPU wait for each other by spinning, so each is busy from the first to the last
        moment of a step, and time in which it was not belonged to others.
        """
        with self._branch():
            begin, busy = perf_counter(), process_time()
            self._evaluate(_STEP, self.depth, rows, outputs=1)
            seconds, busy = perf_counter() - begin, process_time() - busy
            return min(seconds, busy / self._threads) if self._threads else seconds

    def confirms(self, wide_rows: int | None) -> bool:
        return wide_rows is not None and self.gives_same_state([wide_rows, wide_rows + 1])

    def gives_same_state(self, cuts: Sequence[int]) -> bool:
        """Whether steps of so many rows leave the bytes of one step of all of them."""
        return np.array_equal(self._state_after(cuts), self._state_after([sum(cuts)]))

    def _state_after(self, cuts: Sequence[int]) -> Bytes:
        with self._branch():
            for start, rows in zip(accumulate(cuts, initial=self.depth), cuts, strict=False):
                self._evaluate(_STEP, start, rows)
            return read_state(self._context, _STEP + 1)

    def fill(self, depth: int) -> None:
        """Let the sequence be `depth` tokens long, or as long as it can be made in time."""
        deadline = perf_counter() + _GRID_S
        while self.depth < depth and perf_counter() < deadline:
            if self._piece is not None and self._layout is not None:
                state = self._layout.renumbered(self._piece, self.depth)
                if not write_state(self._context, _SCRATCH, state):
                    raise EngineError("llama.cpp has fewer free cells than it was opened with.")
                llama().llama_memory_seq_cp(self._memory, _SCRATCH, _BASE + 1, -1, -1)
                llama().llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            else:
                self._evaluate(_BASE, self.depth, _PIECE)
            self.depth += _PIECE

    def _first_piece(self) -> Bytes | None:
        """The state of a few tokens, if more of the same can be put behind it."""
        if self._layout is None or self._layout.unit is not KvUnit.RANGE:
            return None
        self._evaluate(_BASE, 0, _PIECE)
        piece = read_state(self._context, _BASE + 1)
        llama().llama_memory_seq_rm(self._memory, _BASE + 1, -1, -1)
        return piece

    def _learn_layout(self, window: int) -> Layout | None:
        empty = self._exports()
        self._evaluate(_BASE, 0, PROBE)
        exports = self._exports()
        llama().llama_memory_clear(self._memory, True)
        try:
            return learn_layout(empty, exports, window)
        except EngineError:
            return None

    def _exports(self) -> Exports:
        return Exports(read_state(self._context, _BASE + 1), read_state(self._context, _BASE + 1, PARTIAL))

    @contextmanager
    def _branch(self) -> Iterator[None]:
        llama().llama_memory_seq_cp(self._memory, _BASE + 1, _STEP + 1, -1, -1)
        try:
            yield
        finally:
            llama().llama_memory_seq_rm(self._memory, _STEP + 1, -1, -1)

    def _evaluate(self, sequence: int, start: int, rows: int, outputs: int = 0) -> None:
        batch, _ = self._batch.fill([Rows(sequence, start, self._tokens[start : start + rows], outputs)])
        if llama().llama_decode(self._context, batch):
            raise EngineError(f"llama.cpp could not evaluate a batch: {take_errors()}.")
