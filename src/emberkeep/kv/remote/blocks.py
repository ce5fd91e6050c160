"""Blocks: tokens cut so that every host gives the same part the same name, and reading them from the server.

    position   0        128       256    300
    host A     [block 0][block 1 ][tail ]          a turn ended at 300
    host B     [chunk 0 ][0][1][chunk 2   ]        cut where its conversations parted

A block begins at a multiple of its length, whatever happened on a host. Its key is that of a chunk whose parents
are blocks too, all of the same lineage: it depends on the tokens from the beginning and on nothing else. Chunks
that lie otherwise stay where they are.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from emberkeep.kv.disk.chunkfile import Damaged, Description, verified
from emberkeep.kv.lookups import BLOCK_TOKENS, block_start
from emberkeep.kv.policy import CostModel, ReadCounters
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, VERSION, RemoteLink
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Made, Span, chunk_key, tokens_to
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_REMEMBERED = 65_536
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a block, or the beginning of everything."""

    fingerprint: bytes
    lineage: Lineage
    key: ChunkKey = ROOT
    position: int = 0

    @property
    def take(self) -> int:
        return BLOCK_TOKENS if self.position else 0

    def child(self, tokens: TokenArray, sampled: tuple[Span, ...] = (), made: Made = Made.UNKNOWN) -> Description:
        """The block, or the tail, of `tokens` that begins here."""
        key = chunk_key(self.fingerprint, self.lineage, self.key, self.take, tokens)
        name = str(self.lineage)
        return Description(self.fingerprint, name, key, self.key, self.take, self.position, tokens, sampled, made)

    def snapshot(self, tokens: TokenArray, made: Made = Made.UNKNOWN) -> Description:
        """The state after `tokens` from here, fewer than a block."""
        parent, take = self.key, self.take
        if len(tokens):
            parent, take = self.child(tokens).key, len(tokens)
        key = chunk_key(self.fingerprint, self.lineage, parent, take, _NO_TOKENS)
        start = self.position + len(tokens)
        return Description(self.fingerprint, str(self.lineage), key, parent, take, start, _NO_TOKENS, (), made)

    def after(self, block: Description) -> Place:
        return Place(self.fingerprint, self.lineage, block.key, self.position + len(block.tokens))


def blocks_of(fingerprint: bytes, lineage: Lineage, tokens: TokenArray) -> list[Description]:
    place, blocks = Place(fingerprint, lineage), []
    for begin in range(0, block_start(len(tokens)), BLOCK_TOKENS):
        blocks.append(place.child(tokens[begin : begin + BLOCK_TOKENS]))
        place = place.after(blocks[-1])
    return blocks


def place_after(fingerprint: bytes, lineage: Lineage, blocks: Sequence[Description]) -> Place:
    """Where the last of `blocks` ends; without any, the beginning."""
    if not blocks:
        return Place(fingerprint, lineage)
    return Place(fingerprint, lineage, blocks[-1].key, len(blocks) * BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk of the tree, as every host would describe it."""

    before: Place
    """The last block's end before it."""
    tokens: TokenArray
    """What is from there to its end."""
    described: Description


class BlockPlaces:
    """Where chunks of the tree lie, as blocks. Belongs to one thread."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._ends: OrderedDict[tuple[Lineage, ChunkKey], Place] = OrderedDict()

    def of(self, chunk: Chunk) -> Placed | None:
        """A block, a tail or a snapshot; None where it lies otherwise, or is of one conversation alone."""
        assert chunk.parent is not None
        lineage = chunk.lineage
        is_cut_otherwise = not chunk.is_snapshot and chunk.start % BLOCK_TOKENS != 0
        if lineage.repair is not None or lineage.splice or is_cut_otherwise:
            return None
        begins = Cursor(chunk.parent, chunk.take, lineage)
        before = self._place(begins, block_start(chunk.start))
        if chunk.is_snapshot:
            rest = tokens_to(begins)[before.position :]
            return Placed(before, rest, before.snapshot(rest, chunk.made))
        described = before.child(chunk.tokens, chunk.sampled, chunk.made)
        if len(chunk.tokens) == BLOCK_TOKENS:
            self._remember((lineage, chunk.key), before.after(described))
        return Placed(before, chunk.tokens, described)

    def _place(self, cursor: Cursor, position: int) -> Place:
        """The block's end at `position`, at or before `cursor`."""
        parent = cursor.chunk
        known = self._ends.get((cursor.lineage, parent.key)) if parent.end == position == cursor.position else None
        if known is None:
            blocks = blocks_of(self._fingerprint, cursor.lineage, tokens_to(cursor)[:position])
            known = place_after(self._fingerprint, cursor.lineage, blocks)
        return known

    def _remember(self, end: tuple[Lineage, ChunkKey], place: Place) -> None:
        self._ends[end] = place
        self._ends.move_to_end(end)
        while len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)


