"""Mappings that hold only what was set or used latest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """Beyond `most` keys those go that were neither set nor used for longest. For one thread at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)

    def use(self, key: K) -> V | None:
        """Its value, or None; from now on it is the newest."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)


def drop_owners(known: dict[Any, Any], owners: Container[str]) -> None:
    """Remove the keys whose first part is one of these."""
    for key in [key for key in known if key[0] in owners]:
        del known[key]
