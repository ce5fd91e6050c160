"""State between a GPU and the store's memory: the chunks of a long range at once, through pinned memory.

llama.cpp copies the rows of one layer after the other, and waits for each copy. For a chunk alone that is
thousands of small copies; so a range of many chunks leaves and enters the library as one state. What has to be cut
out of it, or put together, other threads do while the next one is on its way:

    GPU      | range 0 | range 1 | range 2 |
    threads            | cut 0   | cut 1   | cut 2 |
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from emberkeep.engine.base import Payload
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.kv_state import Bytes, Layout
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.payload_memory import SLAB, PayloadMemory, slab_count

T = TypeVar("T")

_STAGE = 128 << 20
"""Bytes that are on their way at once: a copy of a layer's rows is then large enough for the full speed."""
_STAGES = 2
_MOST_THREADS = 8


class Staging:
    """Belongs to the engine's thread. `device` is one of ggml's; None: memory is not pinned.

    Memory for chunks of `chunk_bytes` is prepared by a thread of its own.
    """

    def __init__(self, device: Handle | None, chunk_bytes: int, stage_bytes: int = _STAGE) -> None:
        self._stage_bytes = stage_bytes
        self._payloads = PayloadMemory(chunk_bytes)
        self._is_closed = Event()
        if device:
            Thread(target=self._prepare, name="emberkeep-payloads", daemon=True).start()
        self._pinned = [PinnedBuffer(device, stage_bytes) for _ in range(_STAGES)] if device else []
        self._stages = [each.memory for each in self._pinned] or [
            np.empty(stage_bytes, np.uint8) for _ in range(_STAGES)
        ]
        self._threads = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "emberkeep-staging")

    def export(
        self, layout: Layout, borders: Sequence[int], read: Callable[[int, int, Bytes], Bytes]
    ) -> list[Payload]:
        """The ranges between `borders`. `read` brings the state of a range into memory that it is given, or into
        memory of its own where that is too small. Raises EngineError."""
        cut: list[list[Future[Payload]]] = []
        try:
            for number, span in enumerate(self._spans(layout, borders)):
                if number >= _STAGES:
                    _results(cut[number - _STAGES])  # it is read from until then
                state = read(span[0], span[-1], self._stages[number % _STAGES])
                tasks = layout.splitting(state, span, self._payloads)
                cut.append([self._threads.submit(task) for task in tasks])
        finally:
            payloads = [payload for tasks in cut for payload in _results(tasks)]
        return payloads

    def load(
        self, layout: Layout, states: Sequence[Bytes], ends: Sequence[int], write: Callable[[int, Bytes], bool]
    ) -> bool:
        """Put ranges together that follow each other, and `write` them: it is told where each ends, and says
        whether there was room. What was written stays when it says no."""
        groups = list(self._groups(states, ends))
        putting = self._join(layout, groups[0][0], 0)
        for number, (_, end) in enumerate(groups):
            state, tasks = putting
            _results(tasks)
            if number + 1 < len(groups):
                putting = self._join(layout, groups[number + 1][0], number + 1)
            if not write(end, state):
                _results(putting[1])
                return False
        return True

    def close(self) -> None:
        self._is_closed.set()
        self._threads.shutdown()
        self._stages.clear()
        for pinned in self._pinned:
            pinned.close()

    def _prepare(self) -> None:
        for _ in range(slab_count()):
            if self._is_closed.is_set():
                return
            slab = np.empty(SLAB, np.uint8)
            slab.fill(0)
            self._payloads.add(slab)

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
        group: list[Bytes] = []
        for state, end, following in zip(states, ends, [*states[1:], None], strict=True):
            group.append(state)
            if following is None or sum(map(len, group)) + len(following) > self._stage_bytes:
                yield group, end
                group = []

    def _join(self, layout: Layout, states: list[Bytes], number: int) -> tuple[Bytes, list[Future[None]]]:
        if len(states) == 1:
            return states[0], []
        joined, tasks = layout.joining(states, self._stages[number % _STAGES])
        return joined, [self._threads.submit(task) for task in tasks]


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


def _results(tasks: Sequence[Future[T]]) -> list[T]:
    """Blocks until all are done. Raises what they raised."""
    return [task.result() for task in tasks]
