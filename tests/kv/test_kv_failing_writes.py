"""A disk that refuses costs what it refused, and nothing else."""

from __future__ import annotations

import pytest

from emberkeep.kv.forgetting import of_user
from helpers.kv_building import (
    CHUNK_BYTES,
    LONG,
    PLENTY,
    chunk_files,
    chunks_of,
    load,
    new_store,
    no_space,
    prompt,
    put,
    reopened,
)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), OSError(30, "Read-only"), OSError(24, "Too many open files")]
)
def test_serving_goes_on_when_the_disk_refuses(store, monkeypatch, error):
    def refuse(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunkfile.write", refuse)
        put(store, LONG)
        store.flush()
        assert load(store, LONG) == 1000
        assert store.stats()["cold"]["refused_chunks"] > 0
        assert error.strerror in store.stats()["cold"]["last_error"]
        assert store.stats()["cold"]["written_chunks"] == 0


def test_refused_chunks_are_written_when_the_disk_is_well_again(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunkfile.write", no_space)
        put(store, LONG[:500])
        store.flush()
    put(store, LONG)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 1000


def test_a_broken_disk_does_not_make_the_queue_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.disk.chunkfile.write", no_space)
    store = new_store(tmp_path, warm=4 * CHUNK_BYTES)
    for seed in range(20):
        put(store, prompt(300, seed=seed))
    store.flush()
    store._disk.writer._paused_until = 0.0
    put(store, prompt(20, seed=99))
    store.flush()
    assert store.stats()["cold"]["pending_chunks"] <= store.stats()["warm"]["chunks"]


def test_an_index_that_cannot_be_written_does_not_stop_the_writer(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    put(store, LONG[:50])
    store.flush()

    def refuse(keys):
        if list(keys):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(store._disk.files, "remove", refuse)
        put(store, LONG[:128])  # wants to remove the tail it supersedes
        store.flush()
    put(store, LONG)
    store.flush()
    assert load(store, LONG) == 1000
    assert len(chunks_of(store)) == 8


def test_a_write_that_loses_its_race_with_eviction_leaves_no_file(tmp_path, monkeypatch):
    from emberkeep.kv.disk import chunkfile

    store, real = new_store(tmp_path), chunkfile.write

    def forgotten_meanwhile(path, *rest):
        store.transact(lambda ledger: ledger.forget(of_user("")))
        return real(path, *rest)

    with monkeypatch.context() as racing:
        racing.setattr("emberkeep.kv.disk.chunkfile.write", forgotten_meanwhile)
        put(store, LONG[:128])
        store.flush()
    assert chunk_files(tmp_path) == []
    assert PLENTY > store.held_bytes()[1] == 0
