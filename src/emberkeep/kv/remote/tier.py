"""The remote tier: blocks in a server that several hosts share.

    prefetch        while a prompt is tokenized, what is known of it is asked for
    bring_in        what the server has of a whole prompt, and is cheaper to load than to evaluate, comes into RAM
    offer           what was computed here goes there, when there is nothing better to do

What comes is verified against the tokens that it is wanted for, and enters the store as if it had been computed
here. Nothing waits for the server longer than a deadline, and nothing fails because of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from time import monotonic

import numpy as np

from emberkeep.kv.disk.chunkfile import Damaged, Description
from emberkeep.kv.lookups import BLOCK_TOKENS, Arrival, SharedTier, block_start
from emberkeep.kv.remote.blocks import BlockReader, Place, StoredBlock, Whole, blocks_of, place_after
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, ForgottenLog, RemoteLink, Unreachable
from emberkeep.kv.remote.writer import RemoteWriter
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, chunks_at, place_at, store_name
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import EXACT_BITS, SHARED, Lineage

log = logging.getLogger("emberkeep.kv")

WORTH_ASKING = 16
"""Tokens of a prompt that are stored nowhere here, for the server to be asked."""
_SHORTEST_S, _LONGEST_S = 0.05, 30.0
"""So long a request waits for what was found, also on a busy machine, and while it is not known how long
evaluating takes."""

_THREADS = 4
_REMEMBERED = 16_384


class RemoteTier(SharedTier):
    """The shared tier over a link to a server."""

    is_shared = True

    def __init__(self, link: RemoteLink, owner: KvStore, most_bytes: int, folder: Path | None) -> None:
        """`most_bytes`: that come for one prompt. `folder`: where it is kept who was forgotten."""
        self.link = link
        link.breaker.on_change = lambda event: log.warning("the remote tier %s", event)
        self.owner = owner
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        """Held while something is entered, so that nothing is of a user who is being forgotten."""
        self.forgettings = 0
        """It goes up with every one: what a lookup has begun before is not entered."""
        self._arrived: dict[ChunkKey, None] = {}
        """What came for prompts that have not asked for it yet."""
        self._lookups = self._hits = self._late = 0
        self.forgotten = ForgottenLog(link, self._let_go, folder)
        self.name = partial(link.name, store_name(owner.fingerprint))
        self._writer = RemoteWriter(link, owner, self.forgotten)
        self.reader = BlockReader(link, owner.costs, self._writer.remove)
        self._threads = ThreadPoolExecutor(_THREADS, "kv-remote-read")

    # ── reading ──

    def prefetch(self, lineage: Lineage, tokens: TokenArray) -> None:
        if not self.link.breaker.is_open and len(tokens) >= BLOCK_TOKENS:
            arrival = Arrival(monotonic() + self.reader.patience(0))
            self._submit(lambda: self._run(lineage, tokens, arrival, lambda lookup: lookup.fetch_blocks()))

    def bring_in(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Arrival | None:
        missing = len(tokens) - self.owner.peek(lineage, tokens, snapshots=snapshots).tokens
        if self.link.breaker.is_open or missing < WORTH_ASKING:
            return None
        self._lookups += 1
        # Who waits longer than evaluating takes has gained nothing.
        seconds, deadline = self.owner.costs.evaluate.seconds(missing), self.reader.patience(0)
        arrival = Arrival(monotonic() + min(seconds or deadline, deadline))

        def fetch(lookup: Lookup) -> None:
            if snapshots:
                lookup.fetch_to_snapshot()
            elif end := lookup.fetch_blocks():
                lookup.fetch_follower(end)

        def run() -> None:
            try:
                self._run(lineage, tokens, arrival, fetch)
            finally:
                arrival.done.set_result(self._take_arrived(lineage, tokens))

        return arrival if self._submit(run) else None

    def was_late(self, arrival: Arrival) -> None:
        self._late += 1
        if arrival.moved_at is not None and monotonic() - arrival.moved_at > self.reader.patience(0):
            self.link.breaker.trip("it takes too long to answer")
            self.link.cut()

    def _submit(self, run: Callable[[], None]) -> bool:
        """False: the store is being closed."""
        try:
            self._threads.submit(run)
        except RuntimeError:
            return False
        return True

    def _run(
        self, lineage: Lineage, tokens: TokenArray, arrival: Arrival, fetch: Callable[[Lookup], object]
    ) -> None:
        """Never raises: the request goes on without it."""
        if self.link.breaker.is_open or monotonic() > arrival.give_up:
            return
        arrival.moved_at = monotonic()
        self.reader.forget_old_measures()
        try:
            fetch(Lookup(self, lineage, tokens, arrival))
        except (Unreachable, TimeoutError) as error:
            log.debug("the remote tier gave no answer: %s", error)
        except Exception:
            log.exception("the remote tier's answer could not be used")

    def enter(self, forgettings: int, insert: Callable[[], Chunk | None]) -> Chunk | None:
        with self._entering:
            chunk = insert() if forgettings == self.forgettings else None
        if chunk is not None:
            with self._lock:
                self._arrived[chunk.key] = None
                while len(self._arrived) > _REMEMBERED:
                    del self._arrived[next(iter(self._arrived))]
            self._writer.is_there(chunk)
        return chunk

    def _take_arrived(self, lineage: Lineage, tokens: TokenArray) -> frozenset[ChunkKey]:
        """What has come for these tokens, and did not count for a prompt before."""
        if not self._arrived:
            return frozenset()
        end = self.owner.advance(self.owner.origin(lineage), tokens)
        path = self.owner.transact(lambda ledger: [chunk.key for chunk in chunks_at(end)])
        with self._lock:
            came = frozenset(key for key in path if key in self._arrived)
            for key in came:
                del self._arrived[key]
            self._hits += bool(came)
        return came

    # ── writing ──

    @property
    def takes_more(self) -> bool:
        return not self.link.breaker.is_open

    def offer(self, chunks: Iterable[Chunk]) -> None:
        self._writer.offer(chunks)

    def offer_loose(self, chunk: Chunk) -> None:
        self._writer.offer_loose(chunk)

    def remove(self, chunks: Iterable[Chunk]) -> None:
        self._writer.remove_chunks(chunks)

    def forget(self, user: str) -> int:
        with self._entering:
            self.forgettings += 1
        return self._writer.forget(user)

    def _let_go(self, is_one: Callable[[str], bool]) -> None:
        """Another host has forgotten users. Raises OSError."""
        with self._entering:
            self.forgettings += 1
        try:
            self.owner.forget_here(is_one)
        finally:
            self._writer.drop_loose(is_one)

    # ── life ──

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        with self._entering:
            self.forgettings += 1  # nothing more is entered
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._writer.close()
        self.link.close()

    def stats(self) -> dict[str, object]:
        breaker, counters = self.link.breaker, self.link.counters
        return {
            "lookups": self._lookups,
            "hits": self._hits,
            "late": self._late,
            **asdict(self.reader.counters),
            **self._writer.stats(),
            "requests": counters.requests,
            "request_seconds": counters.seconds,
            "failures": counters.failures,
            "last_error": counters.last_error,
            "breaker_open": int(breaker.is_open),
            "breaker_opened": breaker.opened,
            "is_encrypted": bool(self.link.settings.key),
        }


# ── one prompt ──


class Lookup:
    """Used by one thread. Methods that ask block, and raise Unreachable and TimeoutError."""

    def __init__(self, tier: RemoteTier, lineage: Lineage, tokens: TokenArray, arrival: Arrival) -> None:
        self._tier = tier
        self._owner = tier.owner
        self._forgettings = tier.forgettings
        self._lineage = lineage
        self._tokens = tokens
        self._arrival = arrival
        owners, bits = dict.fromkeys([SHARED, lineage.owner]), dict.fromkeys([EXACT_BITS, lineage.bits])
        self._lineages = [Lineage(owner, each) for each in bits for owner in owners]
        """Whose blocks the request may reuse; those on which more may build come first."""
        self._here = self._owner.advance(self._owner.origin(lineage), tokens)
        """The end of what is stored here."""

    @cached_property
    def _blocks(self) -> dict[Lineage, list[Description]]:
        return {one: blocks_of(self._owner.fingerprint, one, self._tokens) for one in self._lineages}

    # ── state that can be cut by token ──

    def fetch_blocks(self) -> Cursor | None:
        """Whole blocks, as many as are there, faster to load than to evaluate, and find room; returns their end if
        that was all of them."""
        if len(self._tokens) - self._here.position < WORTH_ASKING:
            return None
        path = self._path()
        here = self._here.position
        costs = [(min(one.expected.start + BLOCK_TOKENS - here, BLOCK_TOKENS), one.size) for one in path]
        chosen = path[: self._owner.costs.worth_fetching(costs)]
        sums = accumulate(found.size for found in chosen)
        chosen = [found for found, size in zip(chosen, sums, strict=True) if size <= self._tier.most_bytes]
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
        names = [self._tier.name(one, block.key) for one, block in asked]
        entries, *sizes = self._tier.link.run(
            lambda pipe: [self._tier.forgotten.ask(pipe), *(pipe.strlen(name) for name in names)]
        )
        if not self._tier.forgotten.take(entries):
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
        names = [self._tier.name(one, described.key) for one, described in wanted]
        sizes = self._tier.link.run(lambda pipe: [pipe.strlen(name) for name in names])
        is_worth_it = self._owner.costs.worth_fetching([(saves, sum(sizes))])
        if all(sizes) and is_worth_it and sum(sizes) <= self._tier.most_bytes:
            path = zip(names, wanted, sizes, strict=True)
            self._enter_all(begin, [StoredBlock(name, one, each, size) for name, (one, each), size in path])

    def _enter_all(self, begin: Cursor, path: Sequence[StoredBlock]) -> Cursor:
        """Fetch and enter them at `begin`, as far as they come in time; returns where that ends."""
        left = sum(found.size for found in path)
        # Who waits longer than evaluating takes has gained nothing.
        seconds = self._owner.costs.evaluate.seconds(len(self._tokens) - begin.position) or _LONGEST_S
        limit = monotonic() + max(seconds, _SHORTEST_S)
        self._arrival.give_up = min(limit, monotonic() + self._tier.reader.patience(left))
        cursor = begin
        for found, whole in self._tier.reader.read(path):
            chunk = self._tier.enter(self._forgettings, partial(self._insert, cursor, found, whole))
            now, left = monotonic(), left - found.size
            if chunk is None or now > self._arrival.give_up:
                break
            cursor = Cursor(chunk, len(chunk.tokens), found.lineage)
            self._arrival.moved_at = now
            self._arrival.give_up = min(limit, now + self._tier.reader.patience(left))
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
        names = [self._tier.name(one, place.key) + kind for one, place in places]
        lists = self._tier.link.run(lambda pipe: [pipe.hvals(name) for name in names])
        return [
            (one, place, tokens)
            for (one, place), name, values in zip(places, names, lists, strict=True)
            for value in values
            if (tokens := self._tokens_in(name, value)) is not None
        ]

    def _tokens_in(self, name: bytes, value: bytes) -> TokenArray | None:
        try:
            data = self._tier.link.seal.open(name, value)
        except Damaged:
            return None
        return np.frombuffer(data, "<i4") if len(data) % 4 == 0 and len(data) <= 4 * BLOCK_TOKENS else None


def _lineage_at(cursor: Cursor) -> Lineage | None:
    """Returns that of what is there; None at the beginning of everything."""
    return None if cursor.chunk.is_root else cursor.chunk.lineage


def _may_hang(lineage: Lineage, above: Lineage | None) -> bool:
    """Whether a chunk of a lineage may build on one of another."""
    return above is None or lineage.sees(above)
