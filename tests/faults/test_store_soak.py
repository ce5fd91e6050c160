"""Users who come once and never again, for ever: nothing grows but what is in the budgets."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.kv.disk import index
from emberkeep.kv.entries import Ghosts
from emberkeep.kv.store import KvStore
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import EXACT, Lineage, private_namespace
from helpers.chance import times
from helpers.growth import descriptors, sizes_below, threads
from helpers.kv_building import PIECES, check_ledger, new_store

pytestmark = pytest.mark.slow

USERS = times(240)
REMEMBERED = min(200, USERS // 4)
"""Instead of tens of thousands: of what is remembered by number and not by bytes."""
TOKENS = 40
PAYLOAD = memoryview(bytes(1000))
RAM = 30 * len(PAYLOAD)
DISK = 60_000
INDEX = 8 << 20
"""SQLite lets its log grow to 4 MB before it writes it back."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("emberkeep.kv.disk.transfers._PAUSE_S", 0.001)
    monkeypatch.setattr("emberkeep.kv.disk.transfers._LOOK_AGAIN", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.entries.MOST_ENTRIES", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.entries.CHANGES_LIMIT", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.disk.index.GHOST_LIMIT", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.disk.index._MOST_UNTOLD", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.entries.Ghosts", lambda: Ghosts(REMEMBERED))


def visit(store: KvStore, number: int) -> None:
    """One conversation of one user, as a request has it: looked for, computed, stored, looked for again."""
    lineage = Lineage(private_namespace(f"user-{number}", "salt" if number % 3 else ""))
    tokens = np.random.default_rng(number).integers(32, 127, TOKENS, dtype=np.int32)
    store.refresh()
    store.readahead(lineage, b"Hello.", PIECES)
    store.peek_elsewhere(lineage, tokens, 0, _moving())
    store.release(store.match(lineage, tokens))
    cursor = store.insert(store.advance(store.origin(lineage), tokens), tokens, PAYLOAD, ((3, 9),), fork=False)
    store.turn_ended(Label(EntryKind.CONVERSATION, f"conversation {number}", "Hello."), cursor)
    match = store.match(lineage, tokens)
    for chunk in match.chunks:
        store.fetch(chunk, lambda: None)
    store.release(match)
    if number % 10 == 0:
        store.sweep()
    if number % 25 == 0:
        store.catalogue.gc()


def _moving() -> Any:
    from emberkeep.types.lineage import Approximation

    return Approximation()


def same_prompt(store: KvStore, number: int) -> None:
    """Another conversation of a user who always says the same: its state is there already."""
    tokens = np.arange(32, 72, dtype=np.int32)
    store.release(store.match(EXACT, tokens))
    cursor = store.insert(store.origin(EXACT), tokens, PAYLOAD, (), fork=True)
    store.turn_ended(Label(EntryKind.CONVERSATION, f"again {number}", "Hello."), cursor)


class ReadOnly:
    """Nothing below `folder` can be changed any more."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        for name in ("rename", "replace", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))
        monkeypatch.setattr(os, "open", self._opening(os.open))
        monkeypatch.setattr(index.Index, "_write", self._refusing_rows)

    def _refusing(self, real: Any) -> Any:
        def run(path: Any, *rest: Any, **more: Any) -> Any:
            if str(path).startswith(self._folder):
                raise OSError(errno.EROFS, "Read-only file system")
            return real(path, *rest, **more)

        return run

    def _opening(self, real: Any) -> Any:
        refusing = self._refusing(real)

        def run(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            changes = flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            return int((refusing if changes else real)(path, flags, *rest, **more))

        return run

    @staticmethod
    def _refusing_rows(_: object, sql: str, values: list[Any]) -> None:
        if values:
            raise OSError(errno.EROFS, "attempt to write a readonly database")


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*/**/*") if path.is_file())


@pytest.fixture(params=["on", "off", "read-only"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvStore]:
    store = new_store(None if request.param == "off" else tmp_path, warm=RAM, cold=DISK)
    if request.param == "read-only":
        for number in range(40):
            visit(store, 10**7 + number)
        store.flush()
        ReadOnly(tmp_path, monkeypatch)
    yield store
    monkeypatch.undo()
    store.close()


def test_users_who_come_once_leave_nothing_that_grows(store: KvStore, tmp_path: Path) -> None:
    for number in range(USERS // 2):
        visit(store, number)
        same_prompt(store, number)
    store.flush()
    half, open_files, running = sizes_below(store), descriptors(), threads()
    series = len(str(store.stats()).split(","))
    for number in range(USERS // 2, USERS):
        visit(store, number)
        same_prompt(store, number)
    store.flush()
    sizes = sizes_below(store)
    print({path: size for path, size in sizes.items() if size > 20})
    # A few chunks more or less are in RAM, on disk or on their way.
    assert {path: size for path, size in sizes.items() if size > max(REMEMBERED, half.get(path, 0) + 64)} == {}
    assert len(str(store.stats()).split(",")) == series
    assert descriptors() <= open_files + 3
    assert threads() <= running + 1
    assert bytes_on_disk(tmp_path) <= DISK
    assert sum(path.stat().st_size for path in tmp_path.glob("*/index.db*")) < INDEX
    check_ledger(store)
