"""The stores of models that no process has open: what outlives its TTL there is deleted by the others."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.folders import INDEX, is_unused, last_change, remove_if_unused, stores_under
from emberkeep.kv.disk.index import Unreadable, is_of_this_version, read_meta
from emberkeep.kv.keys import store_name
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import Keeping, StoreClock, steady_wall
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")


@dataclass(frozen=True, slots=True)
class _Seen:
    changed: float
    due: float
    """When something of it expires, in seconds since 1970."""


class UnusedStores:
    """Looks after those of one root. Safe to use from any thread; blocks on disk. Never raises."""

    def __init__(self, root: Path, keeping: Keeping, wall: Callable[[], float] | None = None) -> None:
        self._root = root
        self._keeping = keeping
        self._wall = wall or steady_wall()
        self._lock = threading.Lock()
        self._seen: dict[Path, _Seen] = {}

    def sweep(self) -> None:
        """Delete what has outlived its TTL. Opens those stores only in which something may have."""
        with self._lock:
            try:
                due = [path for path in stores_under(self._root) if self._is_due(path) and is_unused(path)]
            except OSError as error:
                log.warning("cannot look for state that has expired: %s", error)
                return
            for path in due:
                self._expire(path)

    def _is_due(self, path: Path) -> bool:
        seen = self._seen.get(path)
        return seen is None or seen.changed != last_change(path) or self._wall() >= seen.due

    def _expire(self, path: Path) -> None:
        try:
            fingerprint = _fingerprint(path)
            if fingerprint is None:
                self._give_up(path)
            else:
                self._open(path, fingerprint)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            log.warning("the index of %s cannot be understood: %r", path, error)
            self._give_up(path)
        except OSError as error:
            log.warning("cannot look for state that has expired in %s: %s", path, error)

    def _open(self, path: Path, fingerprint: bytes) -> None:
        """To open it is to delete what has expired. Raises OSError."""
        last_used = (path / INDEX).stat()
        files = ChunkFiles(path.parent, fingerprint)
        store = KvStore(
            fingerprint,
            Budgets(ram=0, disk=sys.maxsize),
            files,
            keeping=replace(self._keeping, clock=lambda saved: StoreClock(saved, wall=self._wall)),
        )
        try:
            due = self._wall() + store.transact(_next_expiry)
        finally:
            store.close()
        os.utime(path / INDEX, ns=(last_used.st_atime_ns, last_used.st_mtime_ns))  # looking is not using
        self._seen[path] = _Seen(last_change(path), due)

    def _give_up(self, path: Path) -> None:
        """It cannot be told when what is in it expires: it goes when all of it has."""
        if self._wall() - last_change(path) > max(self._keeping.ttl.values()) and remove_if_unused(path):
            log.info("removed a store that has expired, and that cannot be read: %s", path)


def _next_expiry(ledger: Ledger) -> float:
    """Seconds until something has outlived its TTL that has not yet; infinite where nothing does."""
    ttl, now = ledger.keeping.ttl, ledger.clock.now()
    ends = [entry.used_at + ttl[entry.ttl] for entry in ledger.entries]
    ends += [chunk.expires for chunk in ledger.tree]
    return min((end - now for end in ends if end > now), default=inf)


def _fingerprint(path: Path) -> bytes | None:
    """Whose store it is; None where its index does not say. Raises OSError for what may pass."""
    index = path / INDEX
    if not index.exists() or not index.stat().st_size:
        return None
    try:
        found = read_meta(index)["fingerprint"]
        return found if store_name(found) == path.name and is_of_this_version(index) else None
    except (Unreadable, LookupError, TypeError):
        return None
