"""What another process stored, before this one or beside it."""

from __future__ import annotations

import os

import numpy as np

from emberkeep.types.lineage import EXACT
from helpers.kv_building import LONG, check_ledger, chunk_files, chunks_of, load, new_store, put, reopened


def test_everything_is_found_again_after_a_restart(store, tmp_path):
    put(store, LONG, sampled=((1, 4),))
    put(store, LONG, namespace="alice")
    again = reopened(store, tmp_path)
    assert load(again, LONG) == load(again, LONG, namespace="alice") == 1000
    assert {chunk.sampled for chunk in chunks_of(again)} == {((1, 4),), ()}


def test_uses_survive_a_restart_and_the_clock_goes_on(store, tmp_path):
    put(store, LONG[:128])
    for _ in range(5):
        load(store, LONG[:128])
    again = reopened(store, tmp_path)
    (chunk,) = chunks_of(again)
    assert (chunk.hits, chunk.last_used) == (5, 5)
    load(again, LONG[:128])
    assert chunk.last_used == 6


def test_two_thousand_small_chunks_open(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    store = new_store(tmp_path)
    cursor, payload = store.origin(EXACT), memoryview(b"payload")
    for index in range(2000):
        cursor = store.insert(cursor, LONG[index % 1000 :][:1], payload, (), fork=True)
    again = reopened(store, tmp_path)
    assert again.match(EXACT, np.tile(LONG, 2)).tokens == 2000


def test_a_second_store_on_the_folder_learns_of_new_chunks(store, tmp_path):
    other = new_store(tmp_path)
    put(store, LONG)
    store.flush()
    assert load(other, LONG) == 0
    other.refresh()
    assert load(other, LONG) == 1000


def test_two_stores_may_compute_the_same_prompt(store, tmp_path):
    other = new_store(tmp_path)
    put(store, LONG)
    put(other, LONG, sampled=((0, 100),))
    store.flush()
    other.flush()
    store.refresh()
    other.refresh()
    for one in (store, other):
        one.resize_ram(0)  # from disk
        assert load(one, LONG) == 1000
        assert one.counters.damaged_chunks == 0


def test_chunks_evicted_by_another_process_are_a_miss(store, tmp_path):
    put(store, LONG)
    again = reopened(store, tmp_path)
    for path in chunk_files(tmp_path):
        path.unlink()
    assert load(again, LONG) == 0
    assert again.counters.vanished_chunks == 1
    check_ledger(again)
    put(again, LONG)
    assert load(again, LONG) == 1000
