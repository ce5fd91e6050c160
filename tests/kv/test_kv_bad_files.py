"""A file that is damaged, lost or unreadable is a miss: never wrong state, never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.kv.fetch import FetchState
from helpers.kv_building import (
    LONG,
    check_books,
    chunk_files,
    fetched,
    file_of,
    load,
    new_store,
    only_on_disk,
    prompt,
    put,
    reopened,
)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("index", [0, 3, 7])
def test_a_damaged_file_costs_what_follows_it_and_nothing_else(tmp_path, index):
    store = only_on_disk(tmp_path, LONG)
    match = store.match("", LONG)
    damage(file_of(tmp_path, match.segments[index].chunk.key))
    store.release(match)
    assert load(store, LONG) == 128 * index
    assert store.counters.damaged_chunks == 1
    assert len(list(tmp_path.glob("*/quarantine/*"))) == 1
    put(store, LONG)
    store.flush()
    check_books(store)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 1000
    again.close()


def test_a_file_that_vanishes_between_match_and_fetch_is_a_miss(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match("", LONG)
    file_of(tmp_path, match.segments[2].chunk.key).unlink()
    states = [fetched(store, segment.chunk) for segment in match.segments]
    store.release(match)
    assert states[:3] == [FetchState.READY, FetchState.READY, FetchState.GONE]
    assert FetchState.READY not in states[3:]
    assert store.counters.vanished_chunks == 1
    check_books(store)
    store.close()


def test_a_chunk_the_engine_refuses_is_forgotten_and_quarantined(store, tmp_path):
    put(store, LONG)
    store.flush()
    match = store.match("", LONG)
    store.reject(match.segments[1].chunk)
    store.release(match)
    assert load(store, LONG) == 128
    assert store.counters.damaged_chunks == 1
    assert len(list(tmp_path.glob("*/quarantine/*"))) == 1


def test_chunks_whose_parent_is_lost_are_removed_when_the_disk_is_tended(store, tmp_path):
    put(store, LONG)
    store.flush()
    first = store.match("", LONG[:128]).segments[0].chunk
    store.close()
    file_of(tmp_path, first.key).unlink()
    again = new_store(tmp_path)
    assert load(again, LONG) == 0
    put(again, prompt(50, seed=77))
    again.flush()
    assert len(chunk_files(tmp_path)) == 1
    again.close()


def test_a_file_that_cannot_be_opened_is_a_miss(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG)

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.read", refuse)
        assert load(store, LONG) == 0
    assert store.counters.vanished_chunks == 1
    store.close()


def test_a_file_too_large_for_memory_is_a_miss(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG)

    def refuse(*_):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.read", refuse)
        assert load(store, LONG) == 0
    store.close()
