"""Whether flash attention is on, off or a choice for every step, and how long steps take on this machine in each
way: measured in contexts that are there for nothing else, once a model is loaded and nothing waits for it, and
remembered by library, CPU, model and number of threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from itertools import accumulate, product
from math import inf
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from emberkeep.config.machine import total_ram
from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import (
    BatchBuffer,
    LlamaSettings,
    open_context,
    read_state,
    score_bytes,
    write_state,
)
from emberkeep.engine.llamacpp.kv_layout import Bytes, Layout
from emberkeep.engine.llamacpp.learning import probe_layout
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import buffers_that_go, facts_about, llama
from emberkeep.engine.llamacpp.threads import ThreadPool, available_cores, cores_kept, one_core_each
from emberkeep.engine.llamacpp.trial import survives_without_flash
from emberkeep.engine.step_table import Interrupted, StepTable
from emberkeep.errors import EngineError
from emberkeep.types.request import Json
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
    threads = settings.threads or available_cores()
    facts = facts_about(weights_digest, threads, settings.kv_type, model.placement, folder=folder)
    return settings, _recall(model, settings, facts, ways, reason)


def _why_needed(model: LlamaModel, settings: LlamaSettings, weights_digest: str, *, is_asked: bool) -> str | None:
    """Why flash attention cannot be off; `is_asked`: although it should be."""
    if settings.kv_type != "f16":
        return f"{settings.kv_type} values need it"
    if model.offloads:
        return "layers are on a GPU"
    if not is_asked and _is_small(model):
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


def _recall(model: LlamaModel, settings: LlamaSettings, facts: Facts, ways: Sequence[bool], reason: str) -> Tuning:
    """What is known of `ways`, with flash attention or without."""
    found = {way: facts.read_json(f"steps {way}", Measured.from_json) for way in ways}
    known = {way: measured for way, measured in found.items() if measured is not None}

    def tuning(known: Mapping[bool, Measured]) -> Tuning:
        tables = {way: known[way].table for way in ways if way in known}
        wide_rows = known[False].wide_rows if False in known else None
        return Tuning(reason, tables, wide_rows, has_choice=len(ways) > 1)

    def measure_ways(is_wanted: Callable[[], bool]) -> Tuning | None:
        try:
            measured = measure(model, [replace(settings, flash=way) for way in ways], is_wanted)
        except Interrupted:
            return None
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return tuning(known)
        latest = {
            way: known[way].join(new) if way in known else new for way, new in zip(ways, measured, strict=True)
        }
        for way, each in latest.items():
            facts.remember_json(f"steps {way}", each.json())
        return tuning(latest)

    # What was measured beside other programs is measured again at the next start, and what is less counts.
    is_enough = len(known) == len(ways) and all(each.is_whole for each in known.values())
    return replace(tuning(known), measure=None if is_enough or _is_small(model) else measure_ways)


def _is_small(model: LlamaModel) -> bool:
    return bool(llama().llama_model_size(model.handle) < _SMALLEST)


# ── how long steps take ──

_FORMAT = 3
DEEP = 2048
"""The deeper of the two depths at which steps are measured."""
_GRID = (1, 2, 4, 8, 3, 1, 64, 2, 4, 8, 1, 7, 5, 12, 16, 32, 128, 9, 24, 48, 63, 96, 256, 512)
"""Numbers of rows in the order in which they are measured: time may end before the last. What is asked for most is
measured more than once even then: the least counts."""
_BLOCK, _BLOCKS = 4, 16
"""Rows that a kernel may take together, and up to which number that is reckoned with."""
_ALMOST = 0.95
_GRID_S = 1.2
"""How long one depth may take, about."""
_BUSY = 2
"""How many times as long it may take on a machine that has other things to do."""
_QUIET = 1.3
"""How many times as long it may take on one that has not."""
_FIRST_PASS, _PASSES = 0.7, 4
"""The share of it in which the first of several passes may take longer steps."""
_FEW, _TOGETHER = 8, 64
_FEW_SHARE = 0.4
"""The share of the time that few rows may take where many are measured in any case."""
_PIECE = 8
"""Tokens that are evaluated; what stands before the measured rows is their state, again and again."""
_SHALLOW = 64
_CELLS = DEEP + 2 * max(_GRID)
_CUTS = (64, 32, 16, 8, 4, 2)
_CUTS_S = 0.5
_SCRATCH = 0
_BASE, _STEP = 0, 1
"""What stands before the rows, and what is taken back: sequences as `Rows` counts them, llama.cpp one higher."""
_Times = dict[int, float]
"""Seconds, by rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model, with flash attention or without."""

    table: StepTable
    wide_rows: int | None = None
    is_whole: bool = True
    """False where other programs took so much of the time that less was measured than could have been."""

    def json(self) -> dict[str, Json]:
        facts: dict[str, Json] = {"wide_rows": self.wide_rows, "is_whole": self.is_whole}
        return {"format": _FORMAT, "table": self.table.json(), **facts}

    @classmethod
    def from_json(cls, data: Json) -> Measured:
        """Raises ValueError."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError("This was written by another version.")
        wide_rows = data.get("wide_rows")
        table = StepTable.from_json(data.get("table"))
        return cls(table, wide_rows if isinstance(wide_rows, int) else None, data.get("is_whole") is True)

    def join(self, new: Measured) -> Measured:
        """The less of both, where both were measured at the same depths."""
        old = dict(_lines(self.table))
        if old.keys() != set(new.table.depths):
            return new
        lines = {
            depth: old[depth] | {rows: min(time, old[depth].get(rows, time)) for rows, time in line.items()}
            for depth, line in _lines(new.table)
        }
        logits = min(self.table.logits_ms, new.table.logits_ms) / 1e3
        return Measured(_table(lines, logits), new.wide_rows or self.wide_rows, new.is_whole)


