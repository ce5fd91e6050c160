"""Replicas that share a remote tier, as events in simulated time. The router and every replica's store are the
product's own; what takes time (engines, the link) is a rate.

    arrive ── router ──▶ a replica's queue ── a slot is free ──▶ match, load what the remote tier has
      ── the engine is free ──▶ import, evaluate the rest ── first token ──▶ store, write behind, decode

A chunk of a store is a block of the trace, 512 tokens: with the product's 128 a run takes three times as long, and
its shares differ by a quarter of a percent, because no prompt of a trace parts from another inside a block.
Payloads are parts of one buffer of zeros that is never touched, so that bytes are counted and take no memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from benchmarks.policies import Routing
from benchmarks.trace_file import BLOCK, Visit
from emberkeep import garbage
from emberkeep.kv.lookups import Match
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.routing import Replica, RouteKeys
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import EXACT
from emberkeep.values import dataclass

_PATIENCE_S = 2.0
"""What would wait longer for the link is not written: replicas do not hold it back for ever."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What every replica is."""

    slots: int
    prefill: float
    """Tokens per second, one prompt after the other."""
    decode: float
    """Tokens per second of each answer, however many there are."""
    import_: float
    """Bytes per second from RAM into the engine."""
    ram: int
    """Bytes that its store may hold."""
    token_bytes: int
    """The state of one."""


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The tier that all replicas share."""

    budget: int
    """Bytes; 0: there is none."""
    link: float
    """Bytes per second in each direction, for all replicas together."""
    round_trip: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace."""

    own: int
    """Tokens of prompts that the replica had itself."""
    remote: int
    """Those that came from the remote tier."""
    evaluated: int
    ttfts: tuple[float, ...]
    """Seconds from arrival to the first token, in the order of the first tokens."""
    seconds: float
    """From the first arrival to the end of the last answer."""
    busy: tuple[float, ...]
    """Seconds of work of each replica: an answer takes one slot's share of it."""
    read_bytes: int
    """From the remote tier."""
    written_bytes: int
    """To it."""
    unwritten_bytes: int
    """That the link had no time for."""
    link_busy: float
    """Seconds of its busier direction."""

    @property
    def tokens(self) -> int:
        return self.own + self.remote + self.evaluated

    @property
    def imbalance(self) -> float:
        """How much busier the busiest replica is than the mean; 1: all are equally busy."""
        return max(self.busy) * len(self.busy) / sum(self.busy) if any(self.busy) else 1.0


def simulate(
    visits: Sequence[Visit],
    replicas: int,
    routing: Routing,
    machine: Machine,
    shared: RemoteSettings,
    answered: Callable[[], object] = lambda: None,
) -> Outcome:
    """Play `visits` to their last answer; `answered` is called with each of them. Takes seconds of one core."""
    events, remote = Events(), RemoteTier(shared)
    crowd = {
        f"replica-{number}": SimulatedReplica(machine, remote, events, answered) for number in range(replicas)
    }

    def arrive(visit: Visit) -> None:
        keys = RouteKeys(beginnings=visit.blocks)
        seen = [Replica(name, replica.running, machine.slots) for name, replica in crowd.items()]
        chosen = routing.rank(keys, seen)[0].id
        routing.sent(keys, chosen)
        crowd[chosen].take(visit)

    for visit in visits:
        events.at(visit.at, lambda visit=visit: arrive(visit))  # type: ignore[misc]
    with garbage.kept():  # it would look at a hundred thousand chunks again and again
        events.run()
    begin = min(visit.at for visit in visits)
    return _outcome([*crowd.values()], remote, events.now - begin)


