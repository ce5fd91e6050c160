"""Reading chunks from disk on threads of their own, each chunk once however many wait for it."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic, perf_counter

from emberkeep.kv.chunk_files import ChunkFiles
from emberkeep.kv.chunkfile import Damaged, describe
from emberkeep.kv.tree import Chunk, ChunkKey

log = logging.getLogger("emberkeep.kv")

_THREADS = 3
_QUIET_S = 1.0
"""After a load the processor belongs to the answer: memory for the next one is prepared later."""
_BAD_SECTOR_READS = 4
_BAD_SECTOR_S = 300.0
"""A file that answers with nothing but I/O errors so often and for so long will not get better."""
_MOST_FAILING = 1024


class FetchState(Enum):
    PENDING = "pending"
    READY = "ready"  # `chunk.payload` is set, and stays while the chunk is pinned and in the store
    DAMAGED = "damaged"  # failed verification; the chunk has left the store
    GONE = "gone"  # its file has disappeared; the chunk has left the store
    UNREADABLE = "unreadable"  # its file cannot be read just now; the chunk stays


@dataclass(slots=True)
class Fetch:
    """One read, shared by everybody who waits for it."""

    chunk: Chunk
    state: FetchState = FetchState.PENDING
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a read."""

    state: FetchState
    payload: memoryview | None
    seconds: float
    is_there: bool = False
    """Its file is damaged, and could not be put out of reach."""


class Reader:
    """`on_done` is called on a reader's thread for every fetch that was started."""

    def __init__(
        self,
        cold: ChunkFiles,
        fingerprint: bytes,
        *,
        typical_size: int,
        ready_bytes: int,
        on_done: Callable[[Fetch, Fetched], None],
    ) -> None:
        """`ready_bytes`: how much memory may be prepared for files of `typical_size`."""
        self._cold = cold
        self._fingerprint = fingerprint
        self._on_done = on_done
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

    def start(self, fetch: Fetch) -> None:
        """Returns at once. Called under the store's lock."""
        self._typical_size = max(self._typical_size, fetch.chunk.bytes)
        self._threads.submit(self._run, fetch)
        self._get_ready_later()

    def close(self) -> None:
        """Blocks until the reads under way are done."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing.join()
        self._threads.shutdown(wait=True)

    def _run(self, fetch: Fetch) -> None:
        begin = perf_counter()
        try:
            state, payload, is_there = self._read(fetch.chunk)
        except Exception:  # whoever waits for it must hear
            log.exception("cannot read %s.kv", fetch.chunk.key.hex())
            state, payload, is_there = FetchState.UNREADABLE, None, False
        self._on_done(fetch, Fetched(state, payload, perf_counter() - begin, is_there))

    def _get_ready(self) -> None:
        self._cold.get_ready(self._typical_size, self._ready_bytes, _THREADS)

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

    def _read(self, chunk: Chunk) -> tuple[FetchState, memoryview | None, bool]:
        """Only what is missing or fails its check is given up: every other error may pass."""
        try:
            payload = self._cold.read(describe(chunk, self._fingerprint))
            self._failing.pop(chunk.key, None)
            return FetchState.READY, payload, True
        except Damaged as reason:
            log.warning("quarantined %s.kv: %s", chunk.key.hex(), reason)
            return FetchState.DAMAGED, None, not self._cold.quarantine(chunk.key)
        except FileNotFoundError as error:
            log.info("%s.kv is gone: %s", chunk.key.hex(), error)
            return FetchState.GONE, None, False
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno == errno.EIO and self._is_bad_for_good(chunk.key):
                log.warning("quarantined %s.kv: %s, for minutes now", chunk.key.hex(), error)
                return FetchState.DAMAGED, None, not self._cold.quarantine(chunk.key)
            log.warning("cannot read %s.kv just now: %s", chunk.key.hex(), error)
            return FetchState.UNREADABLE, None, False

    def _is_bad_for_good(self, key: ChunkKey) -> bool:
        """Else a bad sector in a prefix that many share would cost each of them its whole prompt for ever."""
        count, since = self._failing.get(key, (0, monotonic()))
        self._failing[key] = count + 1, since
        while len(self._failing) > _MOST_FAILING:
            self._failing.pop(next(iter(self._failing)), None)
        return count + 1 >= _BAD_SECTOR_READS and monotonic() - since >= _BAD_SECTOR_S
