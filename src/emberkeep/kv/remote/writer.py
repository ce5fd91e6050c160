"""The thread that puts blocks into the shared server, and the record of users who were forgotten.

What is shared or was reused goes first, everything within a byte rate. A block that is there already is only given
more time. Each batch is written in one transaction, which fails if a user was forgotten since the record was last
read: so nothing of a user comes back who was forgotten by any host.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from emberkeep.kv.disk.chunkfile import parts
from emberkeep.kv.disk.transfers import give_way
from emberkeep.kv.lookups import StillElsewhere
from emberkeep.kv.remote.blocks import BlockPlaces, Placed
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, ForgottenLog, RemoteLink, Unreachable
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, ChunkKey, store_name, token_bytes
from emberkeep.types.lineage import SHARED
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from valkey.client import Pipeline

log = logging.getLogger("emberkeep.kv")

_SLOTS = 16
"""What follows a block and is listed there. A new one takes the place of another: who finds nothing there
evaluates less than a block."""
_BATCH_CHUNKS = 16
_BATCH_BYTES = 32 << 20
_MOST_OFFERS = 4096
_LOOSE_BYTES = 64 << 20
_MOST_REMOVALS = 65_536
"""So many wait while the server does not answer. What is not removed expires."""
_REMEMBERED = 65_536
_PAUSE_S = 10.0
"""How long a server that took nothing is left alone."""
_POLL_S = 10.0
_CLOSING_S = 10.0
_TOUCHED = 0.25
"""A block is given more time when it is wanted for longer by this share of its time."""
_FOREVER_S = 365 * 86_400


@dataclass(slots=True)
class WriteCounters:
    written_chunks: int = 0
    written_bytes: int = 0
    refused_chunks: int = 0
    touched_chunks: int = 0


@dataclass(frozen=True, slots=True)
class _Item:
    chunk: Chunk
    placed: Placed
    name: bytes
    until: float
    seconds: float
    """How long it is wanted: in the store's seconds, and from now."""