def _outcome(crowd: Sequence[SimulatedReplica], remote: RemoteTier, seconds: float) -> Outcome:
    firsts = sorted(first for replica in crowd for first in replica.first_tokens)
    return Outcome(
        own=sum(replica.own for replica in crowd),
        remote=sum(replica.remote for replica in crowd),
        evaluated=sum(replica.evaluated for replica in crowd),
        ttfts=tuple(waited for _, waited in firsts),
        seconds=seconds,
        busy=tuple(replica.busy for replica in crowd),
        read_bytes=remote.reads.bytes,
        written_bytes=remote.writes.bytes,
        unwritten_bytes=remote.unwritten_bytes,
        link_busy=max(remote.reads.busy, remote.writes.busy),
    )


class Events:
    """What happens, in the order of simulated time; of what happens at once, what was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, happen: Callable[[], None]) -> None:
        heappush(self._planned, (time, next(self._order), happen))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._planned:
            self.now, _, happen = heappop(self._planned)
            happen()


# ── the tier that they share ──


@dataclass(slots=True)
class Direction:
    """One way of the link: what comes first goes first."""

    rate: float
    free_at: float = 0.0
    busy: float = 0.0
    bytes: int = 0

    def wait(self, now: float) -> float:
        """Seconds until something that is sent now would begin to move."""
        return max(self.free_at - now, 0.0)

    def send(self, now: float, size: int) -> float:
        """When it has arrived."""
        seconds = size / self.rate
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        self.bytes += size
        return self.free_at


class RemoteTier:
    """Blocks under a byte budget; the one that was read or written longest ago goes first, whatever follows it.

    A block's id stands for everything before it, as a chunk's key does.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        self.settings = settings
        self.reads, self.writes = Direction(settings.link), Direction(settings.link)
        self.unwritten_bytes = 0
        self._held: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self._coming: set[int] = set()

    @property
    def bytes(self) -> int:
        return self._bytes

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are here, up to the first that is not. Nothing is used by asking."""
        return next((place for place, block in enumerate(blocks) if block not in self._held), len(blocks))

    def read(self, now: float, blocks: Sequence[int]) -> float:
        """Send blocks that are here; returns when they have arrived."""
        for block in blocks:
            self._held.move_to_end(block)
        return self.reads.send(now, sum(self._held[block] for block in blocks)) + self.settings.round_trip

    def write(self, events: Events, sizes: dict[int, int]) -> None:
        """Take what is not here yet, when it has arrived."""
        new = {
            block: size for block, size in sizes.items() if block not in self._held and block not in self._coming
        }
        size = sum(new.values())
        if self.writes.wait(events.now) > _PATIENCE_S:
            self.unwritten_bytes += size
        elif new:
            self._coming |= new.keys()
            events.at(self.writes.send(events.now, size), lambda: self._enter(new))

    def _enter(self, sizes: dict[int, int]) -> None:
        self._coming -= sizes.keys()
        self._held |= sizes
        self._bytes += sum(sizes.values())
        while self._bytes > self.settings.budget:
            self._bytes -= self._held.popitem(last=False)[1]


# ── a replica ──


@dataclass(slots=True)
class _Work:
    """A request that has a slot."""

    visit: Visit
    tokens: TokenArray
    match: Match
    """Pinned until its prompt is evaluated."""
    loaded: int = 0
    """Position up to which it was brought from the remote tier; 0: nothing was."""


class SimulatedReplica:
    """A store, slots, and an engine that evaluates one prompt at a time. Answers do not slow it down."""

    def __init__(
        self, machine: Machine, remote: RemoteTier, events: Events, answered: Callable[[], object]
    ) -> None:
        self.running = 0
        """Requests that were sent here and are not answered yet."""
        self.own = self.remote = self.evaluated = 0
        self.busy = 0.0
        self.first_tokens: list[tuple[float, float]] = []
        """When, and how long after the request had come."""
        self.store = KvStore(b"simulated", Budgets(machine.ram))
        costs = self.store.costs
        costs.evaluate.value, costs.import_.value = machine.prefill, machine.import_
        costs.fetch.value = remote.settings.link
        self._machine, self._tier, self._events, self._answered = machine, remote, events, answered
        self._payload = memoryview(np.zeros(BLOCK * machine.token_bytes, np.uint8))
        self._waiting: deque[Visit] = deque()
        self._free = machine.slots
        self._ready: deque[_Work] = deque()
        self._is_evaluating = False

    def take(self, visit: Visit) -> None:
        self.running += 1
        self._waiting.append(visit)
        self._fill_slots()

    def _fill_slots(self) -> None:
        while self._waiting and self._free:
            self._free -= 1
            self._begin(self._waiting.popleft())

    def _begin(self, visit: Visit) -> None:
        tokens = np.repeat(np.array(visit.blocks, np.int32), BLOCK)[: visit.tokens]
        work = _Work(visit, tokens, self.store.match(EXACT, tokens))
        has_all = work.match.tokens == visit.tokens
        ready = self._events.now if has_all or not self._tier.settings.budget else self._load(work)
        self._events.at(ready, lambda: self._queue(work))

    def _load(self, work: _Work) -> float:
        """Begin to bring what the remote tier has, if that is quicker than evaluating it; returns when it is here,
        or when it is known that it is not worth it."""
        visit, settings = work.visit, self._tier.settings
        first = work.match.tokens // BLOCK
        end = first + self._tier.leading(visit.blocks[first:])
        asked = self._events.now + settings.round_trip
        wait = self._tier.reads.wait(asked) + settings.round_trip
        size = (visit.covered(end) - visit.covered(first)) * self._machine.token_bytes
        # What the engine could have evaluated before the first byte comes is no gain.
        gained = visit.covered(end) - work.match.tokens - wait * self._machine.prefill
        if not size or not self.store.costs.worth_fetching([(int(gained), size)]):
            return asked
        work.loaded = visit.covered(end)
        return self._tier.read(asked, visit.blocks[first:end])

    def _queue(self, work: _Work) -> None:
        self._ready.append(work)
        self._evaluate_next()

    def _evaluate_next(self) -> None:
        if self._is_evaluating or not self._ready:
            return
        self._is_evaluating = True
        work = self._ready.popleft()
        self._match_again(work)
        own = work.match.tokens
        remote = max(work.loaded - own, 0)
        evaluated = work.visit.tokens - own - remote
        self.own, self.remote, self.evaluated = self.own + own, self.remote + remote, self.evaluated + evaluated
        seconds = (own + remote) * self._machine.token_bytes / self._machine.import_
        seconds += evaluated / self._machine.prefill
        self.busy += seconds
        self._events.at(self._events.now + seconds, lambda: self._first_token(work))

    def _match_again(self, work: _Work) -> None:
        """Others may have evaluated more of it while it waited."""
        before = work.match
        if self.store.advance(before.cursor, work.tokens).position > before.tokens:
            work.match = self.store.match(EXACT, work.tokens)
            self.store.release(before)

    def _first_token(self, work: _Work) -> None:
        now = self._events.now
        self.first_tokens.append((now, now - work.visit.at))
        self._keep(work)
        seconds = work.visit.answer / self._machine.decode
        self.busy += seconds / self._machine.slots
        self._events.at(now + seconds, self._answer_ended)
        self._is_evaluating = False
        self._evaluate_next()

    def _keep(self, work: _Work) -> None:
        """In its own store, and behind that in the remote tier."""
        visit, cursor = work.visit, work.match.cursor
        new: dict[int, int] = {}
        for begin in range(work.match.tokens, visit.tokens, BLOCK):
            tokens = work.tokens[begin : begin + BLOCK]
            size = len(tokens) * self._machine.token_bytes
            if begin >= work.loaded:
                new[visit.blocks[begin // BLOCK]] = size
            if cursor.position == begin:  # otherwise there was no room for what comes before it
                cursor = self.store.insert(cursor, tokens, self._payload[:size], (), fork=False)
        self.store.release(work.match)
        if self._tier.settings.budget:
            self._tier.write(self._events, new)

    def _answer_ended(self) -> None:
        self.running -= 1
        self._free += 1
        self._answered()
        self._fill_slots()
