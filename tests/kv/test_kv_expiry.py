"""Where a TTL is a promise, nothing outlasts it and one sweep: in no file, also of stores that nobody has open."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import numpy as np
import pytest

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.index import Index
from emberkeep.kv.entries import Entry, Tail, Unsaved, UnsavedChanges
from emberkeep.kv.expiry import UnusedStores
from emberkeep.kv.policy import Keeping, StoreClock
from emberkeep.kv.store import Budgets, KvStore, expire_closed
from emberkeep.kv.tree import ChunkKey
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Ttl
from helpers.canaries import TOKENS, Canary, found_in
from helpers.kv_building import (
    FINGERPRINT,
    LONG,
    PLENTY,
    Time,
    check_ledger,
    chunk_files,
    chunks_of,
    file_of,
    load,
    no_space,
    prompt,
    put,
)
from helpers.waiting import eventually

ANN, BOB = Canary(0), Canary(1)
SHORT_S, LONG_S, EXTENDED_S = 300.0, 3600.0, 86_400.0
OTHER = bytes(32)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(tmp_path: Path, time: Time) -> Iterator[KvStore]:
    store = opened(tmp_path, time)
    yield store
    check_ledger(store)
    store.close()


def opened(
    folder: Path | None, time: Time, *, expire: bool = True, disk: int = PLENTY, fingerprint: bytes = FINGERPRINT
) -> KvStore:
    files = ChunkFiles(folder, fingerprint) if folder else None
    keeping = Keeping(expire=expire, clock=lambda saved: StoreClock(saved, monotonic=time, wall=time))
    return KvStore(fingerprint, Budgets(PLENTY, disk), files, keeping=keeping)


def keep(store: KvStore, canary: Canary, ttl: Ttl, length: int = TOKENS) -> str:
    """One turn of a conversation; its entry's id."""
    canary.keep(store, length)
    lineage = Lineage(canary.namespace)
    cursor = store.advance(store.origin(lineage), canary.tokens[:length])
    for entry in store.transact(lambda ledger: list(ledger.entries)):
        if entry.lineage == lineage:
            store.transact(lambda ledger, entry=entry: ledger.entries.forget(entry))
    for chunk in chunks_of(store):
        chunk.expires = 0.0 if chunk.lineage == lineage else chunk.expires
    entry = store.turn_ended(replace(canary.label, ttl=ttl), cursor)
    assert entry is not None
    return entry.id


def left_alone(folder: Path, time: Time, ttl: Ttl) -> None:
    """A store of another model, which nobody has open."""
    other = opened(folder, time, fingerprint=OTHER)
    keep(other, ANN, ttl)
    other.close()


def assert_gone(folder: Path, canary: Canary, *stores: KvStore) -> None:
    for store in stores:
        assert load(store, canary.tokens, namespace=canary.namespace) == 0
        assert canary.user not in str(store.catalogue.entries())
        assert store.corpus.find(Lineage(canary.namespace), canary.tokens[:-1], 1) is None
    assert found_in(folder, canary) == []


def test_after_its_ttl_and_one_sweep_nothing_of_it_is_on_disk(store: KvStore, tmp_path: Path, time: Time) -> None:
    keep(store, ANN, Ttl.EXTENDED)
    keep(store, BOB, Ttl.EXTENDED)
    store.flush()
    time.pass_(EXTENDED_S - 1)
    store.sweep()
    assert load(store, ANN.tokens, namespace=ANN.namespace) == TOKENS
    assert found_in(tmp_path, ANN)
    keep(store, BOB, Ttl.EXTENDED)
    time.pass_(1)
    store.sweep()
    assert_gone(tmp_path, ANN, store)
    assert load(store, BOB.tokens, namespace=BOB.namespace) == TOKENS
    assert store.stats()["evictions"]["cold"]["expired"] == 4


