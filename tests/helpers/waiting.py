"""Waiting for what another thread or process does, and noticing who keeps others from running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import monotonic, sleep

PATIENCE_S = 60.0


def eventually(is_so: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Whether it comes about in time."""
    deadline = monotonic() + within_s
    while not is_so():
        if monotonic() > deadline:
            return False
        sleep(0.005)
    return True


_EVERY_S = 0.005


class Heartbeat:
    """`worst_s`: the longest time that it was kept from running by this process.

    Another thread that holds the interpreter's lock computes meanwhile. On a busy machine the process has to wait
    for a core now and then; it does not compute then, and nothing in it is to blame.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        wall, computed = time.monotonic(), time.process_time()
        while not self._over.wait(_EVERY_S):
            now, used = time.monotonic(), time.process_time()
            self.worst_s = max(self.worst_s, min(now - wall, used - computed))
            wall, computed = now, used