class RemoteWriter:
    """Safe to use from any thread. Methods return at once unless they say otherwise."""

    def __init__(self, link: RemoteLink, owner: KvStore, forgotten: ForgottenLog) -> None:
        self._link = link
        self._owner = owner
        self._forgotten = forgotten
        self._name = partial(link.name, store_name(owner.fingerprint))
        self._places = BlockPlaces(owner.fingerprint)
        self._changed = threading.Condition()
        self._offers: tuple[dict[ChunkKey, Chunk], dict[ChunkKey, Chunk]] = {}, {}
        """Those that go first, and the others; in the order in which they came."""
        self._loose: dict[ChunkKey, Chunk] = {}
        """Those that are not in the tree."""
        self._removals: list[bytes] = []
        self._unlisted: list[tuple[bytes, str]] = []
        self._owed: set[str] = set()
        """Users whose state could not be removed yet."""
        self._there: OrderedDict[ChunkKey, float] = OrderedDict()
        """A block need not be looked at again unless it is wanted for longer than this, in the store's seconds."""
        self._writing = 0
        """Chunks of the batch that is on its way."""
        self._busy = False
        self._closing_until: float | None = None
        self._paused_until = 0.0
        self._next_write = 0.0
        self.counters = WriteCounters()
        self._thread = threading.Thread(target=self._run, name="kv-remote-write", daemon=True)
        self._thread.start()

    def offer(self, chunks: Iterable[Chunk]) -> None:
        with self._changed:
            for chunk in chunks:
                if _wanted_until(chunk) <= self._there.get(chunk.key, -1.0):
                    self._loose.pop(chunk.key, None)
                    continue
                first, later = self._offers
                later.pop(chunk.key, None)
                is_first = chunk.hits > 0 or chunk.is_fork or chunk.lineage.owner == SHARED
                (first if is_first or chunk.key in first else later)[chunk.key] = chunk
            while sum(map(len, self._offers)) > _MOST_OFFERS:
                some = self._offers[1] or self._offers[0]
                del some[next(iter(some))]
            self._changed.notify_all()

    def offer_loose(self, chunk: Chunk) -> None:
        """One that is not in the tree: the block around a place where conversations part."""
        with self._changed:
            self._loose[chunk.key] = chunk
            while sum(one.bytes for one in self._loose.values()) > _LOOSE_BYTES:
                del self._loose[next(iter(self._loose))]
        self.offer([chunk])

    def drop_loose(self, is_one: Callable[[str], bool]) -> None:
        with self._changed:
            self._loose = {key: one for key, one in self._loose.items() if not _is_of(one, is_one)}

    def is_there(self, chunk: Chunk) -> None:
        """It has just come from there."""
        with self._changed:
            self._note_there(chunk.key, _wanted_until(chunk))
            for offers in self._offers:
                offers.pop(chunk.key, None)

    def remove(self, names: Iterable[bytes]) -> None:
        with self._changed:
            self._removals = [*self._removals, *names][-_MOST_REMOVALS:]
            self._changed.notify_all()

    def remove_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that are out of the tree, with what is listed of them."""
        places = BlockPlaces(self._owner.fingerprint)
        placed = [(chunk, places.of(chunk)) for chunk in sorted(chunks, key=lambda chunk: chunk.start)]
        with self._changed:
            for chunk, each in placed:
                if each is not None:
                    name = self._name(chunk.lineage, each.described.key)
                    self._removals += [name, name + FOLLOWERS, name + SNAPSHOTS]
                    self._unlisted.append(self._listing(chunk, each))
                self._there.pop(chunk.key, None)
            self._removals, self._unlisted = self._removals[-_MOST_REMOVALS:], self._unlisted[-_MOST_REMOVALS:]
            self._changed.notify_all()

    def forget(self, user: str) -> int:
        """Blocks. Raises OSError where something may be left: it is tried again."""
        with self._changed:
            for offers in self._offers:
                for key in [key for key, chunk in offers.items() if _is_of(chunk, lambda other: other == user)]:
                    del offers[key]
            self._there.clear()
        self.drop_loose(lambda other: other == user)
        try:
            return self._link.forget(user)
        except Unreachable as error:
            with self._changed:
                self._owed.add(user)
            raise StillElsewhere(f"the server that hosts share does not answer: {error}") from error

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._has_work or self._busy) or self._is_stuck)

    def close(self) -> None:
        """Blocks while what is left is written, for a while at most."""
        with self._changed:
            self._closing_until = monotonic() + _CLOSING_S
            self._changed.notify_all()
        self._thread.join(_CLOSING_S + 2 * self._link.settings.deadline_s)

    def stats(self) -> dict[str, object]:
        pending = sum(map(len, self._offers)) + self._writing
        return {**asdict(self.counters), "pending_chunks": pending}

    # ── the thread ──

    @property
    def _has_work(self) -> bool:
        return bool(self._offers[0] or self._offers[1] or self._removals)

    @property
    def _is_stuck(self) -> bool:
        return self._link.breaker.is_open or monotonic() < self._paused_until

    @property
    def _is_over(self) -> bool:
        if self._closing_until is None:
            return False
        return not self._has_work or self._is_stuck or monotonic() > self._closing_until

    def _run(self) -> None:
        give_way()
        while self._wait():
            try:
                self._probe()
                if not self._is_stuck:
                    self._settle_debts()
                    self._write(self._next_batch())
            except Unreachable as error:
                log.debug("nothing was written to the remote tier: %s", error)
                self._pause()
            except Exception:
                log.exception("a batch did not reach the remote tier")
                self._pause()
            with self._changed:
                self._busy, self._writing = False, 0
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for something to do, or for the time to look around; False: no more."""
        with self._changed:
            if self._is_over:
                return False
            if self._is_stuck:
                self._changed.wait(0.2)
            elif not self._has_work:
                self._changed.wait(_POLL_S)
            if self._is_over:
                return False
            self._busy = not self._is_stuck
            return True

    def _pause(self) -> None:
        if not self._link.breaker.is_open:
            self._paused_until = monotonic() + _PAUSE_S

    def _probe(self) -> None:
        if self._link.breaker.wants_probe:
            self._link.ping()
            self._there.clear()  # it may have lost everything

    def _settle_debts(self) -> None:
        """Read who was forgotten; forget who could not be; remove what was to be."""
        self._forgotten.follow(lambda: self._link.run(self._forgotten.ask)[0])
        with self._changed:
            owed, removals, unlisted = list(self._owed), self._removals, self._unlisted
        for user in owed:
            self._link.forget(user)
            with self._changed:
                self._owed.discard(user)
        if not removals:
            return
        self._link.run(lambda pipe: [pipe.unlink(*removals), *(pipe.hdel(name, slot) for name, slot in unlisted)])
        with self._changed:
            self._removals, self._unlisted = self._removals[len(removals) :], self._unlisted[len(unlisted) :]

    def _next_batch(self) -> list[Chunk]:
        batch: list[Chunk] = []
        # Nothing else is done while the rate is waited for.
        most = min(_BATCH_BYTES, self._link.settings.bytes_per_s)
        with self._changed:
            for offers in self._offers:
                while offers and len(batch) < _BATCH_CHUNKS and sum(one.bytes for one in batch) < most:
                    batch.append(offers.pop(next(iter(offers))))
                    self._writing += 1
        return batch

    def _write(self, batch: Sequence[Chunk]) -> None:
        items = [item for item in map(self._item, batch) if item]
        if not items:
            return
        try:
            missing = self._touch(items)
            self._wait_for_rate(missing)
            self._store(items, missing)
        except Unreachable as error:
            self._refused(batch, error)
            raise

    def _item(self, chunk: Chunk) -> _Item | None:
        placed = self._places.of(chunk)
        if placed is None:
            return None
        until, now = _wanted_until(chunk), self._owner.transact(lambda ledger: ledger.clock.now())
        name = self._name(chunk.lineage, placed.described.key)
        return _Item(chunk, placed, name, until, min(max(until - now, 1.0), _FOREVER_S))

    def _touch(self, items: Sequence[_Item]) -> list[_Item]:
        """Give what is there more time; returns what is not."""
        answers = self._link.run(
            lambda pipe: [
                (pipe.expire(item.name, int(item.seconds) + 1, gt=True), pipe.exists(item.name)) for item in items
            ]
        )
        missing = []
        with self._changed:
            for item, is_there in zip(items, answers[1::2], strict=True):
                if is_there:
                    self.counters.touched_chunks += 1
                    self._loose.pop(item.chunk.key, None)
                    self._note_there(item.chunk.key, item.until + _TOUCHED * item.seconds)
                else:
                    missing.append(item)
        return missing

    def _wait_for_rate(self, items: Sequence[_Item]) -> None:
        now = monotonic()
        self._next_write = max(self._next_write, now)
        with self._changed:
            if self._next_write > now and self._closing_until is None:
                self._changed.wait_for(lambda: self._closing_until is not None, self._next_write - now)
        self._next_write += sum(item.chunk.bytes for item in items) / self._link.settings.bytes_per_s

    def _store(self, items: Sequence[_Item], missing: Sequence[_Item]) -> None:
        """What is missing, and for all of them where others look for them, which would expire before them."""
        size = sum(item.chunk.bytes for item in missing)
        written = self._link.guarded(lambda pipe: self._fill(pipe, items, missing), size)
        if written is None:
            return
        log.debug("warm -> remote: %d chunks, %d bytes", len(written), sum(written.values()))
        with self._changed:
            self.counters.written_chunks += len(written)
            self.counters.written_bytes += sum(written.values())
            for item in missing:
                self._loose.pop(item.chunk.key, None)
                if item.name in written:
                    self._note_there(item.chunk.key, item.until + _TOUCHED * item.seconds)

    def _fill(
        self, pipe: Pipeline, items: Sequence[_Item], missing: Sequence[_Item]
    ) -> Mapping[bytes, int] | None:
        """Fill a pipeline that watches the record of who was forgotten. Raises Unreachable."""
        if not self._forgotten.follow(lambda: self._forgotten.ask(pipe)):
            raise Unreachable("some who were forgotten elsewhere are not forgotten here yet")
        values = {item.name: value for item in missing if (value := self._value(item)) is not None}
        absent = {item.name for item in missing} - values.keys()
        listed = [item for item in items if item.name not in absent and self._is_here(item.chunk)]
        if not listed:
            return None
        pipe.multi()
        for item in listed:
            seconds = int(item.seconds) + 1
            if item.name in values:
                pipe.set(item.name, values[item.name], ex=seconds)
            self._list(pipe, item, seconds)
        return {item.name: len(values[item.name]) for item in listed if item.name in values}

    def _value(self, item: _Item) -> bytes | None:
        """None where it has gone meanwhile."""
        payload = item.chunk.payload
        if payload is None or not self._is_here(item.chunk):
            return None
        return self._link.seal.close(item.name, parts(item.placed.described, payload))

    def _is_here(self, chunk: Chunk) -> bool:
        return self._loose.get(chunk.key) is chunk or self._owner.transact(lambda ledger: chunk in ledger.tree)

    def _list(self, pipe: Pipeline, item: _Item, seconds: int) -> None:
        """Note it where others look for what follows the block before it."""
        name, slot = self._listing(item.chunk, item.placed)
        pipe.hset(name, slot, self._link.seal.close(name, [token_bytes(item.placed.tokens)]))
        pipe.expire(name, seconds, nx=True)
        pipe.expire(name, seconds, gt=True)

    def _listing(self, chunk: Chunk, placed: Placed) -> tuple[bytes, str]:
        """The list of what follows the block before it, and its place there."""
        kind = SNAPSHOTS if chunk.is_snapshot else FOLLOWERS
        return self._name(chunk.lineage, placed.before.key) + kind, str(placed.described.key[0] % _SLOTS)

    def _note_there(self, key: ChunkKey, until: float) -> None:
        self._there[key] = until
        self._there.move_to_end(key)
        while len(self._there) > _REMEMBERED:
            self._there.popitem(last=False)

    def _refused(self, batch: Sequence[Chunk], error: Unreachable) -> None:
        """Try again later what is still in RAM then."""
        log.info("the remote tier takes nothing: %s", error)
        self.counters.refused_chunks += len(batch)
        self.offer(chunk for chunk in batch if chunk.payload is not None)


def _wanted_until(chunk: Chunk) -> float:
    return inf if chunk.is_pinned else chunk.expires


def _is_of(chunk: Chunk, is_one: Callable[[str], bool]) -> bool:
    try:
        return chunk.lineage.owner != SHARED and is_one(chunk.lineage.user)
    except (ValueError, LookupError, TypeError):
        return False
