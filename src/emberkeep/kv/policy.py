"""What is kept, where and for how long: what a chunk is worth, what loading costs, how much may be written, the
store's own time; and the chunks in RAM and in files that no lookup can reach.

No locks and no I/O: `KvStore` calls it with its lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from heapq import heapify, heappop, heappush
from math import exp, log, log2
from typing import NamedTuple

from emberkeep.kv.tree import Chunk, ChunkKey, Made, Segment, Span
from emberkeep.token_arrays import TokenArray
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass

CHUNK_TOKENS = 128
LOW_WATER = 0.99
"""Eviction goes down to this share of a budget: a hundred chunks are looked at for each that comes, in 0.1 ms."""

Worth = Callable[[Chunk, int, float], float]
"""A chunk, the logical clock and the store's rhythm to what it is worth."""


# ── worth: one function that every eviction asks ──

_PATIENCE = 4
"""Rhythms after which a chunk that was not asked for is worth half of what it was."""
_MEMORY = 1024
"""Reused chunks over which the rhythm is averaged: what is older fades."""


class Rhythm:
    """How many lookups pass until a chunk is asked for again: one where a person works alone, hundreds where many
    conversations take turns. A mean of logarithms, so that what comes back after a week changes little."""

    def __init__(self) -> None:
        self._log = log(8)
        self._weight = 16

    @property
    def lookups(self) -> float:
        return exp(self._log)

    def observe(self, lookups: int) -> None:
        """A chunk was asked for so many lookups after the last time."""
        self._weight = min(self._weight + 1, _MEMORY)
        self._log += (log(max(lookups, 1)) - self._log) / self._weight


def worth(chunk: Chunk, now: int, rhythm: float) -> float:
    """Tokens of evaluation that a byte is likely to save per lookup, up to a constant.

    The chance that a chunk is asked for fades with age, measured in the store's own `rhythm`. Having been asked
    for makes up for age, by one rhythm each time the number doubles: most chunks are never asked for, and of those
    that were, twice as many are again. A chunk that had to be computed again counts as asked for; otherwise
    nothing would ever be kept that comes back later than the store can wait. Depth has no say: deep tokens cost
    more, but to prefer them gives up more than that gains.

    `now` and `last_used` are ticks of the store's logical clock: a clock that jumps changes nothing.
    """
    asked = chunk.hits + chunk.came_back
    age = max(now - chunk.last_used, 0)
    chance = (_PATIENCE + log2(1 + asked)) / (age + _PATIENCE * rhythm)
    return chance * chunk.saved_tokens / max(chunk.bytes, 1)


def worth_writing(chunk: Chunk, spent_today: int, budget: int | None) -> bool:
    """Whether the SSD should wear for it: not a second time for what was never reused, and over the daily budget
    only for what was."""
    is_proven = chunk.hits > 0
    within = budget is None or spent_today + chunk.bytes <= budget
    return is_proven or (within and not chunk.was_written)


# ── load or recompute: both costs are measured while serving, not assumed ──


@dataclass(slots=True)
class Rate:
    """A running average of work per second; None until something was measured."""

    value: float | None = None

    def measure(self, amount: float, seconds: float) -> None:
        if seconds <= 0:
            return
        sample = amount / seconds
        self.value = sample if self.value is None else 0.8 * self.value + 0.2 * sample

    def seconds(self, amount: float) -> float:
        """Predicted time for `amount`; 0 while nothing is known."""
        return amount / self.value if self.value else 0.0


