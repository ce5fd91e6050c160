"""Waiting for what another thread or process does."""

from __future__ import annotations

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
