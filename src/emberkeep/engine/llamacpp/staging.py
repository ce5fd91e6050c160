"""State between a GPU and the store's memory: the chunks of a long range at once, through pinned memory.

llama.cpp copies the rows of one layer after the other, and waits for each copy. For a chunk alone that is
thousands of small copies; so a range of many chunks leaves and enters the library as one state. What has to be cut
out of it, or put together, other threads do while the next one is on its way, and while the engine goes on:

    GPU      | range 0 | range 1 | range 2 | the next step
    threads            | cut 0   | cut 1   | cut 2 |
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from threading import get_native_id
from typing import Any, TypeVar

import numpy as np

from emberkeep.engine.base import Payload
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.context import own_cores
from emberkeep.engine.llamacpp.kv_packing import pack_range
from emberkeep.engine.llamacpp.kv_state import Bytes, Layout
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.payload_memory import PayloadMemory
from emberkeep.values import dataclass

T = TypeVar("T")

_STAGE = 128 << 20
"""Bytes that are on their way at once: a copy of a layer's rows is then large enough for the full speed."""
_FIRST_PART = 4
"""What is loaded first is one part of a stage of so many."""
_STAGES = 4
_MOST_THREADS = 8


@dataclass(slots=True)
class Stage:
    """Memory that a state passes through, and what threads still do with it."""

    memory: Bytes
    _running: set[Future[Any]] = field(default_factory=set)

    def free(self) -> Bytes:
        """Its memory, once they are done with it."""
        wait(tuple(self._running))
        return self.memory

    def submit(self, threads: Executor, work: Sequence[Callable[[], T]], parts: int) -> list[Future[list[T]]]:
        """Let threads do this with its memory, in so many parts."""
        each = -(-len(work) // parts)
        tasks = [threads.submit(_all, work[first : first + each]) for first in range(0, len(work), each)]
        self._running.update(tasks)
        for task in tasks:
            # Not held for longer: its results are payloads.
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
    """Belongs to the engine's thread. `device` is one of ggml's; None: memory is not pinned.

    Memory for chunks of `chunk_bytes` is prepared by a thread of its own.
    """

    def __init__(self, device: Handle | None, chunk_bytes: int, stage_bytes: int = _STAGE) -> None:
        self._stage_bytes = stage_bytes
        self._payloads = PayloadMemory(chunk_bytes)
        self._pinned = [PinnedBuffer(device, stage_bytes) for _ in range(_STAGES)] if device else []
        memory = [each.memory for each in self._pinned]
        memory = memory or [np.empty(stage_bytes, np.uint8) for _ in range(_STAGES)]
        self._stages = cycle([Stage(each) for each in memory])
        """The next one is the one that was used longest ago."""
        run_anywhere = _any_core()
        self._parts = min(os.cpu_count() or 1, _MOST_THREADS)
        self._threads = ThreadPoolExecutor(self._parts, "emberkeep-staging", initializer=run_anywhere)
        if device:
            self._payloads.start(_touched, begin=run_anywhere)

    def export(
        self, layout: Layout, borders: Sequence[int], read: Callable[[int, int, Bytes], Bytes], bits: int = 16
    ) -> StagedExport:
        """The ranges between `borders`. `read` brings the state of a range into memory that it is given, or into
        memory of its own where that is too small; when this returns, it is not called any more. Raises
        EngineError."""
        exported: list[Future[list[Payload]]] = []
        for span in self._spans(layout, borders):
            stage = next(self._stages)
            cuts = layout.splitting(read(span[0], span[-1], stage.free()), span, self._payloads)
            if bits != 16:
                sizes = (end - start for start, end in pairwise(span))
                cuts = [partial(_pack, layout, cut, cells, bits) for cut, cells in zip(cuts, sizes, strict=True)]
            exported += stage.submit(self._threads, cuts, self._parts)
        return StagedExport(exported)

    def load(
        self, layout: Layout, states: Sequence[Bytes], ends: Sequence[int], write: Callable[[int, Bytes], bool]
    ) -> bool:
        """Put ranges together that follow each other, and `write` them: it is told where each ends, and says
        whether there was room. What was written stays when it says no."""
        groups = list(self._groups(states, ends))
        putting = self._join(layout, groups[0][0])
        for number, (_, end) in enumerate(groups):
            state, tasks = putting
            _results(tasks)
            if number + 1 < len(groups):
                putting = self._join(layout, groups[number + 1][0])
            if not write(end, state):
                _results(putting[1])
                return False
        return True

    def close(self) -> None:
        """What is still cut out is cut out first."""
        self._payloads.close()
        self._threads.shutdown()
        self._stages = cycle(())
        for pinned in self._pinned:
            pinned.close()

    def _spans(self, layout: Layout, borders: Sequence[int]) -> Iterator[Sequence[int]]:
        """Neighbouring ranges whose state together fits a stage, and at least one."""
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
        """Neighbouring states that together fit a stage, and where they end. The first are fewer: the device has
        nothing to do until they are put together."""
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
        joined, puts = layout.joining(states, stage.free())
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


def _touched(size: int) -> Bytes:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def _any_core() -> Callable[[], None]:
    """What a thread does first that this one starts: it may run on any core of the process.

    This one may have a core of its own, and it tells its workers by their name (`one_core_each`); a thread has
    both from the one that starts it.
    """
    cores = own_cores()

    def run_anywhere() -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                Path(f"/proc/self/task/{get_native_id()}/comm").write_text("staging")
                os.sched_setaffinity(0, cores)

    return run_anywhere
