"""Ways of choosing a replica that the gateway's own is measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Protocol

from emberkeep.routing import Affinity, Replica, RouteKeys


class Routing(Protocol):
    """Belongs to one thread. Never blocks."""

    def rank(self, keys: RouteKeys, replicas: Sequence[Replica]) -> list[Replica]:
        """The best first. Nothing is remembered by asking."""

    def sent(self, keys: RouteKeys, replica: str) -> None:
        """It is answered there."""

    def renamed(self, before: str, now: str) -> None:
        """A replica is known by another name."""


class RoundRobin:
    """Replicas take turns, whatever they know and have to do."""

    def __init__(self) -> None:
        self._turn = count()

    def rank(self, keys: RouteKeys, replicas: Sequence[Replica]) -> list[Replica]:
        first = next(self._turn) % max(len(replicas), 1)
        return [*replicas[first:], *replicas[:first]]

    def sent(self, keys: RouteKeys, replica: str) -> None:
        """It does not matter."""

    def renamed(self, before: str, now: str) -> None:
        """It does not matter."""


class LeastLoaded(RoundRobin):
    """The one with the least to do."""

    def rank(self, keys: RouteKeys, replicas: Sequence[Replica]) -> list[Replica]:
        return sorted(super().rank(keys, replicas), key=lambda replica: replica.load)


POLICIES: Mapping[str, type[Affinity | RoundRobin]] = {
    "affinity": Affinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
