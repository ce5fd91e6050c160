"""The thread that makes chunks durable, a batch at a time."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic, perf_counter

from emberkeep.kv.chunk_files import ChunkFiles, Written
from emberkeep.kv.chunkfile import Description, describe, most_bytes
from emberkeep.kv.tree import Chunk, ChunkKey

log = logging.getLogger("emberkeep.kv")

_BATCH = 16
_LOOK_AGAIN = 1024
"""Chunks in the queue beyond which those that have nothing to write any more are taken out."""
_PAUSE_S = 10.0
"""How long a disk that refused a write is left alone."""


class Writer:
    """`is_worth_it(chunk, sizes of those beside it)`, `is_wanted(key)`, `on_durable(sizes, replaced)` and
    `on_idle()` are called from the writer's thread."""

    def __init__(
        self,
        cold: ChunkFiles,
        fingerprint: bytes,
        *,
        is_worth_it: Callable[[Chunk, Mapping[ChunkKey, int]], bool],
        is_wanted: Callable[[ChunkKey], bool],
        on_durable: Callable[[dict[ChunkKey, int], list[Chunk]], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._cold = cold
        self._fingerprint = fingerprint
        self._is_worth_it = is_worth_it
        self._is_wanted = is_wanted
        self._on_durable = on_durable
        self._on_idle = on_idle
        self._queue: list[tuple[Chunk, Chunk | None]] = []
        self._look_again = _LOOK_AGAIN
        self._changed = threading.Condition()
        self._busy = False
        self._in_hand = 0
        self._batches = 0
        self._woken = False
        self._closing = False
        self._paused_until = 0.0
        self.written_chunks = 0
        self.written_bytes = 0
        self.write_seconds = 0.0
        self.refused_chunks = 0
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="kv-write", daemon=True)
        self._thread.start()

    def put(self, chunk: Chunk, replaces: Chunk | None) -> None:
        """Queue a chunk. Returns at once; nobody waits for the disk."""
        with self._changed:
            self._queue.append((chunk, replaces))
            if len(self._queue) > self._look_again:
                self._queue = _with_payload(self._queue)
                self._look_again = max(_LOOK_AGAIN, 2 * len(self._queue))
            self._changed.notify_all()

    def wake(self) -> None:
        """There is something to tidy, if nothing to write."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def flush(self) -> None:
        """Block until the queue is empty and the disk has answered."""
        with self._changed:
            self._changed.wait_for(
                lambda: (not (self._queue or self._woken) or self._is_paused) and not self._busy
            )

    def settle(self) -> None:
        """Block until what is being written just now is, or is given up."""
        with self._changed:
            batch = self._batches
            self._changed.wait_for(lambda: not self._busy or self._batches != batch)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> dict[str, object]:
        return {
            "written_chunks": self.written_chunks,
            "written_bytes": self.written_bytes,
            "write_seconds": round(self.write_seconds, 6),
            "refused_chunks": self.refused_chunks,
            "pending_chunks": len(self._queue) + self._in_hand,
            "last_error": self.last_error,
        }

    def _run(self) -> None:
        _step_back()
        while self._has_work():
            batch = self._next_batch()
            try:
                self._write(batch)
                if not self._queue:
                    self._tidy(self._on_idle)
            except MemoryError as error:
                self._refused(batch, error)
            except Exception as error:
                log.exception("a batch was not written: the next one may fare better")
                self.last_error = repr(error)
                self.refused_chunks += len(batch)
            with self._changed:
                self._busy = False
                self._in_hand = 0
                self._batches += 1
                self._changed.notify_all()

    @property
    def _is_paused(self) -> bool:
        return monotonic() < self._paused_until and not self._closing

    def _has_work(self) -> bool:
        """Waits for some; False when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._woken or self._closing)
            while self._is_paused:
                self._changed.wait(self._paused_until - monotonic())
            self._busy = bool(self._queue or self._woken)
            self._woken = False
            return self._busy

    def _next_batch(self) -> list[tuple[Chunk, Chunk | None]]:
        with self._changed:
            batch, self._queue = self._queue[:_BATCH], self._queue[_BATCH:]
            self._in_hand = len(batch)
            return batch

    def _write(self, batch: list[tuple[Chunk, Chunk | None]]) -> None:
        if not batch:
            return
        begin = perf_counter()
        try:
            entries = self._entries(batch)
            written = self._cold.write(entries, self._is_wanted) if entries else Written({})
        except OSError as error:
            self._refused(batch, error)
            return
        self.write_seconds += perf_counter() - begin
        sizes = written.sizes
        self.written_chunks += len(sizes)
        self.written_bytes += sum(sizes.values())
        replaced = [tail for chunk, tail in batch if tail and chunk.key in sizes]
        self._tidy(lambda: self._on_durable(sizes, replaced))
        if written.error is not None:
            self._refused([item for item in batch if item[0].key not in sizes], written.error)

    def _entries(self, batch: list[tuple[Chunk, Chunk | None]]) -> list[tuple[Description, memoryview]]:
        """What is still worth writing: evicted chunks have lost their payload by now."""
        entries = []
        sizes: dict[ChunkKey, int] = {}
        for chunk, _ in batch:
            payload = chunk.payload
            is_new = not chunk.on_disk and chunk.key not in sizes  # one that is reused may be queued again
            if payload is not None and is_new and self._is_worth_it(chunk, sizes):
                sizes[chunk.key] = most_bytes(chunk)
                entries.append((describe(chunk, self._fingerprint), payload))
        return entries

    def _refused(self, batch: list[tuple[Chunk, Chunk | None]], error: OSError | MemoryError) -> None:
        """Leave the disk alone for a while, then try again: a chunk is no use without those before it."""
        self.refused_chunks += len(batch)
        self.last_error = str(error) or repr(error)
        with self._changed:
            self._paused_until = monotonic() + _PAUSE_S
            if not self._closing:
                # Evicted chunks have nothing left to write: a broken disk must not make the queue grow for ever.
                self._queue = _with_payload(batch + self._queue)
        log.warning("cannot write to the store, serving goes on from RAM: %s", error)

    def _tidy(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.last_error = str(error)
            log.warning("cannot tidy the store: %s", error)


def _with_payload(queue: list[tuple[Chunk, Chunk | None]]) -> list[tuple[Chunk, Chunk | None]]:
    return [item for item in queue if item[0].payload is not None]


def _step_back() -> None:
    """Let this thread give way to those that compute. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
