"""The threads that move chunks between disk and RAM: readers, and the one that makes chunks durable.

Each chunk is read once, however many wait for it, and written with others, a batch at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from enum import Enum
from time import monotonic, perf_counter
from typing import Protocol

from emberkeep.kv.disk.chunk_files import ChunkFiles, Written
from emberkeep.kv.disk.chunkfile import Damaged, Description, describe, most_bytes
from emberkeep.kv.ledger import Ledger, Transact
from emberkeep.kv.policy import CostModel, StoreCounters
from emberkeep.kv.tree import Chunk, ChunkKey
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_THREADS = 3
_QUIET_S = 1.0
"""After a load the processor belongs to the answer: memory for the next one is prepared later."""
_BAD_SECTOR_READS = 4
_BAD_SECTOR_S = 300.0
"""A file that answers with nothing but I/O errors so often and for so long will not get better."""
_MOST_FAILING = 1024
_BATCH = 16
_LOOK_AGAIN = 1024
"""Chunks in the queue beyond which those that have nothing to write any more are taken out."""
_PAUSE_S = 10.0
"""How long a disk that refused a write is left alone."""


class FetchState(Enum):
    PENDING = "pending"
    READY = "ready"  # `chunk.payload` is set, and stays while the chunk is pinned and in the store
    DAMAGED = "damaged"  # failed verification; the chunk has left the store
    GONE = "gone"  # its file has disappeared; the chunk has left the store
    UNREADABLE = "unreadable"  # its file cannot be read just now; the chunk stays


@dataclass(slots=True)
class Fetch:
    """One read, shared by all requests that wait for it."""

    chunk: Chunk
    state: FetchState = FetchState.PENDING
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fetched:
    state: FetchState
    payload: memoryview | None = None
    is_there: bool = False
    """Its file is damaged, and could not be put out of reach."""


class Reader:
    """Brings chunks from disk into RAM, each once. Safe to use from any thread."""

    def __init__(
        self,
        files: ChunkFiles,
        transact: Transact,
        counters: StoreCounters,
        costs: CostModel,
        *,
        typical_size: int,
        ready_bytes: int,
    ) -> None:
        """`ready_bytes`: how much memory may be prepared for files of `typical_size`."""
        self._files = files
        self._transact = transact
        self._counters = counters
        self._costs = costs
        self._fetches: dict[ChunkKey, Fetch] = {}
        """Reads that were begun and have not ended."""
        self._typical_size = typical_size
        self._ready_bytes = ready_bytes
        self._failing: dict[ChunkKey, tuple[int, float]] = {}
        """How often a file could not be read since when."""
        self._threads = ThreadPoolExecutor(_THREADS, "kv-read")
        self._preparing: threading.Timer | None = None
        # Now and not beside the first request, which may be here the moment we are.
        all_started = threading.Barrier(_THREADS + 1)
        for _ in range(_THREADS):
            self._threads.submit(all_started.wait)
        all_started.wait()
        self._get_ready()

    def __len__(self) -> int:
        return len(self._fetches)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._fetches

    def begin(self, chunk: Chunk) -> Fetch:
        """The read of a chunk, begun where it was not yet. Returns at once; called with the store's lock held."""
        fetch = self._fetches.get(chunk.key)
        if fetch is None:
            fetch = Fetch(chunk)
            self._typical_size = max(self._typical_size, chunk.bytes)
            self._threads.submit(self._run, fetch)
            self._get_ready_later()
            self._fetches[chunk.key] = fetch  # who takes in what was read waits for the lock
        return fetch

    def close(self) -> None:
        """Blocks until the reads under way are done."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing.join()
        self._threads.shutdown(wait=True)

    def _run(self, fetch: Fetch) -> None:
        """Read, and tell the requests that wait for it whatever goes wrong: they notice a payload that is not
        there."""
        begin = perf_counter()
        try:
            result = self.check(describe(fetch.chunk, self._files.fingerprint))
        except Exception:
            log.exception("cannot read %s.kv", fetch.chunk.key.hex())
            result = Fetched(FetchState.UNREADABLE)
        try:
            self._take_in(fetch.chunk, result, perf_counter() - begin)
        except Exception:
            log.exception("cannot take in %s.kv", fetch.chunk.key.hex())
        fetch.state = result.state
        for notify in fetch.waiting:
            notify()

    def _take_in(self, chunk: Chunk, result: Fetched, seconds: float) -> None:
        below = self._transact(lambda ledger: self._enter(ledger, chunk, result, seconds))
        if result.payload is not None:
            size = len(result.payload)
            log.debug("cold -> warm: %d tokens, %d bytes in %.1f ms", len(chunk.tokens), size, 1e3 * seconds)
        if below:
            missing = self._files.missing(below)
            self._transact(lambda ledger: ledger.orphans.drop(missing))

    def _enter(self, ledger: Ledger, chunk: Chunk, result: Fetched, seconds: float) -> list[ChunkKey]:
        """Enter what was read; where it was nothing, returns the chunks below, which are out of reach now."""
        del self._fetches[chunk.key]
        if result.payload is not None:
            self._counters.read_chunks += 1
            self._counters.read_bytes += len(result.payload)
            self._counters.read_seconds += seconds
            self._costs.read.measure(len(result.payload), seconds)
            ledger.enter_payload(chunk, result.payload)
            ledger.shrink_ram()
            return []
        self._counters.damaged_chunks += result.state is FetchState.DAMAGED
        self._counters.vanished_chunks += result.state is FetchState.GONE
        self._counters.unreadable_chunks += result.state is FetchState.UNREADABLE
        return [] if result.state is FetchState.UNREADABLE else ledger.lose(chunk, is_there=result.is_there)

    def _get_ready(self) -> None:
        self._files.buffers.refill(self._typical_size, self._ready_bytes, _THREADS)

    def _get_ready_later(self) -> None:
        if self._preparing is not None and self._preparing.is_alive():
            return
        self._preparing = threading.Timer(_QUIET_S, self._get_ready)
        self._preparing.daemon = True
        try:
            self._preparing.start()
        except RuntimeError as error:  # no thread to be had: then the next load prepares its memory itself
            log.info("no memory is prepared: %s", error)
            self._preparing = None

    def check(self, expected: Description) -> Fetched:
        """Does what `check_file` does, but a file that has given nothing but errors for minutes is damaged."""
        result = check_file(self._files, expected, self._is_bad_for_good)
        if result.state is FetchState.READY:
            self._failing.pop(expected.key, None)
        return result

    def _is_bad_for_good(self, key: ChunkKey) -> bool:
        """A bad sector in a prefix that many share must not cost each of them its whole prompt for ever."""
        count, since = self._failing.get(key, (0, monotonic()))
        self._failing[key] = count + 1, since
        while len(self._failing) > _MOST_FAILING:
            self._failing.pop(next(iter(self._failing)), None)
        return count + 1 >= _BAD_SECTOR_READS and monotonic() - since >= _BAD_SECTOR_S


def check_file(
    files: ChunkFiles, expected: Description, is_bad_for_good: Callable[[ChunkKey], bool] = lambda key: False
) -> Fetched:
    """Read a file and verify it; a damaged one is put out of reach, if it can be. Blocks on disk.

    Only what is missing or fails its check is given up: every other error may pass.
    """
    key = expected.key
    try:
        return Fetched(FetchState.READY, files.read(expected), is_there=True)
    except Damaged as reason:
        log.warning("quarantined %s.kv: %s", key.hex(), reason)
        return Fetched(FetchState.DAMAGED, is_there=not files.quarantine(key))
    except FileNotFoundError as error:
        log.info("%s.kv is gone: %s", key.hex(), error)
        return Fetched(FetchState.GONE)
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno == errno.EIO and is_bad_for_good(key):
            log.warning("quarantined %s.kv: %s, for minutes now", key.hex(), error)
            return Fetched(FetchState.DAMAGED, is_there=not files.quarantine(key))
        log.warning("cannot read %s.kv just now: %s", key.hex(), error)
        return Fetched(FetchState.UNREADABLE)


class WriteDecisions(Protocol):
    """What the writer asks and tells, on its own thread. All may block on disk, and raise OSError."""

    def is_worth_writing(self, chunk: Chunk, batch: Mapping[ChunkKey, int]) -> bool:
        """`batch`: what is about to be written with it, in bytes."""

    def is_wanted(self, key: ChunkKey) -> bool:
        """Whether a file that is written should come into its place, while no user can be forgotten."""

    def complete_store(self, sizes: Mapping[ChunkKey, int], replaced: list[Chunk]) -> None:
        """These files are in their places. `replaced`: tails that are inside chunks of theirs."""

    def tidy(self) -> None:
        """There is nothing to write."""


class Writer:
    """Queues chunks and writes them. Safe to use from any thread."""

    def __init__(self, files: ChunkFiles, decisions: WriteDecisions, *, tells_expiry: bool = False) -> None:
        """`tells_expiry`: the index has it with a file's row, and not only when the turn has ended."""
        self._files = files
        self._decisions = decisions
        self._tells_expiry = tells_expiry
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
        """Write a chunk later, if it is worth it; then the tail inside it goes. Returns at once."""
        with self._changed:
            self._queue.append((chunk, replaces))
            if len(self._queue) > self._look_again:
                self._queue = _with_payload(self._queue)
                self._look_again = max(_LOOK_AGAIN, 2 * len(self._queue))
            self._changed.notify_all()

    def wake(self) -> None:
        """There is something to tidy, if nothing to write. Returns at once."""
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
        give_way()
        while self._has_work():
            batch = self._next_batch()
            try:
                self._write(batch)
                if not self._queue:
                    self._attempt(self._decisions.tidy)
            except MemoryError as error:
                self._refused(batch, error)
            except Exception as error:
                log.exception("a batch was not written: the next one may fare better")
                self.last_error = repr(error)
                self.refused_chunks += len(batch)
            del batch  # a thread that waits holds nothing of anybody
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
            expires = {chunk.key: chunk.expires for chunk, _ in batch} if self._tells_expiry else {}
            written = self._files.write(entries, self._decisions.is_wanted, expires) if entries else Written({})
        except OSError as error:
            self._refused(batch, error)
            return
        seconds, sizes = perf_counter() - begin, written.sizes
        self.write_seconds += seconds
        self.written_chunks += len(sizes)
        self.written_bytes += sum(sizes.values())
        if sizes and log.isEnabledFor(logging.DEBUG):
            tokens = sum(len(chunk.tokens) for chunk, _ in batch if chunk.key in sizes)
            log.debug("warm -> cold: %d tokens, %d bytes in %.1f ms", tokens, sum(sizes.values()), 1e3 * seconds)
        replaced = [tail for chunk, tail in batch if tail and chunk.key in sizes]
        self._attempt(lambda: self._decisions.complete_store(sizes, replaced))
        if written.error is not None:
            self._refused([item for item in batch if item[0].key not in sizes], written.error)

    def _entries(self, batch: list[tuple[Chunk, Chunk | None]]) -> list[tuple[Description, memoryview]]:
        """What is still worth writing: evicted chunks have lost their payload by now."""
        entries = []
        sizes: dict[ChunkKey, int] = {}
        for chunk, _ in batch:
            payload = chunk.payload
            is_new = not chunk.on_disk and chunk.key not in sizes  # one that is reused may be queued again
            if payload is not None and is_new and self._decisions.is_worth_writing(chunk, sizes):
                sizes[chunk.key] = most_bytes(chunk)
                entries.append((describe(chunk, self._files.fingerprint), payload))
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

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.last_error = str(error)
            log.warning("cannot tidy the store: %s", error)


def _with_payload(queue: list[tuple[Chunk, Chunk | None]]) -> list[tuple[Chunk, Chunk | None]]:
    return [item for item in queue if item[0].payload is not None]


def give_way() -> None:
    """Let this thread give way to those that compute. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
