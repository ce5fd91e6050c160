"""Which slot a conversation would like: the one it had, or at first the one with the fewest others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from emberkeep.types import Lineage


class Affinity:
    """The `limit` conversations used last. Belongs to the engine's thread."""

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._pinned: OrderedDict[tuple[Lineage, str], int] = OrderedDict()

    def slot_for(self, lineage: Lineage, key: str, wanted: int | None = None) -> int:
        """`wanted`: what the client asked for, if it exists."""
        conversation = lineage, key
        slot = self._pinned.get(conversation)
        if wanted is not None and 0 <= wanted < self._slots:
            slot = wanted
        if slot is None:
            load = Counter(self._pinned.values())
            slot = min(range(self._slots), key=lambda candidate: load[candidate])
        self._pinned[conversation] = slot
        self._pinned.move_to_end(conversation)
        if len(self._pinned) > self._limit:
            self._pinned.popitem(last=False)
        return slot

    def forget(self, owners: Container[str]) -> None:
        for conversation in [c for c in self._pinned if c[0].owner in owners]:
            del self._pinned[conversation]
