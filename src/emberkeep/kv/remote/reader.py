"""Reads blocks from the shared server: several in a round trip, each once however many requests wait for it, and
verified before anything else sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import monotonic, perf_counter
from typing import Any

from emberkeep.kv.disk.chunkfile import Damaged, Description, verified
from emberkeep.kv.policy import CostModel
from emberkeep.kv.remote.link import RemoteLink
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_AT_ONCE = 16 << 20
"""Bytes that one round trip asks for: more only makes the first of them come later."""
_ASSUMED_RATE = 50e6
"""Bytes per second, for a deadline while nothing was measured."""
_STALE_S = 60.0
"""After it, what was measured of the line says nothing about it any more."""

Whole = tuple[Description, memoryview]
"""A value that was verified: what it says of itself, and the payload."""


@dataclass(frozen=True, slots=True)
class Found:
    """One value that the server has."""

    name: bytes
    lineage: Lineage
    expected: Description
    size: int


@dataclass(slots=True)
class ReadCounters:
    read_chunks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged_chunks: int = 0
    vanished_chunks: int = 0


class BlockReader:
    """Safe to use from any thread."""

    def __init__(self, link: RemoteLink, costs: CostModel, discard: Callable[[list[bytes]], None]) -> None:
        """`discard` is told the names of values that are damaged; it must not block."""
        self._link = link
        self._costs = costs
        self._discard = discard
        self._lock = threading.Lock()
        self._in_flight: dict[bytes, Future[Whole | None]] = {}
        self._measured_at = monotonic()
        self.counters = ReadCounters()

    def patience(self, size: int) -> float:
        """Seconds in which so many bytes should be here."""
        return self._link.settings.deadline_s + 3 * size / (self._costs.fetch.value or _ASSUMED_RATE)

    def forget_old_measures(self) -> None:
        """A line that was slow would never be tried again."""
        if monotonic() - self._measured_at > _STALE_S:
            self._costs.fetch.value = None

    def read(self, wanted: Sequence[Found]) -> Iterator[tuple[Found, Whole]]:
        """In order, as far as they are there and whole. Blocks. Raises Unreachable, TimeoutError."""
        for batch in _batches(wanted):
            with self._lock:
                others = {one.name: self._in_flight[one.name] for one in batch if one.name in self._in_flight}
                mine = [one for one in batch if one.name not in others]
                self._in_flight |= {one.name: Future() for one in mine}
            got = self._read(mine)
            for found in batch:
                theirs = others.get(found.name)
                whole = theirs.result(self.patience(found.size)) if theirs else got[found.name]
                if whole is None:
                    return
                yield found, whole

    def _read(self, wanted: Sequence[Found]) -> dict[bytes, Whole | None]:
        got: dict[bytes, Whole | None] = {found.name: None for found in wanted}
        if not wanted:
            return got
        begin = perf_counter()
        try:
            size = sum(found.size for found in wanted)
            values = self._link.run(lambda pipe: [pipe.get(found.name) for found in wanted], size=size)
            for found, value in zip(wanted, values, strict=True):
                got[found.name] = self._verified(found, value)
            self._count(values, perf_counter() - begin)
        finally:
            with self._lock:
                waiting = [(name, self._in_flight.pop(name)) for name in got]
            for name, future in waiting:
                future.set_result(got[name])
        return got

    def _verified(self, found: Found, value: Any) -> Whole | None:
        if not isinstance(value, bytes):
            return None
        try:
            opened = memoryview(self._link.seal.open(found.name, value))
            packed, payload = verified(opened, found.expected)
            described = Description.unpack(packed)
        except Damaged as reason:
            log.warning("a value of the remote tier is not what it should be: %s", reason)
            with self._lock:
                self.counters.damaged_chunks += 1
            self._link.breaker.damaged(str(reason))
            self._discard([found.name])
            return None
        self._link.breaker.whole()
        return described, payload

    def _count(self, values: Sequence[Any], seconds: float) -> None:
        came = [len(value) for value in values if isinstance(value, bytes)]
        log.debug("remote -> warm: %d chunks, %d bytes in %.1f ms", len(came), sum(came), 1e3 * seconds)
        with self._lock:
            if came:
                self._costs.fetch.measure(sum(came), seconds)
                self._measured_at = monotonic()
            self.counters.read_chunks += len(came)
            self.counters.read_bytes += sum(came)
            self.counters.read_seconds += seconds
            self.counters.vanished_chunks += len(values) - len(came)


def _batches(wanted: Sequence[Found]) -> Iterator[list[Found]]:
    batch: list[Found] = []
    for found in wanted:
        if batch and sum(one.size for one in batch) + found.size > _AT_ONCE:
            yield batch
            batch = []
        batch.append(found)
    if batch:
        yield batch