# ── reading ──


_AT_ONCE = 16 << 20
"""Bytes that one round trip asks for: more only makes the first of them come later."""
_ASSUMED_RATE = 50e6
"""Bytes per second, for a deadline while nothing was measured."""
_STALE_S = 60.0
"""After it, what was measured of the line says nothing about it any more."""

Whole = tuple[Description, memoryview]
"""A value that was verified: what it says of itself, and the payload."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One value that the server has."""

    name: bytes
    lineage: Lineage
    expected: Description
    size: int


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

    def read(self, wanted: Sequence[StoredBlock]) -> Iterator[tuple[StoredBlock, Whole]]:
        """Yields them in order, as far as they are there and whole. Blocks. Raises Unreachable, TimeoutError."""
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

    def _read(self, wanted: Sequence[StoredBlock]) -> dict[bytes, Whole | None]:
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

    def _verified(self, found: StoredBlock, value: Any) -> Whole | None:
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
            self._link.breaker.received(str(reason))
            self._discard([found.name])
            return None
        self._link.breaker.received(None)
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


def _batches(wanted: Sequence[StoredBlock]) -> Iterator[list[StoredBlock]]:
    batch: list[StoredBlock] = []
    for found in wanted:
        if batch and sum(one.size for one in batch) + found.size > _AT_ONCE:
            yield batch
            batch = []
        batch.append(found)
    if batch:
        yield batch


# ── what is in the server ──


@dataclass(frozen=True, slots=True)
class Holding:
    """State of one user in one store on the server."""

    store: str
    """The name of the store's folder on every host that has it."""
    tag: str
    """What `RemoteLink.tag` makes of a user."""
    chunks: int = 0
    bytes: int = 0
    longest_s: float = 0.0
    """Until the last of them expires."""

    def plus(self, size: int, milliseconds: int) -> Holding:
        longest = max(self.longest_s, milliseconds / 1000)
        return Holding(self.store, self.tag, self.chunks + 1, self.bytes + size, longest)


def holdings(link: RemoteLink) -> list[Holding]:
    """The largest first. Blocks while every name is looked at. Raises Unreachable."""
    found: dict[tuple[str, str], Holding] = {}

    def sizes_and_times(names: list[bytes]) -> list[int]:
        return link.run(lambda pipe: [(pipe.strlen(name), pipe.pttl(name)) for name in names])

    for names in link.scan(f"{VERSION}:*:*:*"):
        values = sorted({name for name in names if not name.endswith((FOLLOWERS, SNAPSHOTS))})
        answers = sizes_and_times(values)
        for name, size, left in zip(values, answers[::2], answers[1::2], strict=True):
            _, store, tag, _ = name.decode("ascii", "replace").split(":", 3)
            found[store, tag] = found.get((store, tag), Holding(store, tag)).plus(size, left)
    return sorted(found.values(), key=lambda holding: -holding.bytes)