def test_what_the_index_has_moved_leaves_no_trace_either(tmp_path: Path) -> None:
    index, rng = Index(tmp_path / "index.db"), random.Random(1)
    names = [f"user{number:04}x" for number in range(2000)]
    entries = [Entry.new(Label(EntryKind.CONVERSATION, name, ""), Lineage(name)) for name in names]
    for _ in range(4):  # rows that grow and shrink are moved about in the file
        for entry in entries:
            entry.tails.extend(Tail(ChunkKey(bytes(32)), 0, 0, 0) for _ in range(rng.randrange(8)))
            while len(entry.tails) > rng.randrange(1, 8):
                entry.tails.pop()
        changes = UnsavedChanges()
        changes.entries = {entry.id: entry for entry in entries if rng.random() < 0.7}
        index.save_notes(Unsaved(changes, [], {}), {})
    gone, changes = entries[::3], UnsavedChanges()
    changes.forgotten.extend(entry.id for entry in gone)
    index.save_notes(Unsaved(changes, [], {}), {})
    index.erase_traces()
    index.close()
    data = (tmp_path / "index.db").read_bytes()
    assert [entry.lineage.owner for entry in gone if entry.lineage.owner.encode() in data] == []
    assert names[1].encode() in data


def test_without_the_setting_it_stays_on_disk(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time, expire=False)
    keep(store, ANN, Ttl.SHORT)
    store.flush()
    time.pass_(EXTENDED_S)
    store.sweep()
    assert load(store, ANN.tokens, namespace=ANN.namespace) == TOKENS


@pytest.mark.parametrize("has_disk", [True, False])
def test_a_store_in_ram_lets_it_go_too_and_a_miss_says_that_it_had_expired(
    tmp_path: Path, time: Time, has_disk: bool
) -> None:
    store, lineage = opened(tmp_path if has_disk else None, time), Lineage(ANN.namespace)
    keep(store, ANN, Ttl.SHORT)
    time.pass_(SHORT_S)
    store.sweep()
    assert load(store, ANN.tokens, namespace=ANN.namespace) == 0
    assert store.held_bytes() == (0, 0)
    assert store.why_gone(store.advance(store.origin(lineage), ANN.tokens), ANN.tokens) is MissReason.EXPIRED


def test_what_was_written_before_a_restart_is_gone_before_anything_is_served(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time)
    keep(store, ANN, Ttl.LONG)
    keep(store, BOB, Ttl.EXTENDED)
    store.close()
    time.pass_(LONG_S)
    again = opened(tmp_path, time)
    assert_gone(tmp_path, ANN, again)
    assert load(again, BOB.tokens, namespace=BOB.namespace) == TOKENS


def test_a_process_that_dies_in_a_turn_leaves_what_it_wrote_for_the_short_ttl(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time)
    put(store, ANN.tokens, namespace=ANN.namespace)
    store.flush()  # no turn has ended: only the files and their rows are there
    soon = opened(tmp_path, time)
    assert load(soon, ANN.tokens, namespace=ANN.namespace) == TOKENS
    soon.close()
    time.pass_(SHORT_S)
    late = opened(tmp_path, time)
    assert_gone(tmp_path, ANN, late)


def test_files_that_do_not_say_when_they_expire_are_not_kept(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time)
    keep(store, ANN, Ttl.EXTENDED)
    store.close()
    for path in tmp_path.glob("*/index.db*"):
        path.unlink()
    again = opened(tmp_path, time)
    assert_gone(tmp_path, ANN, again)


def test_what_two_entries_share_lives_as_long_as_the_longer_one(
    store: KvStore, time: Time, tmp_path: Path
) -> None:
    own, common = prompt(60, seed=9), ANN.tokens[:300]
    lineage = Lineage(ANN.namespace)
    keep(store, ANN, Ttl.SHORT)
    other = np.array([*common, *own], np.int32)
    put(store, other, namespace=ANN.namespace)
    named = replace(BOB.label, ttl=Ttl.LONG)
    store.turn_ended(named, store.advance(store.origin(lineage), other))
    time.pass_(SHORT_S)
    store.sweep()
    assert load(store, other, namespace=ANN.namespace) == len(other)
    assert [entry.name for entry in store.catalogue.entries()] == [named.name]
    assert load(store, ANN.tokens, namespace=ANN.namespace) < TOKENS
    time.pass_(LONG_S)
    store.sweep()
    assert store.catalogue.entries() == []
    assert chunk_files(tmp_path) == []


