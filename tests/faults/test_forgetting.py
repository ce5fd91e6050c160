"""To forget is to leave nothing: whatever was damaged, refused, evicted or being written, here or elsewhere."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import StoreFailed
from emberkeep.kv.disk import chunkfile
from emberkeep.kv.store import KvStore
from emberkeep.types.lineage import Lineage
from helpers.canaries import TOKENS, Canary, found_in
from helpers.chance import seed, times
from helpers.kv_building import chunk_files, chunks_of, load, new_store, reopened

pytestmark = pytest.mark.usefixtures("quick_disk")

HISTORIES = times(12)
STEPS = 40
ANN, BOB = Canary(0), Canary(1)


def traces_in(store: KvStore, canary: Canary) -> list[str]:
    """What a process shows of them."""
    store.refresh()
    shown = [str(store.stats()), *(str(entry) for entry in store.catalogue.entries())]
    shown += map(str, store.catalogue.lineages())
    shown += [str(ghost) for ghost in store._ledger.entries.ghosts._by_key.values()]
    shown += [str(vars(store._ledger.entries.changes))]
    return [text for text in shown if canary.user in text]


def assert_gone(folder: Path, canary: Canary, *stores: KvStore) -> None:
    for store in stores:
        assert traces_in(store, canary) == []
        assert load(store, canary.tokens, namespace=canary.namespace) == 0
        assert store.corpus.find(Lineage(canary.namespace), canary.tokens[:-1], 1) is None
    assert found_in(folder, canary) == []


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[offset % len(data)] ^= 1
        path.write_bytes(data)


def test_canaries_are_found_where_they_are(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    ANN.keep(store, TOKENS)
    store.flush()
    found = found_in(tmp_path, ANN)
    assert len([name for name in found if name.endswith(".kv")]) == 4
    assert any("index.db" in name for name in found)
    assert found_in(tmp_path, BOB) == []
    store.close()


@pytest.mark.parametrize("place", [0, 60, 80, -1])
def test_what_hung_below_a_damaged_chunk_goes_with_its_user(tmp_path: Path, place: int) -> None:
    store = new_store(tmp_path)
    ANN.keep(store, TOKENS)
    BOB.keep(store, TOKENS)
    store = reopened(store, tmp_path)
    match = store.match(Lineage(ANN.namespace), ANN.tokens)
    store.release(match)
    flip(store._disk.files._path(match.segments[1].chunk.key), place)
    load(store, ANN.tokens, namespace=ANN.namespace)
    store.catalogue.forget_user(ANN.user)
    assert_gone(tmp_path, ANN, store)
    store = reopened(store, tmp_path)
    assert_gone(tmp_path, ANN, store)
    assert load(store, BOB.tokens, namespace=BOB.namespace) == TOKENS
    store.close()


def test_what_another_process_has_in_ram_on_disk_and_in_its_queue_goes_too(tmp_path: Path) -> None:
    here, there = new_store(tmp_path), new_store(tmp_path)
    reached: list[bool] = []
    there.holders.join(
        "all", there, lambda names: reached.append(ANN.namespace in names and BOB.namespace not in names)
    )
    ANN.keep(there, 300)
    there.flush()
    ANN.keep(there, TOKENS)
    here.catalogue.forget_user(ANN.user)
    there.flush()
    assert_gone(tmp_path, ANN, here, there)
    assert reached == [True]
    there.close()
    here = reopened(here, tmp_path)
    assert_gone(tmp_path, ANN, here)
    here.close()


def test_a_user_who_comes_back_is_kept_again(tmp_path: Path) -> None:
    here, there = new_store(tmp_path), new_store(tmp_path)
    ANN.keep(there, TOKENS)
    there.flush()
    here.catalogue.forget_user(ANN.user)
    there.refresh()
    there.flush()  # the old files are gone, else new ones of the same name would be let go with them
    ANN.keep(there, TOKENS)
    there.flush()
    here.refresh()
    assert load(here, ANN.tokens, namespace=ANN.namespace) == TOKENS
    there.close()
    here = reopened(here, tmp_path)
    assert load(here, ANN.tokens, namespace=ANN.namespace) == TOKENS
    here.close()


def test_stores_of_other_models_are_swept_too(tmp_path: Path) -> None:
    other = new_store(tmp_path, fingerprint=bytes(32))
    ANN.keep(other, TOKENS)
    BOB.keep(other, TOKENS)
    other.close()
    store = new_store(tmp_path)
    removed = store.catalogue.forget_user(ANN.user)
    assert removed.bytes > 0
    assert found_in(tmp_path, ANN) == []
    store.close()
    other = new_store(tmp_path, fingerprint=bytes(32))
    assert_gone(tmp_path, ANN, other)
    assert other.match(Lineage(BOB.namespace), BOB.tokens).tokens == TOKENS
    other.close()


@pytest.mark.parametrize("moment", ["staging", "publishing"])
def test_what_is_being_written_just_then_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    here, there = new_store(tmp_path), new_store(tmp_path)
    begun, forgetting = threading.Event(), threading.Thread(target=lambda: here.catalogue.forget_user(ANN.user))
    begin = here._disk.files.forgotten.begin
    monkeypatch.setattr(here._disk.files.forgotten, "begin", lambda user: (begin(user), begun.set())[0])

    def meanwhile(real: Callable[..., Any], *, wait: bool) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            done = real(*arguments)
            if not forgetting.is_alive() and not begun.is_set():
                forgetting.start()
                assert not wait or begun.wait(20)
            return done

        return run

    if moment == "staging":
        monkeypatch.setattr(chunkfile, "write", meanwhile(chunkfile.write, wait=True))
    else:  # where no other process can begin to forget: it has to wait for us
        monkeypatch.setattr(there._disk.files, "_publish", meanwhile(there._disk.files._publish, wait=False))
    ANN.keep(there, TOKENS)
    there.flush()
    forgetting.join()
    assert_gone(tmp_path, ANN, here, there)
    here.close()
    there.close()


def test_who_was_being_forgotten_when_a_process_died_is_gone_at_the_next_opening(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    ANN.keep(store, TOKENS)
    store.flush()
    store._disk.files.forgotten.begin(ANN.user)  # and then it was killed
    again = new_store(tmp_path)
    assert_gone(tmp_path, ANN, again)
    assert again._disk.files.forgotten.unfinished() == []
    again.close()
    store.close()


def test_a_lost_record_costs_ram_and_nothing_else(tmp_path: Path) -> None:
    here, there = new_store(tmp_path), new_store(tmp_path)
    here.catalogue.forget_user("another user")
    there.refresh()
    ANN.keep(there, TOKENS)
    there.flush()
    (tmp_path / "forgotten.json").write_bytes(b"scribble")
    BOB.keep(here, TOKENS)
    here.flush()
    here.catalogue.forget_user(BOB.user)
    there.refresh()
    assert load(there, ANN.tokens, namespace=ANN.namespace) == TOKENS
    assert [entry.user for entry in there.catalogue.entries()] == [ANN.user]
    assert_gone(tmp_path, BOB, here, there)
    here.close()
    there.close()


def test_a_user_is_forgotten_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(tmp_path)
    ANN.keep(store, TOKENS)
    store.flush()
    real = os.open

    def full_while_there_are_files(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and ".tmp-" in str(path) and chunk_files(tmp_path):
            raise OSError(28, "No space left on device")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full_while_there_are_files)
    store.catalogue.forget_user(ANN.user)
    assert_gone(tmp_path, ANN, store)
    store.close()


def test_a_disk_that_refuses_is_said_aloud_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)
    ANN.keep(store, TOKENS)
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StoreFailed, match="Input/output error"):
            store.catalogue.forget_user(ANN.user)
        assert load(store, ANN.tokens, namespace=ANN.namespace) == 0
    store._disk._look_again_at = 0.0
    store.sweep()
    store.flush()
    assert_gone(tmp_path, ANN, store)
    store.close()


def test_rows_that_were_read_before_their_user_was_forgotten_are_not_entered_after_it(tmp_path, monkeypatch):
    here, there = new_store(tmp_path), new_store(tmp_path)
    ANN.keep(there, TOKENS)
    there.flush()
    have_read, go_on = threading.Event(), threading.Event()
    real = here._disk.files.index.new_rows

    def new_rows(*, everything: bool = False):
        rows = real(everything=everything)
        have_read.set()
        assert go_on.wait(20)
        return rows

    monkeypatch.setattr(here._disk.files.index, "new_rows", new_rows)
    reading = threading.Thread(target=here.refresh)
    reading.start()
    assert have_read.wait(20)
    there.catalogue.forget_user(ANN.user)
    noticing = threading.Thread(target=here.notice_forgotten)
    noticing.start()
    noticing.join(0.2)  # it may have to wait for the other
    go_on.set()
    reading.join()
    noticing.join()
    monkeypatch.undo()
    assert_gone(tmp_path, ANN, here, there)
    here.close()
    there.close()


def test_rows_of_a_user_who_is_just_being_forgotten_are_not_entered(tmp_path, monkeypatch):
    here, there = new_store(tmp_path), new_store(tmp_path)
    ANN.keep(there, TOKENS)
    there.flush()
    real = here._disk.files.sweep

    def sweep(whose):
        here.refresh()  # by another thread
        return real(whose)

    monkeypatch.setattr(here._disk.files, "sweep", sweep)
    here.catalogue.forget_user(ANN.user)
    assert_gone(tmp_path, ANN, here, there)
    here.close()
    there.close()


# ── whatever happened before ─────────────────────────────────────────────────────────────────────


class History:
    """Two processes on one folder, to which things happen."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.users = [Canary(number) for number in range(5)]
        self.forgotten: set[Canary] = set()
        self.cold = self.chance.choice([1 << 30, 14_000])
        self.stores = [self._open(), self._open()]
        self.refused = 0
        self._patch(monkeypatch)

    def _open(self) -> KvStore:
        return new_store(self.folder, warm=self.chance.choice([4_000, 1 << 30]), cold=self.cold)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def scarce(path: Any, *rest: Any, **more: Any) -> int:
            if self.refused and str(path).startswith(str(self.folder)):
                self.refused -= 1
                raise OSError(24, "Too many open files")
            return real(path, *rest, **more)

        monkeypatch.setattr(os, "open", scarce)

    def step(self) -> None:
        often = [self.keep] * 3
        once = [self.load, self.flush, self.damage, self.swap, self.run_short]
        act = self.chance.choice([*often, *once, self.refresh, self.restart, self.gc, self.forget])
        act(self.chance.choice(self.stores))

    def keep(self, store: KvStore) -> None:
        user = self.chance.choice(self.users)
        store.refresh()
        self.forgotten.discard(user)
        user.keep(store, self.chance.randrange(1, TOKENS))

    def load(self, store: KvStore) -> None:
        user = self.chance.choice(self.users)
        load(store, user.tokens, namespace=user.namespace)

    def flush(self, store: KvStore) -> None:
        store.flush()

    def refresh(self, store: KvStore) -> None:
        store.refresh()

    def gc(self, store: KvStore) -> None:
        store.sweep()

    def damage(self, store: KvStore) -> None:
        if files := chunk_files(self.folder):
            path = self.chance.choice(files)
            with suppress(FileNotFoundError):  # a writer's thread removes some meanwhile
                if self.chance.random() < 0.3:
                    os.truncate(path, self.chance.randrange(200))
                else:
                    flip(path, self.chance.randrange(10_000))
            canary = self.chance.choice(self.users)
            load(store, canary.tokens, namespace=canary.namespace)

    def swap(self, store: KvStore) -> None:
        if len(files := chunk_files(self.folder)) > 1:
            one, other = self.chance.sample(files, 2)
            with suppress(FileNotFoundError):
                kept = one.read_bytes()
                one.write_bytes(other.read_bytes())
                other.write_bytes(kept)

    def run_short(self, store: KvStore) -> None:
        self.refused = self.chance.randrange(1, 6)
        self.load(store)
        self.refused = 0

    def restart(self, store: KvStore) -> None:
        self.stores.remove(store)
        store.close()
        self.stores.append(self._open())

    def forget(self, store: KvStore) -> None:
        user = self.chance.choice(self.users)
        self.refused = self.chance.choice([0, 0, 1, 3])
        try:
            store.catalogue.forget_user(user.user)
        except StoreFailed:
            self.refused = 0
            store.catalogue.forget_user(user.user)
        self.refused = 0
        # What another process is just writing it gives up when that is written.
        for other in self.stores:
            other.flush()
        self.forgotten.add(user)

    def check(self) -> None:
        for user in self.forgotten:
            assert_gone(self.folder, user, *self.stores)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(HISTORIES))
def test_whatever_happened_before_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("emberkeep.kv.disk.transfers._PAUSE_S", 0.01)
    history = History(tmp_path, seed(number), monkeypatch)
    for _ in range(STEPS):
        history.step()
    for user in history.users[:3]:
        history.stores[0].catalogue.forget_user(user.user)
        history.forgotten.add(user)
    for store in history.stores:
        store.flush()
    history.check()
    for store in list(history.stores):
        history.restart(store)
    history.check()
    for store in history.stores:
        assert all(chunk.pins == 0 for chunk in chunks_of(store))
        store.close()
    history.stores = []
    history.check()
