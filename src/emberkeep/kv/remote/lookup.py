"""One prompt's questions to the shared server: which of its blocks are there, which are worth loading, what
follows the last whole one. What comes is entered into the store, in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from emberkeep.kv.disk.chunkfile import Damaged, Description, verified
from emberkeep.kv.lookups import BLOCK_TOKENS, Arrival, block_start
from emberkeep.kv.policy import CostModel, ReadCounters
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, ForgottenLog, RemoteLink
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import ROOT, Chunk, ChunkKey, Cursor, Made, Span, chunk_key, place_at
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT_BITS, SHARED, Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")


WORTH_ASKING = 16
"""Tokens of a prompt that are stored nowhere here, for the server to be asked."""
_SHORTEST_S, _LONGEST_S = 0.05, 30.0
"""So long a request waits for what was found, also on a busy machine, and while it is not known how long
evaluating takes."""


@dataclass(frozen=True, slots=True)
class LookupTools:
    link: RemoteLink
    owner: KvStore
    reader: BlockReader
    forgotten: ForgottenLog
    name: Callable[[Lineage, ChunkKey], bytes]
    enter: Callable[[int, Callable[[], Chunk | None]], Chunk | None]
    """Enters what a function inserts, if nobody was forgotten since a number of forgettings."""
    most_bytes: int
    """The most that comes for one prompt."""


class Lookup:
    """Used by one thread. Methods that ask block, and raise Unreachable and TimeoutError."""

    def __init__(
        self, tools: LookupTools, lineage: Lineage, tokens: TokenArray, arrival: Arrival, forgettings: int
    ) -> None:
        self._tools = tools
        self._owner = tools.owner
        self._lineage = lineage
        self._tokens = tokens
        self._arrival = arrival
        self._forgettings = forgettings
        self._lineages = _visible(lineage)
        self._here = self._owner.advance(self._owner.origin(lineage), tokens)
        """The end of what is stored here."""

    @cached_property
    def _blocks(self) -> dict[Lineage, list[Description]]:
        return {one: blocks_of(self._owner.fingerprint, one, self._tokens) for one in self._lineages}

    # ── state that can be cut by token ──

    def fetch_blocks(self) -> Cursor | None:
        """Whole blocks, as many as are there and worth it; returns their end if that was all of them."""
        if len(self._tokens) - self._here.position < WORTH_ASKING:
            return None
        path = self._path()
        chosen = self._worth_it(path)
        begin = place_at(self._here, block_start(self._here.position))
        end = self._enter_all(begin, chosen)
        return end if end.position == begin.position + len(path) * BLOCK_TOKENS else None

    def fetch_follower(self, end: Cursor) -> None:
        """Fetch what begins most like the rest of the prompt, of what is there after the last whole block."""
        known = self._owner.advance(end, self._tokens).position
        known = max(known, self._here.position)
        if len(self._tokens) - known < WORTH_ASKING:
            return
        above = _lineage_at(end)
        places = [(one, self._place(one, end.position)) for one in self._lineages if _may_hang(one, above)]
        rest = self._tokens[end.position :]
        listed = self._listed(places, FOLLOWERS)
        best = max(listed, key=lambda one: common_prefix(one[2], rest), default=None)
        if best is None:
            return
        lineage, place, tokens = best
        saves = end.position + common_prefix(tokens, rest) - known
        if saves >= WORTH_ASKING:
            self._enter_if_all(end, [(lineage, place.child(tokens))], saves)

    def _path(self) -> list[StoredBlock]:
        """What is there from the end of what is stored here, without a gap. One round trip for all of it."""
        begin = block_start(self._here.position)
        asked = [(one, block) for one in self._lineages for block in self._blocks[one] if block.start >= begin]
        names = [self._tools.name(one, block.key) for one, block in asked]
        entries, *sizes = self._tools.link.run(
            lambda pipe: [self._tools.forgotten.ask(pipe), *(pipe.strlen(name) for name in names)]
        )
        if not self._tools.forgotten.take(entries):
            return []  # what is there may be of someone who was forgotten
        there = {
            (one, block.start): StoredBlock(name, one, block, size)
            for (one, block), name, size in zip(asked, names, sizes, strict=True)
            if size
        }
        path: list[StoredBlock] = []
        above = _lineage_at(place_at(self._here, begin))
        for start in range(begin, len(self._tokens), BLOCK_TOKENS):
            options = (there[one, start] for one in self._lineages if (one, start) in there)
            found = next((one for one in options if _may_hang(one.lineage, above)), None)
            if found is None:
                break
            path.append(found)
            above = found.lineage
        return path

    def _worth_it(self, path: list[StoredBlock]) -> list[StoredBlock]:
        """The part that is faster to load than to evaluate, and for which there is room."""
        here = self._here.position
        costs = [(min(one.expected.start + BLOCK_TOKENS - here, BLOCK_TOKENS), one.size) for one in path]
        path = path[: self._owner.costs.worth_fetching(costs)]
        return path[: _fitting([found.size for found in path], self._tools.most_bytes)]

    # ── state that cannot ──

    def fetch_to_snapshot(self) -> None:
        """Everything up to the deepest snapshot that is worth it, or nothing."""
        known = self._owner.resumable(self._lineage, self._tokens)
        if len(self._tokens) - known < WORTH_ASKING:
            return
        path = self._path()
        reached = block_start(self._here.position) + len(path) * BLOCK_TOKENS
        positions = range(block_start(known), reached + 1, BLOCK_TOKENS)
        places = [(one, self._place(one, position)) for position in positions for one in self._lineages]
        ends = [
            (place.position + len(tokens), one, place, tokens)
            for one, place, tokens in self._listed(places, SNAPSHOTS)
            if np.array_equal(tokens, self._tokens[place.position : place.position + len(tokens)])
        ]
        end, one, place, tokens = max(ends, key=lambda each: each[0], default=(0, *places[0], self._tokens))
        if end - known < WORTH_ASKING:
            return
        wanted = [(found.lineage, found.expected) for found in path if found.expected.start < end]
        if end > max(reached, self._here.position):
            wanted.append((one, place.child(tokens)))
        if end <= self._here.position:
            wanted = []
        begin = place_at(self._here, block_start(self._here.position) if wanted else self._here.position)
        self._enter_if_all(begin, [*wanted, (one, place.snapshot(tokens))], end - known)

    # ── both ──

    def _place(self, lineage: Lineage, position: int) -> Place:
        blocks = self._blocks[lineage][: position // BLOCK_TOKENS]
        return place_after(self._owner.fingerprint, lineage, blocks)

    def _enter_if_all(self, begin: Cursor, wanted: Sequence[tuple[Lineage, Description]], saves: int) -> None:
        """Fetch and enter them if all are there, and together save more than they cost."""
        names = [self._tools.name(one, described.key) for one, described in wanted]
        sizes = self._tools.link.run(lambda pipe: [pipe.strlen(name) for name in names])
        is_worth_it = self._owner.costs.worth_fetching([(saves, sum(sizes))])
        if all(sizes) and is_worth_it and sum(sizes) <= self._tools.most_bytes:
            path = zip(names, wanted, sizes, strict=True)
            self._enter_all(begin, [StoredBlock(name, one, each, size) for name, (one, each), size in path])

    def _enter_all(self, begin: Cursor, path: Sequence[StoredBlock]) -> Cursor:
        """Fetch and enter them at `begin`, as far as they come in time; returns where that ends."""
        left = sum(found.size for found in path)
        # Who waits longer than evaluating takes has gained nothing.
        seconds = self._owner.costs.evaluate.seconds(len(self._tokens) - begin.position) or _LONGEST_S
        limit = monotonic() + max(seconds, _SHORTEST_S)
        self._arrival.give_up = min(limit, monotonic() + self._tools.reader.patience(left))
        cursor = begin
        for found, whole in self._tools.reader.read(path):
            chunk = self._tools.enter(self._forgettings, partial(self._insert, cursor, found, whole))
            now, left = monotonic(), left - found.size
            if chunk is None or now > self._arrival.give_up:
                break
            cursor = Cursor(chunk, len(chunk.tokens), found.lineage)
            self._arrival.moved_at = now
            self._arrival.give_up = min(limit, now + self._tools.reader.patience(left))
        return cursor

    def _insert(self, cursor: Cursor, found: StoredBlock, whole: Whole) -> Chunk | None:
        """None: there is no room for it."""
        described, payload = whole
        at = self._owner.origin(found.lineage) if cursor.position == 0 else cursor
        at = replace(at, lineage=found.lineage)
        if not len(described.tokens):
            return self._owner.insert_snapshot(place_at(at, described.start), payload, described.made)
        end = at.position + len(described.tokens)
        at = self._owner.insert(at, described.tokens, payload, described.sampled, fork=False, made=described.made)
        return at.chunk if at.position == end else None

    def _listed(
        self, places: Sequence[tuple[Lineage, Place]], kind: bytes
    ) -> list[tuple[Lineage, Place, TokenArray]]:
        """What is listed after these places. One round trip."""
        names = [self._tools.name(one, place.key) + kind for one, place in places]
        lists = self._tools.link.run(lambda pipe: [pipe.hvals(name) for name in names])
        return [
            (one, place, tokens)
            for (one, place), name, values in zip(places, names, lists, strict=True)
            for value in values
            if (tokens := self._tokens_in(name, value)) is not None
        ]

    def _tokens_in(self, name: bytes, value: bytes) -> TokenArray | None:
        try:
            data = self._tools.link.seal.open(name, value)
        except Damaged:
            return None
        return np.frombuffer(data, "<i4") if len(data) % 4 == 0 and len(data) <= 4 * BLOCK_TOKENS else None


def _visible(lineage: Lineage) -> list[Lineage]:
    """Lineages whose blocks a request may reuse; those on which more may build come first."""
    owners = dict.fromkeys([SHARED, lineage.owner])
    bits = dict.fromkeys([EXACT_BITS, lineage.bits])
    return [Lineage(owner, each) for each in bits for owner in owners]


def _lineage_at(cursor: Cursor) -> Lineage | None:
    """Returns that of what is there; None at the beginning of everything."""
    return None if cursor.chunk.is_root else cursor.chunk.lineage


def _may_hang(lineage: Lineage, above: Lineage | None) -> bool:
    """Whether a chunk of a lineage may build on one of another."""
    return above is None or lineage.sees(above)


def _fitting(sizes: Sequence[int], room: int) -> int:
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)


# ── blocks: tokens cut so that every host gives the same part the same name ──
#
#     position   0        128       256    300
#     host A     [block 0][block 1 ][tail ]          a turn ended at 300
#     host B     [chunk 0 ][0][1][chunk 2   ]        cut where its conversations parted
#
# A block begins at a multiple of its length, whatever happened on a host. Its key is that of a chunk whose parents
# are blocks too, all of the same lineage: it depends on the tokens from the beginning and on nothing else.

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
