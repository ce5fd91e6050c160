"""Which replica answers a request: the one that has its conversation, else its longest beginning, else the one
with the least to do.

Nothing here asks a replica what it holds: what was sent there is remembered, which is cheap, is right until the
replica evicts it, and costs no more than an evaluation where it is not. A replica that is much busier than another
gives way: what it knows is shared, or computed once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from emberkeep.values import dataclass

_MOST_CONVERSATIONS = 65_536
_MOST_BEGINNINGS = 524_288
"""Remembered ones; the latest stay. Together they take about 100 MB where all are in use."""
_WORTH_FOLLOWING = 0.1
"""The part of a request that a replica must have seen before, for this to decide where it goes."""
_SLACK = 1.0
"""How much busier than the least busy a replica may be for requests to follow what it has."""


@dataclass(frozen=True, slots=True)
class RouteKeys:
    """What a request is routed by."""

    conversation: str = ""
    """Its id, with the user that it belongs to; empty where the client gave none."""
    beginnings: tuple[int, ...] = ()
    """Hashes of its first block, of its first two, and so on: equal ones mean equal beginnings."""
    replica: str = ""
    """The only one that may answer it; empty: any."""


@dataclass(frozen=True, slots=True)
class Replica:
    id: str
    running: int
    """Requests that were sent there and are not answered yet."""
    slots: int = 1
    """Those that it works on at a time."""

    @property
    def load(self) -> float:
        return self.running / self.slots


class Affinity:
    """Requests follow what is known of them. Belongs to one thread; never blocks."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._turn = count()

    def rank(self, keys: RouteKeys, replicas: Sequence[Replica]) -> list[Replica]:
        """The best first. Nothing is remembered by asking."""
        if not replicas:
            return []
        loads = [replica.load for replica in replicas]
        limit = min(loads) + _SLACK
        home, known = self._homes.get(keys.conversation), self._known(keys.beginnings)
        worth = max(len(keys.beginnings) * _WORTH_FOLLOWING, 1)
        first = next(self._turn) % len(replicas)  # those with equal loads take turns

        def order(place: int) -> tuple[bool, bool, int, float, int]:
            name, load = replicas[place].id, loads[place]
            depth = known.get(name, 0)
            followed = depth if depth >= worth else 0
            return load > limit, name != home, -followed, load, (place - first) % len(replicas)

        return [replicas[place] for place in sorted(range(len(replicas)), key=order)]

    def sent(self, keys: RouteKeys, replica: str) -> None:
        """A request is answered there."""
        if keys.conversation:
            self._homes[keys.conversation] = replica
            self._homes.move_to_end(keys.conversation)
        for beginning in reversed(keys.beginnings):  # the shortest last: it is the one that others share
            holders = self._holders.get(beginning, ())
            if replica not in holders:
                self._holders[beginning] = (*holders, replica)
            self._holders.move_to_end(beginning)
        _keep_latest(self._homes, _MOST_CONVERSATIONS)
        _keep_latest(self._holders, _MOST_BEGINNINGS)

    def renamed(self, before: str, now: str) -> None:
        """A replica is known by another name."""
        for conversation, home in self._homes.items():
            if home == before:
                self._homes[conversation] = now
        for beginning, holders in self._holders.items():
            if before in holders:
                self._holders[beginning] = tuple({now if one == before else one: None for one in holders})

    def _known(self, beginnings: Sequence[int]) -> dict[str, int]:
        """How many blocks of a request each replica has seen."""
        depths: dict[str, int] = {}
        for depth in range(len(beginnings), 0, -1):
            for holder in self._holders.get(beginnings[depth - 1], ()):
                depths.setdefault(holder, depth)
        return depths


def _keep_latest(known: OrderedDict[str, str] | OrderedDict[int, tuple[str, ...]], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)
