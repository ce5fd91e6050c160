"""This moves state between a context and the store, checks it, packs and unpacks it.

llama.cpp copies rows from and to a GPU layer by layer, and waits for each copy: thousands of small ones for one
chunk. So a range of many chunks leaves and enters it as one state, through pinned memory. Other threads cut and
join it while the next one is on its way, and while the engine goes on:

    GPU      | range 0 | range 1 | range 2 | the next step
    threads            | cut 0   | cut 1   | cut 2 |
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import lru_cache, partial
from itertools import cycle, pairwise
from pathlib import Path
from threading import get_native_id
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Exported, KvExport, KvUnit, Payload
from emberkeep.engine.llamacpp.c_api import TYPES, Handle
from emberkeep.engine.llamacpp.context import PARTIAL, read_state, share_ranges, write_state
from emberkeep.engine.llamacpp.kv_layout import Bytes, LayerRun, Layout, Layouts
from emberkeep.engine.llamacpp.learning import StateFacts
from emberkeep.engine.llamacpp.live_context import SCRATCH, LiveContext
from emberkeep.engine.llamacpp.mixed_cells import read_mixed
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.threads import own_cores
from emberkeep.engine.packing import BITS, Floats, Group, Packed, Streams, is_packed, pack
from emberkeep.engine.payload_memory import PayloadMemory
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

T = TypeVar("T")
_STAGE = 128 << 20
"""Bytes that travel at once: a copy of a layer's rows is then large enough for full speed."""
_FIRST_PART = 4
"""The first group to be loaded fills one of so many parts of a stage."""
_STAGES = 4
_MOST_THREADS = 8
_CELL_BYTES = 12
"""What is said of a cell that has one position."""
Read = tuple[Bytes, npt.NDArray[np.intp] | None]
"""A state, and which of its rows were asked for, where it has others."""
log = logging.getLogger("emberkeep.engine")


