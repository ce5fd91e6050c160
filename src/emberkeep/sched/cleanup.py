"""Cleaning up: what has to happen whatever else has gone wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("emberkeep.sched")


def insist(action: Callable[[], object], what: str) -> bool:
    """Try twice. Never raises: what goes wrong is in the log. False: it went wrong both times."""
    for _ in range(2):
        try:
            action()
            return True
        except BaseException:
            log.exception("%s failed", what)
    return False