def test_the_name_of_a_conversation_goes_though_another_holds_its_state(store: KvStore, time: Time) -> None:
    lineage = Lineage("")
    put(store, LONG[:500])
    short = replace(ANN.label, ttl=Ttl.SHORT)
    store.turn_ended(short, store.advance(store.origin(lineage), LONG[:200]))
    store.turn_ended(replace(BOB.label, ttl=Ttl.LONG), store.advance(store.origin(lineage), LONG[:500]))
    time.pass_(SHORT_S)
    store.sweep()
    assert [entry.name for entry in store.catalogue.entries()] == [BOB.label.name]
    assert load(store, LONG[:500]) == 500


def test_what_is_pinned_stays_until_it_is_not(store: KvStore, time: Time, tmp_path: Path) -> None:
    pinned = keep(store, ANN, Ttl.SHORT)
    store.catalogue.pin(pinned, True)
    time.pass_(10 * EXTENDED_S)
    store.sweep()
    assert load(store, ANN.tokens, namespace=ANN.namespace) == TOKENS
    store.catalogue.pin(pinned, False)
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_what_a_lookup_uses_goes_with_the_next_sweep(store: KvStore, time: Time, tmp_path: Path) -> None:
    keep(store, ANN, Ttl.SHORT)
    store.flush()
    match = store.match(Lineage(ANN.namespace), ANN.tokens)
    time.pass_(SHORT_S)
    store.sweep()
    assert chunk_files(tmp_path)
    store.release(match)
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_the_quarantine_is_emptied_by_the_sweep(store: KvStore, tmp_path: Path, time: Time) -> None:
    keep(store, ANN, Ttl.LONG)
    store.flush()
    time.pass_(1)
    store.sweep()
    assert store._disk is not None
    (first, *_) = sorted(chunks_of(store), key=lambda chunk: chunk.start)
    assert store._disk.files.quarantine(first.key)
    assert list(tmp_path.glob("*/quarantine/*"))
    store.sweep()
    assert list(tmp_path.glob("*/quarantine/*")) == []


