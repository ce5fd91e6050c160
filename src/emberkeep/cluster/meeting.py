"""Where the router and the gateway meet: they live on two threads of one process, and Ray makes the router."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from emberkeep.routing import RouteKeys

Present = Callable[[frozenset[str]], None]


class Learning(Protocol):
    """A router."""

    def learn_soon(self, keys: RouteKeys, replica: str) -> None:
        """From any thread."""


class Board:
    """This process has one. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._router: Learning | None = None
        self._watcher: Present = lambda present: None
        self._present: frozenset[str] = frozenset()
        self.slots = 1
        """Requests that a replica works on at a time; set before there is a router."""

    def attach(self, router: Learning) -> None:
        with self._lock:
            self._router = router

    def watch(self, watcher: Present) -> None:
        """It gets the replicas that take requests, now and whenever they change, on the router's thread."""
        with self._lock:
            self._watcher = watcher
        watcher(self._present)

    def show(self, present: frozenset[str]) -> None:
        with self._lock:
            self._present = present
            watcher = self._watcher
        watcher(present)

    def learn(self, keys: RouteKeys, replica: str) -> None:
        """What has these keys was answered there."""
        with self._lock:
            router = self._router
        if router is not None:
            router.learn_soon(keys, replica)


board = Board()
