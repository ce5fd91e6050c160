"""What is stored as a tree that fits a picture: the longest and the latest used runs, and all branches for which
there is no room together.

A node's id is the beginning of a chunk's key, with `.` and how many of its tokens are before the node unless it
begins with the chunk. `~` and a number stand for the branches that go on from there, without so many of the
longest.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from time import sleep
from typing import TypeVar

from emberkeep.kv.entries import Entry, nameless
from emberkeep.kv.tree import Chunk, Cursor, path_to
from emberkeep.types.cache import CacheTree, EntryEnd, TreeNode
from emberkeep.types.lineage import SHARED
from emberkeep.values import dataclass

T = TypeVar("T")


_AT_ONCE = 1000
_PAUSE_S = 1e-4
"""A wait of no time would often give the interpreter to nobody."""


def gently(items: Sequence[T]) -> Iterator[T]:
    """One after the other, with room for other threads after every thousand."""
    for number, item in enumerate(items):
        if number % _AT_ONCE == 0:
            sleep(_PAUSE_S)
        yield item


@dataclass(slots=True, eq=False)
class TokenRun:
    """Tokens that only follow each other."""

    number: int
    """Runs are numbered so that each comes after the one it goes on from."""
    parent: TokenRun | None
    first: Chunk
    offset: int
    """How many tokens of the first chunk are before the run."""
    last: Chunk
    ends_whole: bool = False
    """It ends with a chunk in which nothing else begins."""
    children: list[TokenRun] = field(default_factory=list)
    tokens: int = 0
    hot: int = 0
    warm: int = 0
    bytes: int = 0
    chunks: int = 0
    hits: int = 0
    used: int = 0
    is_pinned: bool = False
    tokens_below: int = 0
    """It has so many with everything that goes on from it."""
    used_below: int = 0

    @property
    def start(self) -> int:
        return self.first.start + self.offset

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def add(self, chunk: Chunk, begin: int, end: int, hot: int) -> None:
        """The tokens [begin, end) of a chunk, the first `hot` tokens of which are in the engine."""
        length, size, tokens = len(chunk.tokens), chunk.bytes, end - begin
        hot = min(max(hot - begin, 0), tokens) if hot else 0
        self.last, self.ends_whole = chunk, tokens == length
        self.tokens += tokens
        self.hot += hot
        self.warm += tokens - hot if chunk.payload is not None else 0
        self.bytes += size * end // length - size * begin // length
        self.chunks += begin == 0
        self.hits, self.used = max(self.hits, chunk.hits), max(self.used, chunk.last_used)
        self.is_pinned |= chunk.is_pinned


class Runs:
    def __init__(self, chunks: Sequence[Chunk], resident: Iterable[tuple[Cursor, int]] = ()) -> None:
        """`chunks` are in the order in which they were stored, so that parents come before their children;
        `resident`: places whose state up to a length is in the engine."""
        self.by_key = {chunk.key: chunk for chunk in chunks}
        self.runs: list[TokenRun] = []
        self._ends: dict[int, list[int]] = {}
        """The ends of the parts into which a chunk is cut, by its identity."""
        self._parts: dict[int, list[TokenRun]] = {}
        """The runs of these."""
        self._cut([chunk for chunk in gently(chunks) if len(chunk.tokens)], _hot_tokens(resident))
        for chunk in gently(chunks):
            if not chunk.is_snapshot:
                continue
            above, take = _goes_on_from(chunk)
            if above is not None and (run := self.run_at(above, take)):
                run.bytes += chunk.bytes
                run.chunks += 1
        for run in self.runs:
            run.tokens_below, run.used_below = run.tokens, run.used
        for run in gently(self.runs[::-1]):
            if run.parent is not None:
                run.parent.tokens_below += run.tokens_below
                run.parent.used_below = max(run.parent.used_below, run.used_below)

    def __len__(self) -> int:
        return len(self.runs)

    def run_at(self, chunk: Chunk, used: int) -> TokenRun | None:
        """The run that has the last of the first `used` tokens of a chunk; None for a chunk that is not there."""
        ends = self._ends.get(id(chunk))
        return self._parts[id(chunk)][bisect_left(ends, used)] if ends else None

    def find(self, key: bytes, offset: int) -> TokenRun | None:
        """The run that has the token after the first `offset` of the chunk whose key begins so."""
        chunk = next((chunk for known, chunk in self.by_key.items() if known.startswith(key)), None)
        return self.run_at(chunk, offset + 1) if chunk and offset < len(chunk.tokens) else None

    def _cut(self, texts: Sequence[Chunk], hot: dict[int, int]) -> None:
        self._ends = {id(chunk): [len(chunk.tokens)] for chunk in texts}
        places = [_goes_on_from(chunk) for chunk in gently(texts)]
        branches = Counter((id(above), take) for above, take in places)
        for identity, take in branches:
            if (ends := self._ends.get(identity)) and take < ends[-1]:
                insort(ends, take)
                branches[identity, take] += 1  # the chunk itself goes on there
        for chunk, (above, take) in zip(gently(texts), places, strict=True):
            ends = self._ends[id(chunk)]
            run = self.run_at(above, take) if above is not None and take else None
            follows = run is not None and branches[id(above), take] == 1 and chunk.lineage == run.last.lineage
            parts = self._parts[id(chunk)] = []
            for begin, end in pairwise([0, *ends]):
                if run is None or begin or not follows:
                    run = self._new(run, chunk, begin)
                run.add(chunk, begin, end, hot.get(id(chunk), 0))
                parts.append(run)

    def _new(self, parent: TokenRun | None, chunk: Chunk, offset: int) -> TokenRun:
        run = TokenRun(len(self.runs), parent, chunk, offset, chunk)
        self.runs.append(run)
        if parent is not None:
            parent.children.append(run)
        return run


def _goes_on_from(chunk: Chunk) -> tuple[Chunk | None, int]:
    """What is before a chunk, and how many tokens of it: what uses none of its parent goes on from before that."""
    above, take = chunk.parent, chunk.take
    while above is not None and take == 0:
        take, above = above.take, above.parent
    return above, take


def _hot_tokens(resident: Iterable[tuple[Cursor, int]]) -> dict[int, int]:
    """How many of the first tokens of each chunk are in the engine, by the chunk's identity."""
    hot: dict[int, int] = {}
    for cursor, length in resident:
        for segment in path_to(cursor):
            tokens = min(segment.end, length) - segment.start
            hot[id(segment.chunk)] = max(hot.get(id(segment.chunk), 0), tokens)
    return hot