def _lines(table: StepTable) -> Iterator[tuple[int, _Times]]:
    for depth, line in zip(table.depths, table.milliseconds, strict=True):
        yield depth, {rows: time / 1e3 for rows, time in zip(table.rows, line, strict=True)}


def measure(
    model: LlamaModel, ways: Sequence[LlamaSettings], is_wanted: Callable[[], bool] = lambda: False
) -> list[Measured]:
    """Each of `ways`, which differ in nothing but `flash`, side by side: whatever else runs here slows down both.

    Blocks for a few seconds. Raises EngineError, and Interrupted one step after `is_wanted` has become true.
    """
    with _benches(model, ways, is_wanted) as benches:
        shallow, is_whole = _time_grids(benches)
        lines = [{bench.depth: times} for bench, times in zip(benches, shallow, strict=True)]
        found = zip(ways, benches, shallow, strict=True)
        wide = [None if way.flash else _wide_rows(bench, times) for way, bench, times in found]
        logits = [bench.time_logits() for bench in benches]
        for bench in benches:
            bench.fill(DEEP)
        if min(bench.depth for bench in benches) > 2 * _SHALLOW:
            deep, in_time = _time_grids(benches)
            is_whole = is_whole and in_time
            for line, bench, times in zip(lines, benches, deep, strict=True):
                line[bench.depth] = times
        confirmed = [
            rows if rows is not None and bench.gives_same_state([rows, rows + 1]) else None
            for bench, rows in zip(benches, wide, strict=True)
        ]
    measured = zip(lines, logits, confirmed, strict=True)
    return [Measured(_table(line, each), rows, is_whole) for line, each, rows in measured]


def _time_grids(benches: Sequence[_Bench]) -> tuple[list[_Times], bool]:
    """The times of each, and whether the machine had little else to do."""
    times: list[_Times] = [{} for _ in benches]
    used = [0.0] * len(benches)
    begin = perf_counter()
    deadline = begin + _BUSY * _GRID_S * len(benches)
    for number, rows in product(range(_PASSES), _GRID):
        if perf_counter() > deadline:
            break
        for index, (bench, known) in enumerate(zip(benches, times, strict=True)):
            if _is_affordable(rows, known, (_FIRST_PASS if number == 0 else 1.0) * _GRID_S - used[index]):
                try:
                    seconds = bench.time(rows)
                except EngineError:
                    if rows == 1:
                        raise
                    continue  # a sliding window has no room for so many beside what two sequences share
                known[rows] = min(seconds, known.get(rows, seconds))
                used[index] += seconds
    return times, perf_counter() - begin < _QUIET * sum(used)


def _is_affordable(rows: int, known: _Times, left: float) -> bool:
    if rows in known:
        return known[rows] < left
    below = max((count for count in known if count < rows), default=None)
    # More is risked than is left: it may take less than it looks like, and that is what is looked for. Flash
    # attention takes 64 rows together, and all that is said of more rows depends on it.
    is_key = rows == _TOGETHER and known.get(_FEW, inf) < _FEW_SHARE * _GRID_S
    return is_key or below is None or known[below] * rows / below < 2 * left


def _table(times: dict[int, _Times], logits: float = 0.0) -> StepTable:
    filled = [_with_rows_between(line) for line in times.values()]
    rows = sorted(set.intersection(*(set(line) for line in filled)))
    lines = [_without_outliers([(count, line[count]) for count in rows]) for line in filled]
    milliseconds = tuple(tuple(1e3 * seconds for seconds in line) for line in lines)
    return StepTable(tuple(rows), tuple(times), milliseconds, 1e3 * logits)


