"""Ray Serve's router of the replicas, with Emberkeep's policy in it.

Ray makes the router by itself, in the gateway's process and on a thread of its own, from a copy of this module:
what the gateway has to tell it, and to hear from it, goes over the board of `gateway`, of which there is one.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from emberkeep.cluster import gateway
from emberkeep.routing import Affinity, Replica, RouteKeys


class ReplicaRouter(RequestRouter):
    """Belongs to the thread of its event loop."""

    def initialize_state(self) -> None:
        self._routing, self._slots = Affinity(), gateway.board.slots
        self._running: Counter[ReplicaID] = Counter()
        self._names: dict[ReplicaID, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        gateway.board.attach(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best first, each alone in its rank: among those of one rank Ray would choose by load."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        keys = _keys_of(pending_request)
        known = {self._name(replica): replica for replica in candidate_replicas}
        if keys.replica in known:
            return [[known[keys.replica]]]
        shown = [Replica(name, self._running[each.replica_id], self._slots) for name, each in known.items()]
        ranked = self._routing.rank(keys, shown)
        return [[known[replica.id]] for replica in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        if replica := self._replicas.get(replica_id):
            self._routing.sent(_keys_of(pending_request), self._name(replica))

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id] -= 1
        if self._running[replica_id] <= 0:
            del self._running[replica_id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._show_present()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._names = {each: name for each, name in self._names.items() if each in self._replicas}
        self._loop = asyncio.get_running_loop()
        self._show_present()

    def learn_soon(self, keys: RouteKeys, replica: str) -> None:
        """From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._learn, keys, replica)

    def _learn(self, keys: RouteKeys, replica: str) -> None:
        for each in self._replicas.values():
            if each.replica_id.unique_id == replica:
                self._routing.sent(keys, self._name(each))

    def _show_present(self) -> None:
        gateway.board.show(frozenset(replica_id.unique_id for replica_id in self._replicas))

    def _name(self, replica: RunningReplica) -> str:
        """What its data folder is called, once it has told that: what is stored there outlives the replica, and
        who takes the folder next is asked next."""
        name = str(replica.routing_stats.get("home") or replica.replica_id.unique_id)
        before = self._names.setdefault(replica.replica_id, name)
        if before != name:
            self._names[replica.replica_id] = name
            self._routing.renamed(before, name)
        return name


def _keys_of(pending: PendingRequest | None) -> RouteKeys:
    given = pending.kwargs.get("keys") if pending is not None else None
    return given if isinstance(given, RouteKeys) else RouteKeys()