class StateTransfer:
    """Belongs to the engine's thread. The first state that leaves must match the remembered layout: else it
    forgets the layout and raises EngineError."""

    def __init__(self, context: LiveContext, facts: StateFacts) -> None:
        self._context = context
        self._facts = facts
        self._staging: Staging | None = None
        self._is_layout_seen = False
        self._reads_mixed = True

    def stage(self, staging: Staging) -> None:
        """From now on long ranges go through `staging`, which is closed with this."""
        self._staging = staging

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    @property
    def _layout(self) -> Layout:
        layout = self._context.layout
        assert layout is not None
        return layout

    # ── ranges: for an engine whose state has any ──

    def export(self, sequence: int, borders: Sequence[int], bits: int) -> KvExport:
        """Copies of the ranges between `borders`. Raises EngineError."""
        layout, context = self._layout, self._context

        def read(start: int, end: int, into: Bytes | None = None) -> Bytes:
            with share_ranges(context.memory, SCRATCH, [(sequence + 1, start, end)]):
                if layout.recurrent:
                    # Takes the recurrent state, which may be large, out of the copy.
                    empty = np.frombuffer(layout.head + layout.nothing, np.uint8)
                    write_state(context.handle, SCRATCH, empty, PARTIAL)
                return read_state(context.handle, SCRATCH, into=into)

        if not self._is_layout_seen:
            self._check_layout(layout, read(borders[0], borders[1]), borders[0], borders[1])
        if self._staging is not None and self._reads_mixed and self._is_told(layout):
            try:
                return self._staging.export(layout, borders, partial(read_mixed, context, layout, sequence), bits)
            except EngineError as error:
                log.warning("answers are stored run by run, and slower: %s", error)
                self._reads_mixed = False
        if self._staging is not None and len(borders) > 2:
            return self._staging.export(layout, borders, lambda *span: (read(*span), None), bits)
        # Where each read brings the windows along, one read is enough, and it is cut here.
        spans = pairwise(borders) if context.unit is KvUnit.RANGE else [borders]
        payloads = [payload for span in spans for payload in layout.split(read(span[0], span[-1]), span)]
        if bits == 16:
            return Exported(payloads)
        ranges = zip(payloads, pairwise(borders), strict=True)
        return Exported([pack_range(layout, payload, end - start, bits) for payload, (start, end) in ranges])

    @staticmethod
    def _is_told(layout: Layout) -> bool:
        """Whether whose its cells are may be found out."""
        return layout.unit is KvUnit.RANGE and [part.cell_bytes for part in layout.ranges] == [_CELL_BYTES]

    def _check_layout(self, layout: Layout, state: Bytes, start: int, end: int) -> None:
        with self._or_forget_layout():
            (payload,) = layout.split(state, (start, end))
            if layout.check_range(payload, start) != end:
                raise EngineError("it holds another number of tokens")
        self._is_layout_seen = True

    @contextmanager
    def _or_forget_layout(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self._facts.forget()
            raise EngineError(
                f"llama.cpp's state is not as it was remembered ({error}): nothing is stored until a restart."
            ) from error

    def check(self, payloads: Sequence[Payload], start: int) -> tuple[list[Bytes], list[int]]:
        """The states in `payloads`, which must follow each other from `start` on, and where each ends. Raises
        EngineError."""
        layouts, states, ends = self._context.layouts, [], [start]
        for payload in payloads:
            if not layouts.own.begins(payload) and is_packed(payload):
                payload = unpack_range(layouts, payload)
            states.append(np.frombuffer(payload, np.uint8))
            ends.append(layouts.of(states[-1]).check_range(payload, ends[-1]))
        return states, ends[1:]

    def load(self, sequence: int, start: int, end: int, states: Sequence[Bytes], ends: Sequence[int]) -> bool:
        """Append checked states to `sequence`, up to `end`. False: no room, and a part may be there."""

        def write(until: int, state: Bytes) -> bool:
            nonlocal start
            begin, start = start, min(until, end)
            return begin >= start or self._context.append(sequence, begin, start, state)

        if self._staging is not None and len(states) > 1:
            layouts = self._context.layouts
            return self._staging.load(layouts.own, [layouts.rearrange(state) for state in states], ends, write)
        return all(write(until, state) for until, state in zip(ends, states, strict=True))

    # ── snapshots ──

    def snapshot_layout(self) -> Layout:
        """Raises EngineError where there are no snapshots."""
        if self._context.layout is None or not self._context.unit.has_snapshots:
            raise EngineError("This model's state has nothing that could be kept as a snapshot.")
        return self._context.layout

    def snapshot_bytes(self, cells: int) -> int:
        """The most bytes that a snapshot takes in a context of `cells` cells; 0 where there are none."""
        layout = self._context.layout
        if layout is None or not layout.unit.has_snapshots:
            return 0
        return layout.snapshot_bytes(min(layout.window, cells))

    def export_snapshot(self, layout: Layout, sequence: int, end: int) -> Payload:
        payload = memoryview(self._context.read(sequence, 0, end, PARTIAL))
        with self._or_forget_layout():
            layout.check_snapshot(payload, end)
        return payload

    def check_snapshot(self, layout: Layout, payload: Payload, position: int) -> Bytes:
        """The state in `payload`, as this context writes it. Raises EngineError."""
        layouts, state = self._context.layouts, np.frombuffer(payload, np.uint8)
        if not layout.windows:
            layout.check_snapshot(payload, position)
            return state
        layouts.of(state).check_snapshot(payload, position)
        return layouts.rearrange(state, is_snapshot=True)


# ── packed ranges: rows in fewer bits, and everything else as llama.cpp wrote it ──


def packs(layout: Layout | None) -> frozenset[int]:
    """Bits in which the rows of this layout can be packed; 16 is as they are."""
    runs = [run for part in layout.ranges for run in part.runs] if layout is not None else []
    if not runs or any(run.tensor.kind != TYPES["f16"] for run in runs):
        return frozenset({16})
    return frozenset({16, *(bits for bits in BITS if all(_stream(run).packs(bits) for run in runs))})


def pack_range(layout: Layout, payload: Payload, cells: int, bits: int) -> Payload:
    """Packs an export of `cells` cells into `bits`. Raises EngineError."""
    state = np.frombuffer(payload, np.uint8)
    groups = zip(_streams(layout), _half_rows(layout, state, cells), strict=True)
    return pack([Group(streams, rows) for streams, rows in groups], bits, state[_other_offsets(layout, cells)])


def unpack_range(layouts: Layouts, payload: Payload) -> Payload:
    """The range as llama.cpp wrote it; only sizes are checked. Raises EngineError."""
    layout = layouts.own
    packed = Packed(payload, _streams(layout))
    others = _other_offsets(layout, packed.tokens)
    if len(others) != len(packed.rest):
        raise EngineError("A stored KV payload has another size than its cell count says.")
    state = np.empty(layout.range_bytes(packed.tokens), np.uint8)
    state[others] = packed.rest
    packed.unpack(list(_half_rows(layouts.of(state), state, packed.tokens)))
    return memoryview(state)


def _streams(layout: Layout) -> tuple[Streams, ...]:
    return tuple(_stream(run) for part in layout.ranges for run in part.runs)


def _stream(run: LayerRun) -> Streams:
    return Streams(run.is_key, run.tensor.row_bytes // 2, run.count)


def _half_rows(layout: Layout, state: Bytes, cells: int) -> Iterator[Floats]:
    """Views into `state`, one for each of `_streams`."""
    return (rows.view("<f2") for _, rows in layout.rows(state, cells))


@lru_cache(maxsize=16)
def _other_offsets(layout: Layout, cells: int) -> npt.NDArray[np.intp]:
    """Where the bytes are that belong to no row."""
    mask = np.ones(layout.range_bytes(cells), np.uint8)
    for _, rows in layout.rows(mask, cells):
        rows[:] = 0
    return np.flatnonzero(mask)


# ── long ranges, from and to a GPU ──


@dataclass(slots=True)
class Stage:
    """Memory that a state passes through, and what threads still do with it."""

    memory: Bytes
    _running: set[Future[Any]] = field(default_factory=set)

    def claim(self) -> Bytes:
        """Blocks until no thread uses its memory, and returns that."""
        wait(tuple(self._running))
        return self.memory

    def submit(self, threads: Executor, work: Sequence[Callable[[], T]], parts: int) -> list[Future[list[T]]]:
        """Let `threads` do `work` on its memory, in `parts` tasks at most."""
        each = -(-len(work) // parts)
        tasks = [threads.submit(_all, work[first : first + each]) for first in range(0, len(work), each)]
        self._running.update(tasks)
        for task in tasks:
            # A task that is kept keeps its payloads.
            task.add_done_callback(self._running.discard)
        return tasks


@dataclass(frozen=True, slots=True)
class StagedExport:
    """Payloads that threads cut out. See `KvExport`."""

    tasks: list[Future[list[Payload]]]

    @property
    def is_done(self) -> bool:
        return all(task.done() for task in self.tasks)

    def payloads(self) -> list[Payload]:
        return [payload for payloads in _results(self.tasks) for payload in payloads]


class Staging:
    """Belongs to the engine's thread. Without one of ggml's devices, memory is not pinned.

    With one, a thread prepares memory for chunks of `chunk_bytes`.
    """

    def __init__(self, device: Handle | None, chunk_bytes: int, stage_bytes: int = _STAGE) -> None:
        self._stage_bytes = stage_bytes
        self._payloads = PayloadMemory(chunk_bytes)
        self._pinned = [PinnedBuffer(device, stage_bytes) for _ in range(_STAGES)] if device else []
        memory = [each.memory for each in self._pinned]
        memory = memory or [np.empty(stage_bytes, np.uint8) for _ in range(_STAGES)]
        self._stages = cycle([Stage(each) for each in memory])
        """The next one is the one that was used longest ago."""
        run_anywhere = _initializer()
        self._parts = min(os.cpu_count() or 1, _MOST_THREADS)
        self._threads = ThreadPoolExecutor(self._parts, "emberkeep-staging", initializer=run_anywhere)
        if device:
            self._payloads.start(_touch_memory, begin=run_anywhere)

    def export(
        self, layout: Layout, borders: Sequence[int], read: Callable[[int, int, Bytes], Read], bits: int = 16
    ) -> StagedExport:
        """The ranges between `borders`. `read` writes a range's state into the memory it is given, or into its own
        where that is too small. It is not called after this returns. Raises EngineError."""
        exported: list[Future[list[Payload]]] = []
        for span in self._spans(layout, borders):
            stage = next(self._stages)
            state, rows = read(span[0], span[-1], stage.claim())
            cuts = layout.cuts(state, span, self._payloads.take, rows)
            if bits != 16:
                sizes = (end - start for start, end in pairwise(span))
                cuts = [partial(_pack, layout, cut, cells, bits) for cut, cells in zip(cuts, sizes, strict=True)]
            exported += stage.submit(self._threads, cuts, self._parts)
        return StagedExport(exported)

    def load(
        self, layout: Layout, states: Sequence[Bytes], ends: Sequence[int], write: Callable[[int, Bytes], bool]
    ) -> bool:
        """Join ranges that follow each other and `write` them: it gets the end of each, and returns whether there
        was room. What was written stays if there was none."""
        groups = list(self._groups(states, ends))
        join = self._join(layout, groups[0][0])
        for number, (_, end) in enumerate(groups):
            state, tasks = join
            _results(tasks)
            if number + 1 < len(groups):
                join = self._join(layout, groups[number + 1][0])
            if not write(end, state):
                _results(join[1])
                return False
        return True

    def close(self) -> None:
        """Blocks until threads have cut all."""
        self._payloads.close()
        self._threads.shutdown()
        self._stages = cycle(())
        for pinned in self._pinned:
            pinned.close()

    def _spans(self, layout: Layout, borders: Sequence[int]) -> Iterator[Sequence[int]]:
        """Borders of ranges that fit a stage together, or of a single range."""
        first = 0
        while first < len(borders) - 1:
            last = first + 1
            while (
                last < len(borders) - 1
                and layout.range_bytes(borders[last + 1] - borders[first]) <= self._stage_bytes
            ):
                last += 1
            yield borders[first : last + 1]
            first = last

    def _groups(self, states: Sequence[Bytes], ends: Sequence[int]) -> Iterator[tuple[list[Bytes], int]]:
        """Neighbouring states that fit a stage together, and where they end. The first group is small: the device
        waits until it is joined."""
        group: list[Bytes] = []
        most = self._stage_bytes // _FIRST_PART
        for state, end, following in zip(states, ends, [*states[1:], None], strict=True):
            group.append(state)
            if following is None or sum(map(len, group)) + len(following) > most:
                yield group, end
                group, most = [], self._stage_bytes

    def _join(self, layout: Layout, states: list[Bytes]) -> tuple[Bytes, list[Future[list[None]]]]:
        if len(states) == 1:
            return states[0], []
        stage = next(self._stages)
        joined, puts = layout.joining(states, stage.claim())
        return joined, stage.submit(self._threads, puts, self._parts)


class PinnedBuffer:
    """RAM that a device copies to and from at full speed; plain RAM where there is no such."""

    def __init__(self, device: Handle, size: int) -> None:
        self._buffer: Handle | None = None
        kind = llama().ggml_backend_dev_host_buffer_type(device)
        if kind:
            self._buffer = llama().ggml_backend_buft_alloc_buffer(kind, size)
        if self._buffer:
            address = llama().ggml_backend_buffer_get_base(self._buffer)
            self.memory: Bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        else:
            self.memory = np.empty(size, np.uint8)

    def close(self) -> None:
        """The memory must not be used any more."""
        self.memory = np.empty(0, np.uint8)
        if self._buffer:
            llama().ggml_backend_buffer_free(self._buffer)
            self._buffer = None


def _all(work: Sequence[Callable[[], T]]) -> list[T]:
    return [part() for part in work]


def _results(tasks: Sequence[Future[T]]) -> list[T]:
    """Blocks until all are done. Raises what they raised."""
    return [task.result() for task in tasks]


def _pack(layout: Layout, cut: Callable[[], Payload], cells: int, bits: int) -> Payload:
    return pack_range(layout, cut(), cells, bits)


def _touch_memory(size: int) -> Bytes:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def _initializer() -> Callable[[], None]:
    """Returns what a new thread calls first, to run on any core of the process.

    A thread inherits core and name of the one that starts it: here perhaps a single core, and the name by which
    `one_core_each` finds its workers.
    """
    cores = own_cores()

    def run_anywhere() -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                Path(f"/proc/self/task/{get_native_id()}/comm").write_text("staging")
                os.sched_setaffinity(0, cores)

    return run_anywhere
