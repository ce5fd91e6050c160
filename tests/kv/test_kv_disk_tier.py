"""RAM and disk stay within their budgets, every file counts, and a disk that refuses costs what it refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from threading import Event, current_thread, main_thread

import apsw
import pytest

from emberkeep.errors import StoreFailed
from emberkeep.kv.disk import chunkfile
from emberkeep.kv.forgetting import of_user
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import EXACT, private_namespace
from helpers.kv_building import (
    CHUNK_BYTES,
    LONG,
    PLENTY,
    check_ledger,
    chunk_files,
    chunks_of,
    disk_bytes,
    load,
    new_store,
    no_space,
    only_on_disk,
    prompt,
    put,
    reopened,
)


def test_ram_stays_within_its_budget_and_the_rest_is_read_back(tmp_path):
    store = new_store(tmp_path, warm=5 * CHUNK_BYTES)
    prompts = [prompt(400, seed=seed) for seed in range(6)]
    for tokens in prompts:
        put(store, tokens)
        store.flush()
        assert store.held_bytes()[0] <= 5 * CHUNK_BYTES
    assert [load(store, tokens) for tokens in prompts] == [400] * 6
    assert store.held_bytes()[0] <= 5 * CHUNK_BYTES


def test_moves_between_tiers_and_evictions_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, "emberkeep.kv"):
        store = new_store(tmp_path, warm=2 * CHUNK_BYTES, cold=8 * CHUNK_BYTES)
        for seed in range(6):
            put(store, prompt(256, seed=seed))
            store.flush()
            if seed == 1:
                assert load(store, prompt(256, seed=0)) == 256
        store.close()
    lines = [record.getMessage() for record in caplog.records]
    for beginning in ("warm -> cold: ", "cold -> warm: ", "warm: ", "cold: "):
        assert any(line.startswith(beginning) and " bytes" in line for line in lines), beginning


def test_without_a_disk_the_deepest_chunks_go_first_and_all_where_none_has_room():
    store = new_store(None, warm=6 * CHUNK_BYTES)
    put(store, LONG)
    kept = load(store, LONG)
    assert 0 < kept <= 6 * 128 and kept % 128 == 0
    store.resize_ram(CHUNK_BYTES // 2)
    put(store, LONG)
    assert chunks_of(store) == []


def test_what_a_lookup_uses_stays_in_ram_and_on_disk(tmp_path):
    store = new_store(tmp_path, warm=3 * CHUNK_BYTES, cold=30_000)
    put(store, LONG[:256])
    store.flush()
    match = store.match(EXACT, LONG[:256])
    for seed in range(4):
        put(store, prompt(900, seed=seed))
        store.flush()
    assert all(segment.chunk.payload is not None and segment.chunk.on_disk for segment in match.segments)
    store.release(match)
    assert load(store, LONG[:256]) == 256


def test_the_disk_stays_within_its_budget(tmp_path):
    budget = 40_000
    store = new_store(tmp_path, cold=budget)
    for seed in range(8):
        put(store, prompt(500, seed=seed))
        store.flush()
        assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= budget
    assert store.counters.cold_evictions > 0
    check_ledger(store)
    files = {path.stem for path in chunk_files(tmp_path)}
    assert files == {chunk.key.hex() for chunk in chunks_of(store) if chunk.on_disk}


def test_eviction_never_takes_a_chunk_before_what_builds_on_it(tmp_path):
    store = new_store(tmp_path, cold=40_000)
    for seed in range(8):
        put(store, prompt(500, seed=seed))
    store.flush()
    again = reopened(store, tmp_path)
    found = [load(again, prompt(500, seed=seed)) for seed in range(8)]
    assert all(tokens % 128 == 0 or tokens == 500 for tokens in found)
    assert sum(found) == sum(len(chunk.tokens) for chunk in chunks_of(again))


def test_what_is_used_survives_what_is_not(tmp_path):
    store = new_store(tmp_path, cold=40_000)
    favourite = prompt(500, seed=100)
    put(store, favourite)
    for seed in range(12):
        put(store, prompt(500, seed=seed))
        assert load(store, favourite) == 500
        store.flush()
    assert load(store, favourite) == 500


def test_other_models_stores_count_towards_the_budget(tmp_path):
    other = new_store(tmp_path, fingerprint=bytes(32))
    put(other, LONG)
    other.close()
    store = new_store(tmp_path, cold=20_000)
    put(store, LONG)
    store.flush()
    assert not (tmp_path / bytes(32).hex()[:32]).exists()
    assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= 20_000


def test_a_ram_budget_can_be_changed_and_what_is_on_disk_is_found_with_any(tmp_path):
    store = new_store(tmp_path, warm=10 * CHUNK_BYTES)
    put(store, LONG)
    store.flush()
    store.resize_ram(2 * CHUNK_BYTES)
    assert store.held_bytes()[0] <= 2 * CHUNK_BYTES
    assert store.ram_room() <= 2 * CHUNK_BYTES
    assert load(store, LONG) == len(LONG)
    store.resize_ram(10 * CHUNK_BYTES)
    assert load(store, LONG) == len(LONG)
    assert store.held_bytes()[0] > 2 * CHUNK_BYTES


def label(number: int) -> Label:
    return Label(EntryKind.CONVERSATION, f"talk {number}", "Hello.", None, f"talk {number}")


def test_of_many_conversations_in_one_state_the_latest_and_the_pinned_keep_their_names(store, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.entries.MOST_ENTRIES", 5)
    cursor = put(store, LONG[:100])
    first = store.turn_ended(label(0), cursor)
    store.catalogue.pin(first.id, True)
    for number in range(1, 20):
        store.turn_ended(label(number), cursor)
    names = sorted(entry.name for entry in store.catalogue.entries())
    assert names == ["talk 0", "talk 16", "talk 17", "talk 18", "talk 19"]


def test_a_lookup_for_an_unknown_owner_leaves_nothing(store):
    for number in range(50):
        assert load(store, LONG, namespace=private_namespace(f"user {number}")) == 0
    assert store.catalogue.lineages() == []


def test_files_are_limited_in_number_too(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("emberkeep.kv.disk.tier.MOST_FILES", 10)
    store = new_store(tmp_path)
    for seed in range(25):
        put(store, prompt(20, seed=seed))
    store.flush()
    assert 5 <= len(chunk_files(tmp_path)) <= 10


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_file_that_cannot_be_read_at_opening_counts_and_is_found_later(tmp_path, monkeypatch, is_indexed):
    only_on_disk(tmp_path, LONG).close()
    size = sum(path.stat().st_size for path in chunk_files(tmp_path))
    if not is_indexed:
        for path in tmp_path.glob("*/index.db*"):
            path.unlink()

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(chunkfile, "read_description", refuse)
        store = new_store(tmp_path)
    assert load(store, LONG) == (1000 if is_indexed else 0)
    assert disk_bytes(store) == size
    store = reopened(store, tmp_path)
    assert load(store, LONG) == 1000
    assert disk_bytes(store) == size == store.held_bytes()[1]


def test_a_file_that_could_not_be_read_and_was_written_anew_counts_once_and_stays(tmp_path, monkeypatch):
    only_on_disk(tmp_path, LONG[:128]).close()
    for path in tmp_path.glob("*/index.db*"):
        path.unlink()
    with monkeypatch.context() as broken:
        broken.setattr(chunkfile, "read_description", no_space)
        store = new_store(tmp_path)
    put(store, LONG[:128])
    store.flush()
    assert disk_bytes(store) == store.held_bytes()[1]
    store._disk.files.drop_strays()
    store = reopened(store, tmp_path)
    assert load(store, LONG) == 128


def test_unreachable_and_unreadable_files_go_before_anything_that_is_of_use(tmp_path, monkeypatch):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    store.release(match)
    store._disk.files._path(match.segments[0].chunk.key).unlink()
    load(store, LONG)
    size = disk_bytes(store)
    assert store.held_bytes()[1] == 0 < size
    store._disk._settings = replace(store._disk._settings, budget=size)
    put(store, prompt(128, seed=9))
    store.flush()
    assert len(chunk_files(tmp_path)) == 1
    assert load(store, prompt(128, seed=9)) == 128


def test_a_removal_that_fails_counts_and_is_tried_again(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    entry = store.turn_ended(label(0), put(store, LONG))
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr("os.unlink", no_space)
        with pytest.raises(StoreFailed, match="could not be removed"):
            store.catalogue.remove(entry.id)
        assert load(store, LONG) == 0
        assert disk_bytes(store) == sum(path.stat().st_size for path in chunk_files(tmp_path)) > 0
    store.sweep()
    store.flush()
    assert chunk_files(tmp_path) == [] and disk_bytes(store) == 0
    put(store, LONG)
    assert load(store, LONG) == 1000


def test_what_is_just_being_written_when_it_is_removed_goes_with_its_writer(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    disk, is_written, is_dropped, is_entered, is_over = store._disk, Event(), Event(), Event(), Event()
    complete_store, remove_files = disk.complete_store, disk.remove_files

    def complete_late(*args):
        is_written.set()
        is_dropped.wait(10)
        complete_store(*args)

    def remove_files_beside():
        if current_thread() is main_thread():
            left = remove_files()
            is_dropped.set()
            is_entered.wait(10)
            return left
        if is_dropped.is_set():
            is_entered.set()
            is_over.wait(10)
        return remove_files()

    monkeypatch.setattr(disk, "complete_store", complete_late)
    monkeypatch.setattr(disk, "remove_files", remove_files_beside)
    entry = store.turn_ended(label(0), put(store, LONG))
    assert is_written.wait(10)
    store.catalogue.remove(entry.id)
    is_over.set()
    store.flush()
    assert chunk_files(tmp_path) == [] and disk_bytes(store) == 0


@pytest.fixture(params=["before the rename", "before the row", "before the store knows"])
def writing(request, tmp_path, monkeypatch):
    """A store, an entry whose files come into their places, and what lets them come."""
    store = new_store(tmp_path)
    is_reached, goes_on = Event(), Event()
    files = store._disk.files
    held = {
        "before the rename": (files, "_publish"),
        "before the row": (files.index, "add"),
        "before the store knows": (store._disk, "complete_store"),
    }
    owner, name = held[request.param]
    action = getattr(owner, name)

    def act_late(*args):
        is_reached.set()
        goes_on.wait(10)
        return action(*args)

    monkeypatch.setattr(owner, name, act_late)
    entry = store.turn_ended(label(0), put(store, LONG))
    assert is_reached.wait(10)
    yield store, entry, goes_on
    goes_on.set()
    store.close()


@pytest.fixture
def looking(monkeypatch):
    """Another lookup, as soon as the files and their rows are there, and before the store is told."""
    looks = []

    def look(store):
        complete_store = store._disk.complete_store

        def complete_then(*args):
            store.refresh()
            looks.append(load(store, LONG))
            complete_store(*args)

        monkeypatch.setattr(store._disk, "complete_store", complete_then)
        return looks

    return look


def test_what_is_removed_while_it_is_written_is_not_found_again_as_if_another_process_had_written_it(
    writing, looking, tmp_path
):
    store, entry, goes_on = writing
    looks = looking(store)
    store.catalogue.remove(entry.id)
    store.refresh()
    assert load(store, LONG) == 0
    goes_on.set()
    store.flush()
    assert not any(looks) and load(store, LONG) == 0
    assert chunk_files(tmp_path) == [] and disk_bytes(store) == 0 and chunks_of(store) == []


def test_what_is_computed_again_after_that_is_written_again(writing, tmp_path):
    store, entry, goes_on = writing
    store.catalogue.remove(entry.id)
    put(store, LONG)
    goes_on.set()
    store.flush()
    check_ledger(store)
    store = reopened(store, tmp_path)
    assert load(store, LONG) == 1000


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


def test_a_chunk_that_is_queued_twice_is_written_once(store, monkeypatch):
    written, real = [], chunkfile.write
    monkeypatch.setattr(chunkfile, "write", lambda path, *rest: written.append(path) or real(path, *rest))
    writer = store._disk.writer
    with writer._changed:  # so that both are in one batch
        writer.put(put(store, LONG[:128]).chunk, None)
    store.flush()
    assert len(written) == len(chunks_of(store)) == 1


def test_an_index_that_refuses_does_not_stop_the_writer_and_is_told_later(tmp_path, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.disk.index._BUSY_MS", 1)
    store = new_store(tmp_path)
    holder = apsw.Connection(str(store._disk.files.folder / "index.db"))
    holder.execute("BEGIN IMMEDIATE")
    put(store, LONG[:500])
    store.flush()
    assert len(chunk_files(tmp_path)) == 4
    holder.execute("COMMIT")
    holder.close()
    put(store, LONG)
    store.flush()
    rows = store._disk.files.index.rows_after(0)
    assert {row.key for row in rows} == {chunk.key for chunk in chunks_of(store)}


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