def test_files_whose_beginning_was_damaged_expire_too(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time)
    keep(store, ANN, Ttl.LONG)
    store.close()
    store = opened(tmp_path, time)
    first = min(chunks_of(store), key=lambda chunk: chunk.start)
    path = file_of(tmp_path, first.key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert load(store, ANN.tokens, namespace=ANN.namespace) == 0
    assert len(chunk_files(tmp_path)) == 3  # they wait for it
    time.pass_(LONG_S)
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_what_was_evicted_leaves_no_trace_either(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time, disk=6 * len(ANN.payload) // 4)
    keep(store, ANN, Ttl.LONG)
    store.flush()
    for seed in range(8):
        put(store, prompt(500, seed=70 + seed), namespace="other")
        store.flush()
    store.resize_ram(0)
    time.pass_(LONG_S)
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_text_for_drafts_goes_with_what_is_evicted_since_nothing_says_any_more_when_it_expires(time: Time) -> None:
    store = opened(None, time)
    keep(store, ANN, Ttl.LONG)
    lineage = Lineage(ANN.namespace)
    store.corpus.prepare(lineage)
    assert eventually(lambda: store.corpus.find(lineage, ANN.tokens[:200], 4))
    store.resize_ram(0)
    assert store.corpus.find(lineage, ANN.tokens[:200], 4) is None


def test_ghosts_of_the_time_before_the_setting_go(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time, expire=False)
    keep(store, ANN, Ttl.SHORT)
    time.pass_(SHORT_S)
    store.catalogue.gc()
    store.close()
    assert found_in(tmp_path, ANN)  # the user's name, with the ghosts
    again = opened(tmp_path, time)
    assert_gone(tmp_path, ANN, again)


def test_a_shorter_ttl_is_kept_to_from_the_next_start(tmp_path: Path, time: Time) -> None:
    store = opened(tmp_path, time)
    keep(store, ANN, Ttl.EXTENDED)
    store.close()
    short = Keeping({Ttl.SHORT: 60.0, Ttl.LONG: 60.0, Ttl.EXTENDED: 60.0}, expire=True)
    for _ in range(3):
        time.pass_(30)
        again = KvStore(
            FINGERPRINT,
            Budgets(PLENTY, PLENTY),
            ChunkFiles(tmp_path, FINGERPRINT),
            keeping=replace(short, clock=lambda saved: StoreClock(saved, monotonic=time, wall=time)),
        )
        again.close()
    assert found_in(tmp_path, ANN) == []


def test_what_another_process_has_used_since_is_left_to_it(tmp_path: Path, time: Time) -> None:
    here, there = opened(tmp_path, time), opened(tmp_path, time)
    keep(here, ANN, Ttl.SHORT)
    here.flush()
    there.refresh()
    time.pass_(SHORT_S - 1)
    keep(there, ANN, Ttl.LONG)
    there.flush()
    time.pass_(1)
    here.sweep()
    there.sweep()
    assert len(chunk_files(tmp_path)) == 4
    assert load(there, ANN.tokens, namespace=ANN.namespace) == TOKENS
    time.pass_(LONG_S)
    here.sweep()
    there.sweep()
    assert_gone(tmp_path, ANN, here, there)


def test_what_another_process_has_pinned_is_left_to_it_until_that_unpins_it(tmp_path: Path, time: Time) -> None:
    here = opened(tmp_path, time)
    entry = keep(here, ANN, Ttl.SHORT)
    here.close()
    here, there = opened(tmp_path, time), opened(tmp_path, time)
    there.catalogue.pin(entry, True)
    there.sweep()
    there.flush()
    time.pass_(SHORT_S)
    for _ in range(2):
        here.sweep()
    assert load(there, ANN.tokens, namespace=ANN.namespace) == TOKENS
    there.close()
    there = opened(tmp_path, time)
    assert load(there, ANN.tokens, namespace=ANN.namespace) == TOKENS
    there.catalogue.pin(entry, False)
    there.close()
    time.pass_(SHORT_S)
    assert load(opened(tmp_path, time), ANN.tokens, namespace=ANN.namespace) == 0


def test_a_turn_does_not_unpin_what_another_process_has_pinned(tmp_path: Path, time: Time) -> None:
    here = opened(tmp_path, time)
    entry = keep(here, ANN, Ttl.SHORT)
    here.flush()
    here.sweep()
    there = opened(tmp_path, time)
    there.catalogue.pin(entry, True)
    there.close()
    cursor = here.advance(here.origin(Lineage(ANN.namespace)), ANN.tokens)
    here.turn_ended(replace(ANN.label, ttl=Ttl.SHORT), cursor)
    here.sweep()
    time.pass_(SHORT_S)
    here.sweep()
    here.sweep()
    assert load(here, ANN.tokens, namespace=ANN.namespace) == TOKENS


def test_an_older_look_does_not_shorten_what_another_process_wants(tmp_path: Path, time: Time) -> None:
    here = opened(tmp_path, time)
    keep(here, ANN, Ttl.SHORT)
    here.flush()
    here.sweep()
    there = opened(tmp_path, time)
    time.pass_(SHORT_S / 3)
    assert load(here, ANN.tokens, namespace=ANN.namespace) == TOKENS
    time.pass_(SHORT_S / 3)
    keep(there, ANN, Ttl.SHORT)
    there.close()
    time.pass_(SHORT_S / 2)
    here.sweep()
    there = opened(tmp_path, time)
    assert load(there, ANN.tokens, namespace=ANN.namespace) == TOKENS


@pytest.mark.parametrize(
    "damage",
    ["PRAGMA user_version = 9", "UPDATE meta SET value = 'x' WHERE name = 'clock'"],
    ids=["version", "clock"],
)
def test_a_store_that_cannot_be_understood_keeps_what_has_not_expired(
    tmp_path: Path, time: Time, damage: str
) -> None:
    left_alone(tmp_path, time, Ttl.EXTENDED)
    (index,) = tmp_path.rglob("index.db")
    db = apsw.Connection(str(index))
    db.execute(damage)
    db.close()
    os.utime(index, (time(), time()))
    unused = UnusedStores(tmp_path, Keeping(expire=True), expire_closed, time)
    unused.sweep()
    assert list(tmp_path.rglob("*.kv"))


def test_a_jump_of_the_wall_clock_deletes_nothing(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KvStore(OTHER, Budgets(PLENTY, PLENTY), ChunkFiles(tmp_path, OTHER), keeping=Keeping(expire=True))
    keep(other, ANN, Ttl.EXTENDED)
    other.close()
    unused = UnusedStores(tmp_path, Keeping(expire=True), expire_closed)
    unused.sweep()
    monkeypatch.setattr("time.time", lambda: 4e9)
    unused.sweep()
    assert list(tmp_path.rglob("*.kv"))


def test_a_disk_that_refuses_is_asked_again(
    store: KvStore, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(store, ANN, Ttl.SHORT)
    store.flush()
    time.pass_(SHORT_S)
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunk_files.delete", no_space)
        store.sweep()
        assert "still on disk" in caplog.text
        assert load(store, ANN.tokens, namespace=ANN.namespace) == 0
        assert chunk_files(tmp_path)
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_an_index_that_cannot_be_asked_does_not_keep_it(
    store: KvStore, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, ANN, Ttl.SHORT)
    store.flush()
    time.pass_(SHORT_S)
    with monkeypatch.context() as broken:
        broken.setattr(Index, "_write", no_space)
        store.sweep()
        assert load(store, ANN.tokens, namespace=ANN.namespace) == 0
        assert chunk_files(tmp_path) == []
    store.sweep()
    assert_gone(tmp_path, ANN, store)


def test_stores_that_nobody_has_open_are_swept(tmp_path: Path, time: Time) -> None:
    other = opened(tmp_path, time, fingerprint=OTHER)
    keep(other, ANN, Ttl.SHORT)
    keep(other, BOB, Ttl.LONG)
    other.flush()
    unused = UnusedStores(tmp_path, Keeping(expire=True), expire_closed, time)
    time.pass_(SHORT_S)
    unused.sweep()
    assert found_in(tmp_path, ANN)  # it is open
    other.close()
    unused.sweep()
    assert found_in(tmp_path, ANN) == []
    assert found_in(tmp_path, BOB)
    time.pass_(LONG_S)
    unused.sweep()
    assert found_in(tmp_path, BOB) == []


def test_a_store_in_which_nothing_can_have_expired_is_not_opened(tmp_path: Path, time: Time) -> None:
    left_alone(tmp_path, time, Ttl.LONG)
    looked_into = []

    def expire(root: Path, fingerprint: bytes, keeping: Keeping) -> float:
        looked_into.append(fingerprint)
        return expire_closed(root, fingerprint, keeping)

    unused = UnusedStores(tmp_path, Keeping(expire=True), expire, time)
    unused.sweep()
    unused.sweep()
    assert looked_into == [OTHER]
    time.pass_(LONG_S)
    unused.sweep()
    assert looked_into == [OTHER, OTHER]


def test_a_store_that_cannot_be_read_just_now_stays(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left_alone(tmp_path, time, Ttl.SHORT)
    unused = UnusedStores(tmp_path, Keeping(expire=True), expire_closed, time)
    time.seconds = 1e12
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.store.ChunkFiles", no_space)
        unused.sweep()
    assert "No space left" in caplog.text
    assert found_in(tmp_path, ANN)
    unused.sweep()
    assert found_in(tmp_path, ANN) == []


@pytest.mark.parametrize("damage", [b"no database" * 1000, b""])
def test_a_store_that_cannot_be_read_goes_when_all_of_it_has_expired(
    tmp_path: Path, time: Time, damage: bytes
) -> None:
    left_alone(tmp_path, time, Ttl.SHORT)
    (index,) = tmp_path.glob("*/index.db")
    index.write_bytes(damage)
    time.seconds = index.stat().st_mtime
    unused = UnusedStores(tmp_path, Keeping(expire=True), expire_closed, time)
    unused.sweep()
    assert found_in(tmp_path, ANN)
    time.pass_(EXTENDED_S + 1)
    unused.sweep()
    assert not index.parent.exists()
