"""One prompt's questions to the shared server: which of its blocks are there, which are worth loading, what
follows the last whole one. What comes is entered into the store, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from time import monotonic
from typing import Protocol, TypeVar

import numpy as np

from emberkeep.kv.disk.chunkfile import Damaged, Description
from emberkeep.kv.keys import ChunkKey, Span
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import CostModel
from emberkeep.kv.remote.blocks import BLOCK_TOKENS, Place, block_start, blocks_of, place_after
from emberkeep.kv.remote.forgotten_log import ForgottenLog
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, RemoteLink
from emberkeep.kv.remote.reader import BlockReader, Found, Whole
from emberkeep.kv.shared_tier import Arrival
from emberkeep.kv.tree import Chunk, Cursor, Made, place_at
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT_BITS, SHARED, Lineage
from emberkeep.values import dataclass

T = TypeVar("T")

WORTH_ASKING = 16
"""Tokens of a prompt that are stored nowhere here, for the server to be asked."""
_SHORTEST_S, _LONGEST_S = 0.05, 30.0
"""That a request waits for what was found: on a machine that does other things, too, and while it is not known how
long evaluating takes."""


class RemoteOwner(Protocol):
    """What the remote tier asks of its store, on its own threads."""

    fingerprint: bytes
    costs: CostModel

    def transact(self, change: Callable[[Ledger], T]) -> T: ...

    def origin(self, lineage: Lineage) -> Cursor: ...

    def advance(self, cursor: Cursor, tokens: TokenArray) -> Cursor: ...

    def resumable(self, lineage: Lineage, tokens: TokenArray) -> int:
        """Up to where the last snapshot of `tokens` was taken."""

    def insert(
        self,
        cursor: Cursor,
        tokens: TokenArray,
        payload: memoryview,
        sampled: Iterable[Span],
        *,
        fork: bool,
        made: Made = Made.UNKNOWN,
    ) -> Cursor: ...

    def insert_snapshot(self, cursor: Cursor, payload: memoryview, made: Made = Made.UNKNOWN) -> Chunk | None: ...

    def forget_here(self, is_one: Callable[[str], bool]) -> None:
        """Drop all users of whom `is_one` is true, on this host. Raises OSError."""


@dataclass(frozen=True, slots=True)
class LookupTools:
    """What every lookup works with."""

    link: RemoteLink
    owner: RemoteOwner
    reader: BlockReader
    forgotten: ForgottenLog
    name: Callable[[Lineage, ChunkKey], bytes]
    enter: Callable[[int, Callable[[], Chunk | None]], Chunk | None]
    """Enters what a function inserts, if nobody was forgotten since a number of forgettings."""
    most_bytes: int
    """That come for one prompt."""


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
        """The prompt's, as each lineage calls them."""
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
        """Of what is there after the last whole block, what begins most like the rest of the prompt."""
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

    def _path(self) -> list[Found]:
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
            (one, block.start): Found(name, one, block, size)
            for (one, block), name, size in zip(asked, names, sizes, strict=True)
            if size
        }
        path: list[Found] = []
        above = _lineage_at(place_at(self._here, begin))
        for start in range(begin, len(self._tokens), BLOCK_TOKENS):
            options = (there[one, start] for one in self._lineages if (one, start) in there)
            found = next((one for one in options if _may_hang(one.lineage, above)), None)
            if found is None:
                break
            path.append(found)
            above = found.lineage
        return path

    def _worth_it(self, path: list[Found]) -> list[Found]:
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
            self._enter_all(begin, [Found(name, one, each, size) for name, (one, each), size in path])

    def _enter_all(self, begin: Cursor, path: Sequence[Found]) -> Cursor:
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

    def _insert(self, cursor: Cursor, found: Found, whole: Whole) -> Chunk | None:
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
    """Of what is there; None at the beginning of everything."""
    return None if cursor.chunk.is_root else cursor.chunk.lineage


def _may_hang(lineage: Lineage, above: Lineage | None) -> bool:
    """Whether a chunk of a lineage may build on one of another."""
    return above is None or lineage.sees(above)


def _fitting(sizes: Sequence[int], room: int) -> int:
    """How many of the first fit."""
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)