@dataclass(slots=True)
class CostModel:
    """Measured by the scheduler (evaluate, import) and the store (read)."""

    evaluate: Rate = field(default_factory=Rate)
    """Tokens per second of prompt evaluation."""
    import_: Rate = field(default_factory=Rate)
    """Bytes per second from RAM into the engine."""
    read: Rate = field(default_factory=Rate)
    """Bytes per second from disk into RAM."""
    fetch: Rate = field(default_factory=Rate)
    """Bytes per second from the remote tier into RAM."""

    def json(self) -> dict[str, float | None]:
        names = ("evaluate_tokens", "import_bytes", "read_bytes", "fetch_bytes")
        rates = (self.evaluate, self.import_, self.read, self.fetch)
        return {f"{name}_per_s": rate.value for name, rate in zip(names, rates, strict=True)}

    def worth_loading(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The leading segments whose loading is predicted to be faster than evaluating their tokens.

        Only a suffix can be left to recomputation, because evaluation needs everything before it.
        """
        if self.evaluate.value is None:
            return segments
        costs = ((segment.end - segment.start, self._load_seconds(segment.chunk)) for segment in segments)
        return segments[: self._leading(costs)]

    def worth_fetching(self, blocks: Sequence[tuple[int, int]]) -> int:
        """How many of the leading (tokens that it saves, bytes) are predicted to come from the remote tier faster
        than they are evaluated."""
        if self.evaluate.value is None:
            return len(blocks)
        costs = ((tokens, self.fetch.seconds(size) + self.import_.seconds(size)) for tokens, size in blocks)
        return self._leading(costs)

    def _leading(self, costs: Iterable[tuple[int, float]]) -> int:
        """How many of (tokens, seconds) save the most time together."""
        best, best_saving, saving = 0, 0.0, 0.0
        for count, (tokens, seconds) in enumerate(costs, 1):
            saving += self.evaluate.seconds(tokens) - seconds
            if saving >= best_saving:
                best, best_saving = count, saving
        return best

    def is_worth_loading(self, chunks: Iterable[Chunk], tokens: int) -> bool:
        """Whether loading all of `chunks` is predicted to be faster than evaluating `tokens`."""
        if self.evaluate.value is None:
            return True
        return sum(self._load_seconds(chunk) for chunk in chunks) <= self.evaluate.seconds(tokens)

    def _load_seconds(self, chunk: Chunk) -> float:
        read = 0.0 if chunk.payload is not None else self.read.seconds(chunk.bytes)
        return read + self.import_.seconds(chunk.bytes)


# ── how much may be written to the SSD in a day ──

_DAY_S = 86_400


class WriteBudget:
    """Bytes written today (UTC). `limit` None: as many as there is room for."""

    def __init__(self, limit: int | None, day: int = 0, spent: int = 0) -> None:
        self.limit = limit
        self.saved = day, spent
        """For the constructor of the next process."""

    @property
    def spent(self) -> int:
        day, spent = self.saved
        return spent if day == int(time.time() // _DAY_S) else 0

    def spend(self, count: int) -> None:
        self.saved = int(time.time() // _DAY_S), self.spent + count


# ── the store's own time ──


@dataclass(frozen=True, slots=True)
class Saved:
    """What the clock said when it was last written down, and the wall clock beside it."""

    seconds: float
    wall: float


def _passing() -> float:
    """Seconds that also pass while the machine sleeps, where the system tells them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def steady_wall() -> Callable[[], float]:
    """The time of day, going on evenly from now: no jump of the machine's clock changes it."""
    ahead = time.time() - _passing()
    return lambda: ahead + _passing()


class StoreClock:
    def __init__(
        self,
        saved: Saved | None = None,
        *,
        monotonic: Callable[[], float] = _passing,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        before = saved or Saved(0.0, wall())
        self._offset = before.seconds + max(wall() - before.wall, 0.0) - monotonic()

    def now(self) -> float:
        return self._offset + self._monotonic()

    def saved(self) -> Saved:
        return Saved(self.now(), self._wall())


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long things are kept, and where."""

    ttl: Mapping[Ttl, float] = field(
        default_factory=lambda: {Ttl.SHORT: 300.0, Ttl.LONG: 3600.0, Ttl.EXTENDED: 86_400.0}
    )
    """Seconds after the last use."""
    cold_after: int = 4
    """Turns of its conversation after which a branch that was left alone leaves RAM."""
    writes_per_day: int | None = None
    """Bytes."""
    worth: Worth = worth
    """What goes first when room is short."""
    expire: bool = False
    """What has outlived its TTL is deleted (`kv/expiry.py`); else it goes first when room is short."""
    clock: Callable[[Saved | None], StoreClock] = StoreClock
    """Makes the clock of a store, from what an earlier process has saved of it."""
    chunk_tokens: int = CHUNK_TOKENS
    """The size of what is stored from now on; what is there already is found whatever its size."""


# ── where chunks are besides the tree ──


class ChunkRow(NamedTuple):
    """A chunk on disk. A tuple, because opening a store makes a hundred thousand."""

    seq: int
    key: ChunkKey
    namespace: str
    parent: ChunkKey
    take: int
    start: int
    tokens: TokenArray
    sampled: tuple[Span, ...]
    made: Made
    bytes: int
    last_used: int
    hits: int
    expires: float


@dataclass(slots=True)
class Tally:
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, chunk: Chunk, size: int) -> None:
        self.chunks += 1
        self.tokens += len(chunk.tokens)
        self.bytes += size

    def take(self, chunk: Chunk, size: int) -> None:
        self.chunks -= 1
        self.tokens -= len(chunk.tokens)
        self.bytes -= size


class RamTier:
    """Which chunks have their payload in RAM."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tally = Tally()
        self._chunks: dict[ChunkKey, Chunk] = {}

    def put(self, chunk: Chunk, payload: memoryview) -> None:
        chunk.payload = payload
        self._chunks[chunk.key] = chunk
        self.tally.add(chunk, len(payload))

    def free(self, chunk: Chunk) -> None:
        """Give back the RAM of a chunk, if it takes any."""
        if self._chunks.pop(chunk.key, None) is not None and chunk.payload is not None:
            self.tally.take(chunk, len(chunk.payload))
        chunk.payload = None

    def shrink(self, worth: Callable[[Chunk], float], drop: Callable[[Chunk], object]) -> int:
        """Come under the budget, down to the low-water mark; returns how many chunks left RAM. What is also on
        disk goes first. Of what exists nowhere else only leaves go, through `drop`, which takes them out."""
        count = 0
        if self.tally.bytes > self.budget:
            for chunk in in_turn(self._chunks.values(), _may_leave, lambda one: (not one.on_disk, worth(one))):
                if self.tally.bytes <= self.budget * LOW_WATER:
                    break
                count += 1
                if chunk.on_disk:
                    self.free(chunk)
                else:
                    drop(chunk)
        return count

    def free_expired(self, now: float) -> int:
        """Give back the RAM of what is on disk and not wanted any more; returns how many chunks left it."""
        idle = [
            chunk for chunk in self._chunks.values() if chunk.on_disk and chunk.expires <= now and not chunk.pins
        ]
        for chunk in idle:
            self.free(chunk)
        return len(idle)

    def free_branch(self, end: Chunk | None, tick: int) -> int:
        """Give back the RAM of the branch that ends in `end`, as far as no lookup has used it since `tick`;
        returns how many chunks left it."""
        count = 0
        chunk = end
        while chunk and not chunk.is_root and chunk.last_used <= tick and not chunk.pins:
            if chunk.on_disk and chunk.payload is not None:
                self.free(chunk)
                count += 1
            chunk = chunk.parent
        return count


def _may_leave(chunk: Chunk) -> bool:
    """RAM, without anything that only it leads to being lost."""
    # Said here and not asked of the chunk: every chunk in RAM is looked at whenever room is made.
    is_needed = not chunk.on_disk and (chunk.branches or chunk.is_pinned)
    return chunk.payload is not None and not chunk.pins and not is_needed


def in_turn(
    chunks: Iterable[Chunk], may_go: Callable[[Chunk], bool], rank: Callable[[Chunk], tuple[bool, float]]
) -> Iterator[Chunk]:
    """Yields those that may go, the lowest first. A parent that may go when its last child has is weighed with the
    rest: otherwise the end of every conversation would go before the second chunk of any."""
    heap = [(rank(chunk), chunk.key, chunk) for chunk in chunks if may_go(chunk)]
    heapify(heap)
    while heap:
        chunk = heappop(heap)[-1]
        parent = chunk.parent
        was_in = parent is None or may_go(parent)
        yield chunk
        if parent is not None and not was_in and may_go(parent):
            heappush(heap, (rank(parent), parent.key, parent))


# ── files that no lookup can reach ──


class Orphans:
    """Files on disk by the parent without which no lookup can reach them. It may well be computed again."""

    def __init__(self) -> None:
        self.bytes = 0
        self._below: dict[ChunkKey, dict[ChunkKey, ChunkRow]] = {}

    def __iter__(self) -> Iterator[ChunkRow]:
        return (row for rows in self._below.values() for row in rows.values())

    def below(self, chunks: Container[ChunkKey]) -> list[ChunkRow]:
        """Returns those whose parent is among `chunks`."""
        return [row for parent, rows in self._below.items() if parent in chunks for row in rows.values()]

    def add(self, row: ChunkRow) -> None:
        rows = self._below.setdefault(row.parent, {})
        if row.key not in rows:
            rows[row.key] = row
            self.bytes += row.bytes

    def take(self, parent: ChunkKey, key: ChunkKey) -> ChunkRow | None:
        """Returns one that waited for its parent, if it did; it waits no longer."""
        rows = self._below.get(parent, {})
        row = rows.pop(key, None)
        if row is not None:
            self.bytes -= row.bytes
            if not rows:
                del self._below[parent]
        return row

    def take_all(self, parent: ChunkKey) -> list[ChunkRow]:
        """Returns those that waited for it, which wait no longer."""
        rows = self._below.pop(parent, {})
        self.bytes -= sum(row.bytes for row in rows.values())
        return list(rows.values())

    def drop(self, missing: Container[ChunkKey]) -> None:
        """Their files are not there either."""
        for row in [row for row in self if row.key in missing]:
            self.take(row.parent, row.key)


# ── what the store has done ──


@dataclass(slots=True)
class ReadCounters:
    """What was brought into RAM, and what became of the rest."""

    read_chunks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged_chunks: int = 0
    vanished_chunks: int = 0
    unreadable_chunks: int = 0
    """Reads that failed in a way that may pass."""

    def reads(self) -> dict[str, float]:
        return {each.name: round(getattr(self, each.name), 6) for each in fields(ReadCounters)}


@dataclass(slots=True)
class StoreCounters(ReadCounters):
    lookups: int = 0
    inserted_chunks: int = 0
    import_seconds: float = 0.0
    """From RAM into the engine."""
    warm_evictions: int = 0
    cooled_by_turns: int = 0
    cooled_when_idle: int = 0
    cold_evictions: int = 0
    expired_evictions: int = 0
    removed_chunks: int = 0

    def evictions(self) -> dict[str, dict[str, int]]:
        warm = {"pressure": self.warm_evictions, "turns": self.cooled_by_turns, "idle": self.cooled_when_idle}
        cold = {"budget": self.cold_evictions, "expired": self.expired_evictions, "removed": self.removed_chunks}
        return {"warm": warm, "cold": cold}