_KEY_BYTES = 8
_NODE_ID = re.compile(r"(?:([0-9a-f]{16})(?:\.([0-9]{1,9}))?)?(?:~([0-9]{1,9}))?")
_FOR_LATEST = 8
"""One of so many nodes is chosen for when it was used, the others for their length."""
_MOST_ENTRIES = 8
"""So many are named of those that end in one node."""


def outline(runs: Runs, entries: Sequence[Entry], limit: int, at: str = "") -> CacheTree | None:
    """At most `limit` nodes for everything at and below the node `at` (empty: for all); None where there is no
    such node."""
    part = _find(runs, at)
    if part is None:
        return None
    nodes = _nodes(part, _choose(part, limit))
    node_of = {run: node for node in nodes for run in node.runs}
    for end in _ends(runs, entries):
        if node := node_of.get(end.run):
            node.ends.append(end)
    shown = tuple(_shown(part, node) for node in nodes)
    return CacheTree(
        nodes=shown,
        tokens=sum(node.own_tokens for node in shown),
        bytes=sum(node.bytes for node in shown),
        chunks=sum(node.chunks for node in shown),
    )


# ── which part of the tree ──


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of all runs, by number: with each of them everything below it."""

    heads: Sequence[TokenRun]
    """Those that go on from none of the part."""
    runs: Sequence[TokenRun]
    above: str = ""
    """The id of the node from which the heads go on, where they are some of its branches."""
    skipped: int = 0
    """How many longer ones it has."""

    def branches(self, run: TokenRun | None) -> Sequence[TokenRun]:
        return run.children if run is not None else self.heads


def _find(runs: Runs, at: str) -> _Part | None:
    parsed = _NODE_ID.fullmatch(at)
    if parsed is None:
        return None
    key, offset, skipped = parsed.groups()
    run = runs.find(bytes.fromhex(key), int(offset or 0)) if key else None
    if key and run is None:
        return None
    beginnings = [run for run in runs.runs if run.parent is None]
    if skipped is None:
        heads = [run] if run else beginnings
        return _Part(heads, _with_all_below(heads))
    heads = _longest_first(run.children if run else beginnings)[int(skipped) :]
    return _Part(heads, _with_all_below(heads), at.partition("~")[0], int(skipped))


def _with_all_below(heads: Sequence[TokenRun]) -> list[TokenRun]:
    found = list(heads)
    for run in found:  # grows
        found += run.children
    return sorted(found, key=lambda run: run.number)


def _longest_first(runs: Sequence[TokenRun]) -> list[TokenRun]:
    return sorted(runs, key=lambda run: (-run.tokens_below, run.number))


# ── which of its runs ──


def _choose(part: _Part, limit: int) -> set[TokenRun]:
    """Runs that become nodes of their own: none without the one before it, and, with one node for the other
    branches after each, no more than `limit`."""
    order = _by_weight(part)
    left_out: dict[TokenRun | None, int] = {None: len(part.heads)}
    chosen, places = 0, int(bool(order))
    for count, run in enumerate(order[:limit], 1):
        above = run.parent if run.parent in left_out else None
        left_out[above] -= 1
        left_out[run] = len(run.children)
        places += bool(run.children) - (left_out[above] == 0)
        if count + places <= limit:
            chosen = count
    return set(order[:chosen])


def _by_weight(part: _Part) -> list[TokenRun]:
    """The longest and the latest used first. A run is never after one below it: with everything below, it is as
    long and was used as late."""
    longest = sorted(part.runs, key=lambda run: -run.tokens_below)
    latest = sorted(part.runs, key=lambda run: -run.used_below)
    rank = {run: place for place, run in enumerate(longest)}
    for place, run in enumerate(latest):
        rank[run] = min(rank[run], _FOR_LATEST * place)
    return sorted(part.runs, key=lambda run: rank[run])


# ── nodes ──


@dataclass(slots=True, eq=False)
class _Node:
    """A run, or the branches together that go on from one and have no room."""

    run: TokenRun
    """The longest, where there are several branches."""
    above: TokenRun | None
    runs: list[TokenRun]
    branches: int = 0
    longer: int = 0
    """How many branches from the same place have nodes of their own and come before it by their length."""
    ends: list[_End] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _End:
    run: TokenRun
    chunk: Chunk
    shown: EntryEnd


def _nodes(part: _Part, chosen: set[TokenRun]) -> list[_Node]:
    """The chosen runs by number, and after them, for each place where others go on, all of those together."""
    inside, beyond = set(part.heads), defaultdict[TokenRun, list[TokenRun]](list)
    shown = [_Node(run, None if run in inside else run.parent, [run]) for run in part.runs if run in chosen]
    head_of: dict[TokenRun, TokenRun] = {}
    for run in part.runs:
        if run not in chosen:
            is_head = run in inside or run.parent in chosen
            head = run if is_head or run.parent is None else head_of[run.parent]
            head_of[run] = head
            beyond[head].append(run)
    for above in (None, *(node.run for node in shown)):
        heads = [run for run in part.branches(above) if run not in chosen]
        if heads:
            shown.append(_together(part, above, heads, [run for head in heads for run in beyond[head]], chosen))
    return shown


def _together(
    part: _Part, above: TokenRun | None, heads: Sequence[TokenRun], runs: list[TokenRun], chosen: set[TokenRun]
) -> _Node:
    longest = _longest_first(heads)[0]
    if len(heads) == 1 and not longest.children:
        return _Node(longest, above, runs)
    before = _longest_first([run for run in part.branches(above) if run in chosen or run is longest])
    return _Node(longest, above, runs, len(heads), before.index(longest))


def _run_id(run: TokenRun) -> str:
    key = run.first.key[:_KEY_BYTES].hex()
    return f"{key}.{run.offset}" if run.offset else key


def _node_id(part: _Part, node: _Node) -> str:
    if node.branches < 2:
        return _run_id(node.run)
    if node.above is not None:
        return f"{_run_id(node.above)}~{node.longer}"
    return f"{part.above}~{part.skipped + node.longer}"


def _shown(part: _Part, node: _Node) -> TreeNode:
    run, runs, lineage = node.run, node.runs, node.run.first.lineage
    tokens = sum(each.tokens for each in runs)
    named, more = _named(node)
    return TreeNode(
        id=_node_id(part, node),
        parent=_run_id(node.above) if node.above else None,
        start=run.start,
        end=max(each.end for each in runs),
        branches=node.branches,
        below=0 if node.branches else len(run.children),
        own_tokens=tokens,
        tokens=tokens if node.branches else run.tokens_below,
        hot_tokens=sum(each.hot for each in runs),
        warm_tokens=sum(each.warm for each in runs),
        bytes=sum(each.bytes for each in runs),
        chunks=sum(each.chunks for each in runs),
        hits=max(each.hits for each in runs),
        is_pinned=any(each.is_pinned for each in runs),
        user=lineage.user,
        is_shared=lineage.owner == SHARED,
        is_exact=lineage.is_exact,
        entries=named,
        more_entries=more,
    )


# ── what ends in them ──


def _ends(runs: Runs, entries: Sequence[Entry]) -> Iterator[_End]:
    for entry in gently(entries):
        is_latest = True
        for tail in reversed(entry.tails):
            chunk = runs.by_key.get(tail.chunk)
            if chunk and 0 < tail.used <= len(chunk.tokens) and (run := runs.run_at(chunk, tail.used)):
                yield _End(run, chunk, _entry_end(entry, chunk.start + tail.used, is_latest=is_latest))
                is_latest = False


def _named(node: _Node) -> tuple[tuple[EntryEnd, ...], int]:
    """The entries that end in a node, the furthest first, and how many more there are. Of several branches none
    are named; text that no entry leads to has a name, too."""
    if node.branches:
        return (), len(node.ends)
    ends = sorted(node.ends, key=lambda end: -end.shown.position)
    named, last = [end.shown for end in ends[:_MOST_ENTRIES]], node.run.last
    if node.run.ends_whole and not node.run.children and last not in {end.chunk for end in ends}:
        named.insert(0, _entry_end(nameless(last), last.end, is_latest=True))
    return tuple(named), max(len(ends) - _MOST_ENTRIES, 0)


def _entry_end(entry: Entry, position: int, *, is_latest: bool) -> EntryEnd:
    return EntryEnd(entry.id, entry.label.kind, entry.label.head, position, is_latest, entry.is_pinned)
