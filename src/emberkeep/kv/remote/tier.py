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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from emberkeep.kv.lookups import BLOCK_TOKENS, Arrival, SharedTier
from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, VERSION, ForgottenLog, RemoteLink, Unreachable
from emberkeep.kv.remote.lookup import WORTH_ASKING, BlockReader, Lookup, LookupTools
from emberkeep.kv.remote.writer import RemoteWriter
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, ChunkKey, held_at, store_name
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

_THREADS = 4
_REMEMBERED = 16_384


class RemoteTier(SharedTier):
    """The shared tier over a link to a server."""

    is_shared = True

    def __init__(self, link: RemoteLink, owner: KvStore, most_bytes: int, folder: Path | None) -> None:
        """`most_bytes`: that come for one prompt. `folder`: where it is kept who was forgotten."""
        self._link = link
        link.breaker.on_change = lambda event: log.warning("the remote tier %s", event)
        self._owner = owner
        self._store = store_name(owner.fingerprint)
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        """Held while something is entered, so that nothing is of a user who is being forgotten."""
        self._forgettings = 0
        self._arrived: dict[ChunkKey, None] = {}
        """What came for prompts that have not asked for it yet."""
        self._lookups = self._hits = self._late = 0
        forgotten = ForgottenLog(link, self._let_go, folder)
        self._writer = RemoteWriter(link, owner, forgotten, self._name)
        self._reader = BlockReader(link, owner.costs, self._writer.remove)
        self._tools = LookupTools(link, owner, self._reader, forgotten, self._name, self._enter, most_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "kv-remote-read")

    # ── reading ──

    def prefetch(self, lineage: Lineage, tokens: TokenArray) -> None:
        if not self._link.breaker.is_open and len(tokens) >= BLOCK_TOKENS:
            arrival = Arrival(monotonic() + self._reader.patience(0))
            self._submit(lambda: self._run(lineage, tokens, arrival, lambda lookup: lookup.fetch_blocks()))

    def bring_in(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Arrival | None:
        missing = len(tokens) - self._known(lineage, tokens, snapshots=snapshots)
        if self._link.breaker.is_open or missing < WORTH_ASKING:
            return None
        self._lookups += 1
        # Who waits longer than evaluating takes has gained nothing.
        seconds, deadline = self._owner.costs.evaluate.seconds(missing), self._reader.patience(0)
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

    def _known(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> int:
        if snapshots:
            return self._owner.resumable(lineage, tokens)
        return self._owner.advance(self._owner.origin(lineage), tokens).position

    def was_late(self, arrival: Arrival) -> None:
        self._late += 1
        if arrival.moved_at is not None and monotonic() - arrival.moved_at > self._reader.patience(0):
            self._link.breaker.trip("it takes too long to answer")
            self._link.cut()

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
        if self._link.breaker.is_open or monotonic() > arrival.give_up:
            return
        arrival.moved_at = monotonic()
        self._reader.forget_old_measures()
        try:
            fetch(Lookup(self._tools, lineage, tokens, arrival, self._forgettings))
        except (Unreachable, TimeoutError) as error:
            log.debug("the remote tier gave no answer: %s", error)
        except Exception:
            log.exception("the remote tier's answer could not be used")

    def _enter(self, forgettings: int, insert: Callable[[], Chunk | None]) -> Chunk | None:
        with self._entering:
            chunk = insert() if forgettings == self._forgettings else None
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
        end = self._owner.advance(self._owner.origin(lineage), tokens)
        path = self._owner.transact(lambda ledger: [chunk.key for chunk in held_at(end)])
        with self._lock:
            came = frozenset(key for key in path if key in self._arrived)
            for key in came:
                del self._arrived[key]
            self._hits += bool(came)
        return came

    def _name(self, lineage: Lineage, key: ChunkKey) -> bytes:
        return self._link.name(self._store, None if lineage.owner == SHARED else lineage.user, key)

    # ── writing ──

    @property
    def takes_more(self) -> bool:
        return not self._link.breaker.is_open

    def offer(self, chunks: Iterable[Chunk]) -> None:
        self._writer.offer(chunks)

    def offer_loose(self, chunk: Chunk) -> None:
        self._writer.offer_loose(chunk)

    def remove(self, chunks: Iterable[Chunk]) -> None:
        self._writer.remove_chunks(chunks)

    def forget(self, user: str) -> int:
        with self._entering:
            self._forgettings += 1
        return self._writer.forget(user)

    def _let_go(self, is_one: Callable[[str], bool]) -> None:
        """Another host has forgotten users. Raises OSError."""
        with self._entering:
            self._forgettings += 1
        try:
            self._owner.forget_here(is_one)
        finally:
            self._writer.drop_loose(is_one)

    # ── life ──

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        with self._entering:
            self._forgettings += 1  # nothing more is entered
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._writer.close()
        self._link.close()

    def stats(self) -> dict[str, object]:
        breaker, counters = self._link.breaker, self._link.counters
        return {
            "lookups": self._lookups,
            "hits": self._hits,
            "late": self._late,
            **asdict(self._reader.counters),
            **self._writer.stats(),
            "requests": counters.requests,
            "request_seconds": counters.seconds,
            "failures": counters.failures,
            "last_error": counters.last_error,
            "breaker_open": int(breaker.is_open),
            "breaker_opened": breaker.opened,
            "is_encrypted": bool(self._link.settings.key),
        }


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
