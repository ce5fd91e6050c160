"""trace: recorded requests against a store that holds a small part of them. How much is found again?

The store's own ledger matches, adds and evicts; only the bytes are missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.trace_file import BLOCK, Visit, read_trace
from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.workspace import Workspace
from emberkeep.kv.disk.tier import evict
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.tree import Chunk, ChunkKey, path_to
from emberkeep.types.lineage import EXACT

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class TracePlan:
    trace: tuple[Path, ...]
    percents: tuple[int, ...] = (1, 3, 10, 30)
    """How many of the blocks that are different the store holds."""
    requests: int | None = None
    """From the beginning; None: all of them."""

    def quick(self) -> TracePlan:
        return replace(self, percents=(3,), requests=500)


async def run(workspace: Workspace, plan: TracePlan) -> BenchResult:
    traces = [(path.stem, read_trace(path)[: plan.requests]) for path in plan.trace]
    return BenchResult(
        "trace",
        tuple(_table(workspace, plan, name, visits) for name, visits in traces),
        (
            "Share of all prompt tokens that is found again; the store's size is a share of the different blocks.",
            "LRU: the better of two, by block and by leaf of the prefix tree. Belady: knows what comes.",
        ),
    )


def _table(workspace: Workspace, plan: TracePlan, name: str, visits: Sequence[Visit]) -> Table:
    different = len({block for visit in visits for block in visit.blocks})
    rows = []
    for percent in plan.percents:
        workspace.say(f"{name}, {percent}% of {different:,} blocks")
        rows.append(_row(percent, visits, max(different * percent // 100, 1)))
    return Table(name, tuple(rows))


def _row(percent: int, visits: Sequence[Visit], capacity: int) -> Row:
    total = sum(visit.tokens for visit in visits)
    lru = max(found_by_lru(visits, capacity, leaf_first=leaf_first) for leaf_first in (False, True))
    ours, best = found_by_the_store(visits, capacity), found_by_belady(visits, capacity)
    shares = {
        who: series([100 * found / total], "%") for who, found in (("LRU", lru), ("ours", ours), ("Belady", best))
    }
    compared = {"ours / LRU": ratios(shares["ours"], shares["LRU"])} if lru else {}
    return Row(f"{percent}%", {"blocks": capacity, **shares, **compared})


# ── the store ──


def found_by_the_store(visits: Sequence[Visit], capacity: int) -> int:
    """Tokens that the store's ledger finds when it holds no more than `capacity` blocks after a request."""
    ledger = Ledger()
    return sum(_served(ledger, visit, capacity) for visit in visits)


def _served(ledger: Ledger, visit: Visit, capacity: int) -> int:
    ledger.tick += 1
    tokens = np.repeat(np.array(visit.blocks, np.int32), BLOCK)[: visit.tokens]
    place = ledger.tree.deepest(ledger.tree.origin(EXACT), tokens)
    for segment in path_to(place):
        ledger.use(segment.chunk)
    chunk, take = place.chunk, place.used
    for begin in range(place.position, visit.tokens, BLOCK):
        key = ChunkKey(visit.blocks[begin // BLOCK].to_bytes(8))
        chunk = Chunk(key=key, parent=chunk, take=take, tokens=tokens[begin : begin + BLOCK], bytes=1)
        take = len(chunk.tokens)
        ledger.insert(chunk, memoryview(b""))
        chunk.expires = inf
        ledger.enter_file(chunk, 1)
    if ledger.disk.chunks > capacity:
        evict(ledger, capacity + ledger.to_remove_bytes)  # whose files are gone at once
    return place.position


# ── others ──


def found_by_lru(visits: Sequence[Visit], capacity: int, *, leaf_first: bool) -> int:
    """With `leaf_first` a use makes the beginning of a prompt the youngest, so that its end goes first."""
    held: OrderedDict[int, None] = OrderedDict()
    found = 0
    for visit in visits:
        found += _found(visit, held.keys())
        for block in reversed(visit.blocks) if leaf_first else visit.blocks:
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return found


def found_by_belady(visits: Sequence[Visit], capacity: int) -> int:
    """What is needed last goes first: no policy can do better."""
    held: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []
    found = 0
    for visit, next_uses in zip(visits, _next_uses(visits), strict=True):
        found += _found(visit, held.keys())
        for depth, (block, use) in enumerate(zip(visit.blocks, next_uses, strict=True)):
            held[block] = use
            heappush(latest, (-use, -depth, block))
        while len(held) > capacity:
            use, _, block = heappop(latest)
            if held.get(block) == -use:
                del held[block]
    return found


def _next_uses(visits: Sequence[Visit]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it."""
    coming: dict[int, int] = {}
    uses = []
    for number in range(len(visits) - 1, -1, -1):
        blocks = visits[number].blocks
        uses.append([coming.get(block, _NEVER) for block in blocks])
        coming.update(dict.fromkeys(blocks, number))
    return uses[::-1]


def _found(visit: Visit, held: Set[int]) -> int:
    blocks = next((i for i, block in enumerate(visit.blocks) if block not in held), len(visit.blocks))
    return visit.covered(blocks)
