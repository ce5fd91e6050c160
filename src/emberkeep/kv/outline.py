"""What is stored as a tree that fits a picture: the longest and the latest used runs, and all branches for which
there is no room together.

A node's id is the beginning of a chunk's key, with `.` and how many of its tokens are before the node unless it
begins with the chunk. `~` and a number stand for the branches that go on from there, without so many of the
longest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from emberkeep.kv.entries import Entry, nameless
from emberkeep.kv.runs import Bools, ChunkTable, Ints, Runs, gently
from emberkeep.types.cache import CacheTree, EntryEnd, TreeNode
from emberkeep.types.lineage import SHARED

_KEY_BYTES = 8
_NODE_ID = re.compile(r"(?:([0-9a-f]{16})(?:\.([0-9]{1,9}))?)?(?:~([0-9]{1,9}))?")
_FOR_LATEST = 8
"""Of so many nodes one is chosen for when it was used, the others for their length."""
_MOST_ENTRIES = 8
"""That are named of those that end in one node."""


def outline(runs: Runs, entries: Sequence[Entry], limit: int, at: str = "") -> CacheTree | None:
    """At most `limit` nodes for everything at and below the node `at` (empty: for all); None where there is no
    such node."""
    part = _find(runs, at)
    if part is None:
        return None
    nodes = _Nodes(part, _choose(part, limit))
    ends = _Ends(nodes, entries)
    told = tuple(nodes.told(number, ends) for number in range(len(nodes)))
    return CacheTree(
        nodes=told,
        tokens=sum(node.own_tokens for node in told),
        bytes=sum(node.bytes for node in told),
        chunks=sum(node.chunks for node in told),
    )


# ── which part of the tree ──


class _Part:
    """Some of all runs, in their order: with each of them everything below it."""

    def __init__(self, runs: Runs, where: Ints, above: str = "", skipped: int = 0) -> None:
        """Of branches, `above` is the id of the node from which they go on, and `skipped` how many longer ones it
        has."""
        self.runs = runs
        self.where = where
        self.above = above
        self.skipped = skipped
        self.size = runs.size[where]
        self.parent = self.number_of(runs.parent[where])
        self.tokens = runs.below(runs.tokens)[where]
        self.branches = np.bincount(self.parent[self.parent >= 0], minlength=len(where))

    def __len__(self) -> int:
        return len(self.where)

    def number_of(self, runs: Ints) -> Ints:
        """Which of the part a run is; -1: none."""
        if not len(self):
            return np.full(len(runs), -1)
        found = np.minimum(np.searchsorted(self.where, runs), len(self) - 1)
        return np.where(self.where[found] == runs, found, -1)

    def node_id(self, number: int) -> str:
        chunk, offset = self.runs.first(int(self.where[number]))
        key = chunk.key[:_KEY_BYTES].hex()
        return f"{key}.{offset}" if offset else key


def _find(runs: Runs, at: str) -> _Part | None:
    parsed = _NODE_ID.fullmatch(at)
    if parsed is None:
        return None
    key, offset, skipped = parsed.groups()
    run = runs.find(bytes.fromhex(key), int(offset or 0)) if key else -1
    if run is None:
        return None
    if skipped is None:
        return _Part(runs, np.arange(len(runs)) if run < 0 else np.arange(run, run + runs.size[run]))
    branches = np.flatnonzero(runs.parent == run)
    longest = branches[np.argsort(-runs.below(runs.tokens)[branches], kind="stable")]
    return _Part(runs, runs.with_all_below(longest[int(skipped) :]), at.partition("~")[0], int(skipped))


# ── which of its runs ──


def _choose(part: _Part, limit: int) -> Bools:
    """Runs that become nodes of their own: none without the one before it, and, with one node for the other
    branches after each, no more than `limit`."""
    order, count = _by_weight(part), min(limit, len(part))
    while True:
        chosen = np.zeros(len(part), np.bool_)
        chosen[order[:count]] = True
        excess = count + len(np.unique(part.parent[_left_out(part, chosen)])) - limit
        if excess <= 0 or count == 0:
            return chosen
        count -= (excess + 1) // 2  # one run less is at most two nodes less


def _by_weight(part: _Part) -> Ints:
    """The longest and the latest used first. A run is never after one below it: with everything below, it is as
    long and was used as late."""
    longest, latest = _ranks(-part.tokens), _ranks(-_latest_below(part))
    return np.argsort(np.minimum(longest, _FOR_LATEST * latest), kind="stable")


def _ranks(values: Ints) -> Ints:
    ranks = np.empty_like(values)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _latest_below(part: _Part) -> Ints:
    used, above = part.runs.used[part.where].tolist(), part.parent.tolist()
    for _, numbers in gently(range(len(used) - 1, -1, -1)):
        for number in numbers:
            parent = above[number]
            if parent >= 0 and used[parent] < used[number]:
                used[parent] = used[number]
    return np.array(used, np.int64)


def _left_out(part: _Part, chosen: Bools) -> Ints:
    """Runs that are not chosen though the one before them is, or there is none."""
    return np.flatnonzero(~chosen & ((part.parent < 0) | chosen[part.parent]))


# ── nodes ──


class _Nodes:
    """The chosen runs, and after them, for each place where others go on, all of those together."""

    def __init__(self, part: _Part, chosen: Bools) -> None:
        self.part = part
        shown, rest, heads = np.flatnonzero(chosen), np.flatnonzero(~chosen), _left_out(part, chosen)
        above, group = np.unique(part.parent[heads], return_inverse=True)
        by_length = np.lexsort((-part.tokens[heads], group))
        longest = heads[by_length[np.unique(group[by_length], return_index=True)[1]]]
        together = np.bincount(group, minlength=len(above))
        is_run = (together == 1) & (part.size[longest] == 1)
        self.run = np.concatenate([shown, longest])
        """Of several branches the longest."""
        self.branches = np.concatenate([np.zeros_like(shown), np.where(is_run, 0, together)])
        self.longer = np.concatenate([np.zeros_like(shown), _longer(part, shown, above, longest)])
        self.node_of = np.empty(len(part), np.int64)
        self.node_of[shown] = np.arange(len(shown))
        self.node_of[rest] = len(shown) + group[np.searchsorted(heads, rest, side="right") - 1]
        runs = part.runs
        sums = (runs.tokens, runs.hot, runs.warm, runs.bytes, runs.chunks, runs.pinned)
        self._sums = np.stack([self.add_up(column[part.where]) for column in sums], axis=1).tolist()
        self._ends, self._hits = self._most(runs.end[part.where]), self._most(runs.hits[part.where])

    def __len__(self) -> int:
        return len(self.run)

    def add_up(self, of_runs: Ints) -> Ints:
        summed = np.zeros(len(self), np.int64)
        np.add.at(summed, self.node_of, of_runs)
        return summed

    def _most(self, of_runs: Ints) -> list[int]:
        most = np.zeros(len(self), np.int64)
        np.maximum.at(most, self.node_of, of_runs)
        found: list[int] = most.tolist()
        return found

    def node_id(self, number: int) -> str:
        part, run = self.part, int(self.run[number])
        if self.branches[number] < 2:
            return part.node_id(run)
        above = int(part.parent[run])
        begins, skipped = (part.node_id(above), 0) if above >= 0 else (part.above, part.skipped)
        return f"{begins}~{skipped + self.longer[number]}"

    def told(self, number: int, ends: _Ends) -> TreeNode:
        part, run = self.part, int(self.run[number])
        branches, above = int(self.branches[number]), int(part.parent[run])
        tokens, hot, warm, size, chunks, pinned = self._sums[number]
        lineage = part.runs.first(int(part.where[run]))[0].lineage
        named, more = ends.of(number)
        return TreeNode(
            id=self.node_id(number),
            parent=part.node_id(above) if above >= 0 else None,
            start=int(part.runs.start[part.where[run]]),
            end=self._ends[number],
            branches=branches,
            below=0 if branches else int(part.branches[run]),
            own_tokens=tokens,
            tokens=tokens if branches else int(part.tokens[run]),
            hot_tokens=hot,
            warm_tokens=warm,
            bytes=size,
            chunks=chunks,
            hits=self._hits[number],
            is_pinned=pinned > 0,
            user=lineage.user,
            is_shared=lineage.owner == SHARED,
            is_exact=lineage.is_exact,
            entries=named,
            more_entries=more,
        )


def _longer(part: _Part, shown: Ints, above: Ints, longest: Ints) -> Ints:
    """How many of `shown` go on from the same place as each of `longest` and come before it by their length."""
    place = np.searchsorted(above, part.parent[shown])
    beside = (place < len(above)) & np.isin(part.parent[shown], above)
    run, other = shown[beside], longest[place[beside]]
    is_before = (part.tokens[run] > part.tokens[other]) | (
        (part.tokens[run] == part.tokens[other]) & (run < other)
    )
    return np.bincount(place[beside][is_before], minlength=len(above))


class _Ends:
    """Where entries end, by node."""

    def __init__(self, nodes: _Nodes, entries: Sequence[Entry]) -> None:
        self._nodes = nodes
        self._entries: list[Entry] = []
        self._is_latest: list[bool] = []
        part, table = nodes.part, nodes.part.runs.table
        self._chunk, used = self._read(table, entries)
        self._position = table.start[self._chunk] + used
        number = part.number_of(part.runs.run_at(self._chunk, used))
        inside = np.flatnonzero(number >= 0)
        node = nodes.node_of[number[inside]]
        order = np.lexsort((-self._position[inside], node))
        self._ends = inside[order]
        self._borders = np.searchsorted(node[order], np.arange(len(nodes) + 1)).tolist()

    def _read(self, table: ChunkTable, entries: Sequence[Entry]) -> tuple[Ints, Ints]:
        """The chunks in which they end, and how many tokens of each are used."""
        chunks: list[int] = []
        used: list[int] = []
        lengths: list[int] = table.length.tolist()
        for _, part in gently(entries):
            for entry in part:
                is_latest = True
                for tail in reversed(entry.tails):
                    chunk = table.by_key.get(tail.chunk)
                    if chunk is not None and 0 < tail.used <= lengths[chunk]:
                        chunks.append(chunk)
                        used.append(tail.used)
                        self._entries.append(entry)
                        self._is_latest.append(is_latest)
                        is_latest = False
        return np.array(chunks, np.int64), np.array(used, np.int64)

    def of(self, number: int) -> tuple[tuple[EntryEnd, ...], int]:
        """Those that end in a node, the furthest first, and how many more there are. Of several branches none are
        named."""
        ends = self._ends[self._borders[number] : self._borders[number + 1]].tolist()
        if self._nodes.branches[number]:
            return (), len(ends)
        named = [self._told(end) for end in ends[:_MOST_ENTRIES]]
        run = int(self._nodes.part.where[self._nodes.run[number]])
        last = self._nodes.part.runs.last_chunk(run)
        if last is not None and last not in self._chunk[ends]:
            chunk = self._nodes.part.runs.table.chunks[last]
            named.insert(0, _end(nameless(chunk), chunk.end, is_latest=True))
        return tuple(named), max(len(ends) - _MOST_ENTRIES, 0)

    def _told(self, end: int) -> EntryEnd:
        return _end(self._entries[end], int(self._position[end]), is_latest=self._is_latest[end])


def _end(entry: Entry, position: int, *, is_latest: bool) -> EntryEnd:
    return EntryEnd(entry.id, entry.label.kind, entry.label.head, position, is_latest, entry.is_pinned)
