"""A file that is damaged, lost or unreadable is a miss: never wrong state, never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.kv.disk import chunkfile
from emberkeep.kv.disk.transfers import FetchState
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import EXACT
from helpers.kv_building import (
    LONG,
    check_ledger,
    chunk_files,
    disk_bytes,
    exported,
    fetched,
    file_of,
    load,
    no_space,
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
    match = store.match(EXACT, LONG)
    damage(file_of(tmp_path, match.segments[index].chunk.key))
    store.release(match)
    assert load(store, LONG) == 128 * index
    assert store.counters.damaged_chunks == 1
    assert len(list(tmp_path.glob("*/quarantine/*"))) == 1
    put(store, LONG)
    store.flush()
    check_ledger(store)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 1000


def test_a_file_that_vanishes_between_match_and_fetch_is_a_miss(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    file_of(tmp_path, match.segments[2].chunk.key).unlink()
    states = [fetched(store, segment.chunk) for segment in match.segments]
    store.release(match)
    assert states[:3] == [FetchState.READY, FetchState.READY, FetchState.GONE]
    assert FetchState.READY not in states[3:]
    assert store.counters.vanished_chunks == 1


def test_a_chunk_the_engine_refuses_is_forgotten_and_quarantined(store, tmp_path):
    put(store, LONG)
    store.flush()
    match = store.match(EXACT, LONG)
    store.reject(match.segments[1].chunk)
    store.release(match)
    assert load(store, LONG) == 128
    assert store.counters.damaged_chunks == 1
    assert len(list(tmp_path.glob("*/quarantine/*"))) == 1


def test_chunks_whose_parent_is_lost_are_found_again_when_that_was_computed_again(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    file_of(tmp_path, store.match(EXACT, LONG[:128]).segments[0].chunk.key).unlink()
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 0
    put(again, LONG[:128])
    again.flush()
    assert load(again, LONG) == 1000


PASSING = [OSError(24, "Too many open files"), OSError(5, "I/O error"), OSError(11, "Try again"), MemoryError()]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_a_read_that_fails_in_a_way_that_may_pass_is_a_miss_now_and_found_again_later(
    tmp_path, monkeypatch, error
):
    store = only_on_disk(tmp_path, LONG)
    held = store.held_bytes()

    def refuse(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunkfile.read", refuse)
        assert load(store, LONG) == 0
    assert store.counters.unreadable_chunks == 1
    assert store.held_bytes() == held
    check_ledger(store)
    assert load(store, LONG) == 1000


def test_a_damaged_file_that_cannot_be_put_away_counts_until_it_is_gone(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG[:128])
    (path,) = chunk_files(tmp_path)
    damage(path)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", no_space)
        broken.setattr(Path, "unlink", no_space)
        assert load(store, LONG) == 0
        check_ledger(store)
        assert disk_bytes(store) == path.stat().st_size
    store.sweep()
    store.flush()
    assert not path.exists()
    assert disk_bytes(store) == 0


def test_two_damaged_files_of_one_prompt_are_both_given_up(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    chunks = [segment.chunk for segment in match.segments]
    for place in (1, 2):
        damage(file_of(tmp_path, chunks[place].key))
    reads = [store.fetch(chunk, lambda: None) for chunk in chunks]  # all at once, as a request does it
    store.release(match)
    store._disk.reader.close()
    assert [read.state for read in reads[:2]] == [FetchState.READY, FetchState.DAMAGED]
    # The reader may have given up everything behind the first before the second is asked for.
    assert reads[2].state in (FetchState.DAMAGED, FetchState.GONE)
    check_ledger(store)
    put(store, LONG)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 1000
    assert again.counters.damaged_chunks == again.counters.vanished_chunks == 0


@pytest.mark.parametrize("are_all_damaged", [True, False])
def test_what_begins_like_a_chunk_that_was_computed_again_is_looked_at_before_it_is_used(
    tmp_path, are_all_damaged
):
    store = only_on_disk(tmp_path, LONG)
    first = store.match(EXACT, LONG[:128]).segments[0].chunk
    for path in chunk_files(tmp_path) if are_all_damaged else [file_of(tmp_path, first.key)]:
        damage(path)
    assert load(store, LONG) == 0
    end = put(store, LONG[:950])
    store.turn_ended(Label(EntryKind.CONVERSATION, "talk", "Hello."), end)
    store.flush()
    check_ledger(store)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == (950 if are_all_damaged else 1000)
    assert again.counters.damaged_chunks == again.counters.vanished_chunks == 0


def test_what_was_not_computed_again_is_found_once_its_file_was_read(tmp_path):
    other = prompt(1000, seed=7, start=LONG[:300])
    store = only_on_disk(tmp_path, LONG, other)
    match = store.match(EXACT, LONG)
    damage(file_of(tmp_path, match.segments[0].chunk.key))
    store.release(match)
    assert load(store, LONG) == 0
    put(store, LONG)
    store.flush()
    assert store.peek(EXACT, other, snapshots=False).tokens == 1000
    assert load(store, other) == 1000


def test_what_another_process_has_written_meanwhile_is_entered_once(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    damage(file_of(tmp_path, match.segments[0].chunk.key))
    store.release(match)
    assert load(store, LONG) == 0
    look = store._disk._check_orphans
    monkeypatch.setattr(store._disk, "_check_orphans", lambda: None)
    put(store, LONG[:128])
    store.flush()
    waiting = store.transact(lambda ledger: ledger.orphans.below(ledger.tree.by_key))
    assert len(waiting) == 1
    store.transact(lambda ledger: ledger.adopt(waiting))
    check_ledger(store)
    look()
    check_ledger(store)
    assert load(store, LONG) == 1000


def test_a_bad_sector_is_given_up_in_the_end_and_computed_again(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG)
    first = file_of(tmp_path, store.match(EXACT, LONG[:128]).segments[0].chunk.key)
    real = chunkfile.read

    def bad_sector(path, *rest):
        if path == first:
            raise OSError(5, "Input/output error")
        return real(path, *rest)

    monkeypatch.setattr("emberkeep.kv.disk.chunkfile.read", bad_sector)
    assert [load(store, LONG) for _ in range(6)] == [0] * 6
    assert first.exists()
    monkeypatch.setattr("emberkeep.kv.disk.transfers._BAD_SECTOR_S", 0.0)
    load(store, LONG)
    assert not first.exists()
    monkeypatch.setattr("emberkeep.kv.disk.chunkfile.read", real)
    store.insert(store.origin(EXACT), LONG[:128], exported(LONG, 0, 128), (), fork=False)
    store.flush()
    assert load(store, LONG) == 1000


def test_the_quarantine_holds_few_files_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.disk.chunk_files._MOST_QUARANTINED", 3)
    prompts = [prompt(100, seed=seed) for seed in range(8)]
    store = only_on_disk(tmp_path, *prompts)
    for path in chunk_files(tmp_path):
        damage(path)
    assert [load(store, tokens) for tokens in prompts] == [0] * 8
    kept = list(tmp_path.glob("*/quarantine/*"))
    assert len(kept) == 3
    assert store.stats()["cold"]["other_bytes"] >= sum(path.stat().st_size for path in kept) > 0
    monkeypatch.setattr("emberkeep.kv.disk.chunk_files._MOST_QUARANTINED_BYTES", 0)
    store = reopened(store, tmp_path)
    assert list(tmp_path.glob("*/quarantine/*")) == []
