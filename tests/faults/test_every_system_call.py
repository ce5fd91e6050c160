"""Whatever system call fails, once or from then on, as in the tests of SQLite: files, index and ledger agree when
the disk is well again, the budget holds, and what was readable is found."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import StoreFailed
from emberkeep.kv.disk import index
from emberkeep.kv.store import KvStore
from emberkeep.types.lineage import Lineage
from helpers.canaries import TOKENS, Canary, found_in
from helpers.chance import seed, times
from helpers.kv_building import check_ledger, chunk_files, load, new_store

SAMPLED = times(10)
"""System calls that are tried of each kind, or all that there are."""
ERRORS = [errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EROFS]
BUDGET = 40_000
STAYS, GROWS, GOES, SPOILT, COMES = (Canary(number) for number in range(5))
CROWD = [Canary(number) for number in range(10, 22)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("emberkeep.kv.disk.transfers._PAUSE_S", 0.02)
    monkeypatch.setattr("emberkeep.kv.disk.tier._RETRY_S", 0.0)


def filled(folder: Path) -> None:
    """What a process has left that is gone: four users, and one of them has a damaged file."""
    store = new_store(folder)
    STAYS.keep(store, TOKENS)
    GROWS.keep(store, 150)
    GOES.keep(store, TOKENS)
    SPOILT.keep(store, TOKENS)
    store.flush()
    match = store.match(Lineage(SPOILT.namespace), SPOILT.tokens)
    path = store._disk.files._path(match.segments[1].chunk.key)
    store.release(match)
    store.close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@dataclass
class Life:
    """What one process did, and what it was told."""

    store: KvStore | None = None
    is_forgotten: bool = False
    errors: list[BaseException] = field(default_factory=list)

    def run(self, folder: Path, budget: int, users: list[Canary]) -> None:
        try:
            self.store = store = new_store(folder, cold=budget)
        except OSError as error:
            self.errors.append(error)
            return
        for user in (STAYS, GROWS, SPOILT):
            load(store, user.tokens, namespace=user.namespace)
        GROWS.keep(store, TOKENS)
        for user in users:
            user.keep(store, TOKENS)
        store.flush()
        store.refresh()
        try:
            store.catalogue.forget_user(GOES.user)
            self.is_forgotten = True
        except StoreFailed as error:
            self.errors.append(error)
        store.sweep()
        store.flush()


def check_agreement(folder: Path, store: KvStore, budget: int) -> None:
    """Files, index and ledger tell the same, and all of it is counted."""
    check_ledger(store)
    ledger, files = store._ledger, store._disk.files
    waiting = [row.key for row in ledger.orphans]
    counted = {*(c.key for c in ledger.tree if c.on_disk), *waiting, *ledger.to_remove, *files._strays}
    assert counted == {bytes.fromhex(path.stem) for path in chunk_files(folder)}
    assert {row.key for row in files.index.rows_after(0)} == counted - set(ledger.to_remove)
    files.clean_up()
    on_disk = sum(path.stat().st_size for path in folder.glob("*/*/**/*") if path.is_file())
    assert ledger.disk_bytes + files.side_bytes == on_disk <= budget
    assert files.index._untold_rows == {} and files.index._untold_removals == set()


def heal(store: KvStore) -> None:
    """The disk is well again: whatever was owed is done when the store is next idle."""
    for _ in range(3):
        with store._disk.writer._changed:
            store._disk.writer._paused_until = 0.0
        store._disk.writer.wake()
        store.flush()


def check_what_is_left(folder: Path, life: Life, budget: int) -> None:
    if life.store is not None:
        if not life.is_forgotten:
            life.store.catalogue.forget_user(GOES.user)
        COMES.keep(life.store, TOKENS)
        heal(life.store)
        assert found_in(folder, GOES) == []
        check_agreement(folder, life.store, budget)
        life.store.close()
    again = new_store(folder, cold=budget)
    if life.store is None:
        again.catalogue.forget_user(GOES.user)
    heal(again)
    check_agreement(folder, again, budget)
    assert found_in(folder, GOES) == []
    assert again.counters.damaged_chunks <= 1
    if budget > BUDGET:
        assert load(again, STAYS.tokens, namespace=STAYS.namespace) == TOKENS
        assert load(again, GROWS.tokens, namespace=GROWS.namespace) >= 150
        assert load(again, SPOILT.tokens, namespace=SPOILT.namespace) >= 128
        if life.store is not None:
            assert load(again, COMES.tokens, namespace=COMES.namespace) == TOKENS
    again.close()


def calls_of(folder: Path, disk: FaultyDisk, budget: int, users: list[Canary]) -> int:
    """How many system calls a life without any fault makes."""
    filled(folder)
    life = Life()
    with disk.failing(errno.EIO, 1 << 60, for_good=False):
        life.run(folder, budget, users)
    check_what_is_left(folder, life, budget)
    return disk.calls


SCENARIOS = {"room enough": (1 << 30, CROWD[:2]), "a full store": (BUDGET, CROWD)}


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failing_system_call_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, error: int, for_good: bool
) -> None:
    budget, users = SCENARIOS[scenario]
    disk = FaultyDisk(tmp_path, monkeypatch)
    most = calls_of(tmp_path / "none", disk, budget, users)
    chance = random.Random(f"{scenario} {error} {for_good}{seed() or ''}")
    calls = sorted(chance.sample(range(1, most + 1), min(SAMPLED, most)))
    hit: set[str] = set()
    for call in calls:
        folder = tmp_path / str(call)
        filled(folder)
        life = Life()
        with disk.failing(error, call, for_good=for_good):
            life.run(folder, budget, users)
        if disk.failed:
            hit.add(disk.failed)
        try:
            check_what_is_left(folder, life, budget)
        except BaseException as failure:
            failure.add_note(f"{disk.failed} number {call} of {most} failed")
            raise
        finally:
            with suppress(Exception):
                if life.store is not None:
                    life.store.close()
    print(f"{scenario}, {errno.errorcode[error]}: {len(calls)} of {most} calls, of {sorted(hit)}")
    assert hit


# ── the disk ──

_BY_PATH = ("open", "rename", "replace", "unlink", "mkdir", "rmdir", "stat", "lstat", "scandir", "listdir")
_BY_DESCRIPTOR = ("read", "pread", "preadv", "write", "fsync", "fstat")


class FaultyDisk:
    """Counts the system calls on files below `folder`, and what is asked of SQLite, in all threads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self._lock = threading.Lock()
        self._descriptors: set[int] = set()
        self._left = 0
        self._for_good = False
        self._error = 0
        self.calls = 0
        self.failed: str | None = None
        """The first call that did."""
        for name in _BY_PATH:
            monkeypatch.setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in _BY_DESCRIPTOR:
            monkeypatch.setattr(os, name, self._by_descriptor(name, getattr(os, name)))
        monkeypatch.setattr(os, "close", self._closing(os.close))
        monkeypatch.setattr(fcntl, "flock", self._by_descriptor("flock", fcntl.flock))
        monkeypatch.setattr(index, "_translated", self._by_index(index._translated))

    @contextmanager
    def failing(self, error: int, call: int, *, for_good: bool) -> Iterator[None]:
        """The `call`th system call within it fails, or all from there on."""
        with self._lock:
            self._left, self._error, self._for_good = call, error, for_good
            self.calls, self.failed = 0, None
        try:
            yield
        finally:
            with self._lock:
                self._left, self._error = 0, 0

    def _count(self, name: str) -> None:
        with self._lock:
            if not self._error:
                return
            self.calls += 1
            is_due = self.calls >= self._left if self._for_good else self.calls == self._left
            if is_due:
                self.failed = self.failed or name
                raise OSError(self._error, os.strerror(self._error))

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, *rest: Any, **more: Any) -> Any:
            is_ours = not isinstance(path, int) and os.fspath(path).startswith(self._folder)
            if is_ours:
                self._count(name)
            done = real(path, *rest, **more)
            if name == "open" and is_ours:
                self._descriptors.add(done)
            return done

        return run

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(descriptor: int, *rest: Any, **more: Any) -> Any:
            if descriptor in self._descriptors:
                self._count(name)
            return real(descriptor, *rest, **more)

        return run

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def run(descriptor: int) -> None:
            self._descriptors.discard(descriptor)
            real(descriptor)

        return run

    def _by_index(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def run() -> Iterator[None]:
            with real():
                self._count("sqlite")
                yield

        return run