def _with_rows_between(line: _Times) -> _Times:
    """With few rows that were not measured. Where 3 take as long as 4, whole blocks are taken together and what is
    left over row by row: 7 take longer than 8."""
    if not {1, 2, _BLOCK - 1, _BLOCK, _FEW} <= line.keys() or line[_BLOCK - 1] < _ALMOST * line[_BLOCK]:
        return line
    blocks = sorted(rows for rows in line if rows % _BLOCK == 0)
    of_blocks = [line[rows] for rows in blocks]
    between = {}
    for rows in range(_BLOCK, _BLOCKS + 1):
        left_over = rows % _BLOCK
        whole = float(np.interp(rows - left_over, blocks, of_blocks))
        between[rows] = whole + left_over * max(line[2] - line[1], 0.0)  # less only by noise
    return between | line


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
def _benches(
    model: LlamaModel, ways: Sequence[LlamaSettings], is_wanted: Callable[[], bool]
) -> Iterator[list[_Bench]]:
    """A context for each, which is empty but for a few tokens. Raises EngineError, Interrupted."""
    contexts: list[Handle] = []
    threads = ThreadPool()
    try:
        with cores_kept(), buffers_that_go():
            with one_core_each():
                count = ways[0].threads or available_cores()
                threads.start(count)
                for way in ways:
                    small = replace(way, context=_CELLS, cells=_CELLS, sequences=2, batch=max(_GRID))
                    contexts.append(open_context(model, small, None))
                    threads.attach(contexts[-1])
                benches = [_Bench(model, context, count, is_wanted) for context in contexts]
            yield benches
    finally:
        for context in contexts:
            llama().llama_free(context)
        threads.close()


class _Bench:
    """Steps that are taken back: the sequence in front of them is `depth` tokens long.

    What evaluates raises Interrupted as soon as `is_wanted` says that something waits.
    """

    def __init__(self, model: LlamaModel, context: Handle, threads: int, is_wanted: Callable[[], bool]) -> None:
        self._context = context
        self._is_wanted = is_wanted
        self._threads = 0 if model.offloads else threads
        self._memory = llama().llama_get_memory(context)
        self._batch = BatchBuffer(max(_GRID))
        self._tokens = np.random.default_rng(0).integers(0, model.vocab.size, _CELLS, dtype=np.int32)
        self._layout = probe_layout(context, model)
        self.depth = 0
        self.fill(_SHALLOW)

    def time_logits(self) -> float:
        """The seconds that logits after one row more take."""
        one, all_of_them = (min(self.time(_FEW, outputs) for _ in range(2)) for outputs in (1, _FEW))
        return max(all_of_them - one, 0.0) / (_FEW - 1)

    def time(self, rows: int, outputs: int = 1) -> float:
        """The seconds of a step, as if nothing else ran here.

        Threads that compute on a CPU wait for each other by spinning, so each is busy from the first to the last
        moment of a step, and time in which it was not belonged to others.
        """
        with self._branch():
            begin, busy = perf_counter(), process_time()
            self._evaluate(_STEP, self.depth, rows, outputs)
            seconds, busy = perf_counter() - begin, process_time() - busy
            return min(seconds, busy / self._threads) if self._threads else seconds

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
        if self.depth == 0:
            self._evaluate(_BASE, 0, _PIECE)
            self.depth = _PIECE
        if self._layout is not None and self._layout.unit is KvUnit.RANGE:
            self._repeat(self._layout, depth)
        while self.depth < depth and perf_counter() < deadline:
            self._evaluate(_BASE, self.depth, _PIECE)
            self.depth += _PIECE

    def _repeat(self, layout: Layout, depth: int) -> None:
        """Put the state of the sequence behind itself until it is `depth` tokens long."""
        piece, tokens = read_state(self._context, _BASE + 1), self.depth
        while self.depth < depth:
            # Nothing in it is rotated: a step takes as long whatever it finds.
            for part, data in layout.parts(piece, tokens):
                part.cells(data, tokens)[:, 0] = np.arange(self.depth, self.depth + tokens)
            if not write_state(self._context, _SCRATCH, piece):
                raise EngineError("llama.cpp has fewer free cells than it was opened with.")
            llama().llama_memory_seq_cp(self._memory, _SCRATCH, _BASE + 1, -1, -1)
            llama().llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            self.depth += tokens

    @contextmanager
    def _branch(self) -> Iterator[None]:
        llama().llama_memory_seq_cp(self._memory, _BASE + 1, _STEP + 1, -1, -1)
        try:
            yield
        finally:
            llama().llama_memory_seq_rm(self._memory, _STEP + 1, -1, -1)

    def _evaluate(self, sequence: int, start: int, rows: int, outputs: int = 0) -> None:
        if self._is_wanted():
            raise Interrupted
        tokens = self._tokens[start : start + rows]
        self._batch.decode(self._context, Rows(sequence, start, tokens, outputs))
