from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.fake import FakeVocab
from emberkeep.kv.fetch import FetchState
from emberkeep.kv.store import KvStore
from helpers.kv_building import (
    PLENTY,
    check_books,
    chunk_files,
    chunks_of,
    exported,
    fetched,
    load,
    new_store,
    path_tokens,
    prompt,
    put,
    replayed,
)

PIECES = FakeVocab().pieces
LONG = prompt(1000)
CHUNK_BYTES = len(exported(LONG, 0, 128))


@pytest.fixture
def store(tmp_path: Path):
    store = new_store(tmp_path)
    yield store
    check_books(store)
    store.close()


def reopened(store: KvStore, folder: Path, **budgets: int) -> KvStore:
    store.close()
    return new_store(folder, **budgets)


def only_on_disk(folder: Path, *prompts: np.ndarray) -> KvStore:
    """A store that has just been opened: everything is cold."""
    store = new_store(folder)
    for tokens in prompts:
        put(store, tokens)
    return reopened(store, folder)


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.glob(f"*/chunks/*/{key.hex()}.kv")
    return path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


# ── finding ──


def test_what_was_stored_is_found_to_the_last_token(store):
    put(store, LONG)
    assert load(store, LONG) == 1000


def test_a_longer_prompt_finds_what_is_stored_of_it(store):
    put(store, LONG[:300])
    assert load(store, LONG) == 300


def test_a_prompt_edited_inside_a_chunk_is_found_up_to_the_edit(store):
    put(store, LONG)
    edited = LONG.copy()
    edited[200] += 1
    assert load(store, edited) == 200


def test_an_edited_prompt_shares_what_comes_before_and_keeps_what_comes_after(store):
    put(store, LONG)
    edited = LONG.copy()
    edited[200] += 1
    before = len(chunks_of(store))
    put(store, edited)
    assert load(store, edited) == load(store, LONG) == 1000
    assert len(chunks_of(store)) - before == 7  # (1000 - 200) / 128


def test_namespaces_do_not_see_each_other(store):
    put(store, LONG, namespace="alice")
    assert load(store, LONG, namespace="bob") == 0
    assert load(store, LONG) == 0


def test_an_empty_prompt_matches_nothing(store):
    put(store, LONG)
    assert load(store, LONG[:0]) == 0


def test_what_follows_a_place_explains_a_divergence(store):
    put(store, LONG[:256])
    inside = store.advance(store.origin(""), LONG[:200])
    assert np.array_equal(store.stored_after(inside), LONG[200:256])
    border = store.advance(store.origin(""), LONG[:128])
    assert np.array_equal(store.stored_after(border), LONG[128:256])
    end = store.advance(store.origin(""), LONG[:256])
    assert len(store.stored_after(end)) == 0


# ── growing ──


def test_a_growing_conversation_supersedes_its_tail(store, tmp_path):
    for length in (150, 190, 255, 256, 300):
        put(store, LONG[:length])
        store.flush()
        assert load(store, LONG[:length]) == length
    assert sorted(len(chunk.tokens) for chunk in chunks_of(store)) == [44, 128, 128]
    assert len(chunk_files(tmp_path)) == 3


def test_equal_prefixes_are_stored_once(store):
    put(store, LONG)
    before = store.counters.inserted_chunks
    put(store, LONG)
    put(store, LONG[:700])
    assert store.counters.inserted_chunks == before


def test_a_fork_is_not_superseded_by_one_of_its_branches(store):
    put(store, LONG[:50], fork=True)
    put(store, LONG[:300])
    put(store, np.concatenate([LONG[:50], prompt(100, seed=9)]))
    store.flush()
    assert sorted(chunk.start for chunk in chunks_of(store)) == [0, 50, 50, 178]


def test_a_tail_that_others_build_on_is_not_superseded(store):
    put(store, LONG[:50])
    cursor = store.advance(store.origin(""), LONG[:50])
    part = prompt(20, seed=3)
    whole = np.concatenate([LONG[:50], part])
    store.insert(cursor, part, exported(whole, 50, 70), (), fork=False)
    put(store, LONG[:128])
    store.flush()
    assert load(store, whole) == 70
    assert load(store, LONG[:128]) == 128


def test_a_pinned_tail_stays_until_it_is_released(store):
    put(store, LONG[:50])
    match = store.match("", LONG[:50])
    put(store, LONG[:128])
    store.flush()
    assert fetched(store, match.segments[0].chunk) is FetchState.READY
    assert load(store, LONG[:50]) == 50
    store.release(match)


def test_a_superseding_chunk_inherits_what_was_sampled(store):
    put(store, LONG[:20], sampled=((15, 20),))
    put(store, LONG[:40], sampled=((30, 40),))
    store.flush()
    assert [chunk.sampled for chunk in chunks_of(store)] == [((15, 20), (30, 40))]


def test_inserting_what_is_known_queues_no_second_write(store):
    for _ in range(3):
        store.insert(store.origin(""), LONG[:128], exported(LONG, 0, 128), (), fork=False)
    store.flush()
    assert store.stats()["cold"]["written_chunks"] == 1
    assert store.stats()["cold"]["refused_chunks"] == 0


def test_a_place_that_was_evicted_leads_back_to_the_beginning(store):
    cursor = put(store, LONG[:128])
    store.reject(cursor.chunk)
    lost = store.insert(cursor, LONG[128:256], exported(LONG, 128, 256), (), fork=False)
    assert lost.position == 0
    assert chunks_of(store) == []
    put(store, LONG[:128])
    assert store.advance(cursor, LONG).position == 128, "the new chunk under the old key is used"
    assert store.advance(cursor, LONG).chunk is not cursor.chunk


# ── replaying ──


def test_sampled_tokens_are_replayed_by_their_text(store):
    spelled_by_letters = np.array([ord(c) for c in "the then"], np.int32)
    put(store, np.concatenate([LONG[:100], spelled_by_letters]), sampled=((100, 108),))
    cursor = store.advance(store.origin(""), LONG[:100])
    assert replayed(store, cursor, b"the then", PIECES) == tuple(spelled_by_letters)
    assert replayed(store, cursor, b"the", PIECES) == tuple(spelled_by_letters[:3])
    assert replayed(store, cursor, b"then", PIECES) == ()
    assert replayed(store, store.origin(""), b"the then", PIECES) == ()


def test_a_replay_follows_an_answer_over_chunk_borders(store):
    answer = np.array([ord(c) for c in "a long answer " * 30], np.int32)
    whole = np.concatenate([LONG[:100], answer])
    cursor = store.origin("")
    for begin in range(0, len(whole), 128):
        end = min(begin + 128, len(whole))
        span = ((max(100 - begin, 0), end - begin),)
        cursor = store.insert(cursor, whole[begin:end], exported(whole, begin, end), span, fork=False)
    at = store.advance(store.origin(""), LONG[:100])
    assert replayed(store, at, b"a long answer " * 30, PIECES) == tuple(answer)


def test_text_that_nobody_sampled_is_not_replayed(store):
    put(store, np.array([ord(c) for c in "the"], np.int32))
    assert replayed(store, store.origin(""), b"the", PIECES) == ()


def test_stored_tokens_outside_the_vocabulary_are_passed_over(store):
    alien = np.array([5, 2_000_000], np.int32)
    put(store, alien, sampled=((0, 2),))
    assert replayed(store, store.origin(""), b"\x05!", PIECES) == ()
    assert store.readahead("", b"\x05!", PIECES) == set()


# ── disk ──


def test_everything_is_found_again_after_a_restart(store, tmp_path):
    put(store, LONG, sampled=((1, 4),))
    put(store, LONG, namespace="alice")
    again = reopened(store, tmp_path)
    assert load(again, LONG) == load(again, LONG, namespace="alice") == 1000
    assert {chunk.sampled for chunk in chunks_of(again)} == {((1, 4),), ()}
    check_books(again)
    again.close()


def test_opening_reads_no_payload(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    assert all(chunk.payload is None for chunk in chunks_of(store))
    assert store.match("", LONG).tokens == 1000
    assert store.counters.read_chunks == 0
    store.close()


def test_uses_survive_a_restart_and_the_clock_goes_on(store, tmp_path):
    put(store, LONG[:128])
    for _ in range(5):
        load(store, LONG[:128])
    again = reopened(store, tmp_path)
    (chunk,) = chunks_of(again)
    assert (chunk.hits, chunk.last_used) == (5, 5)
    load(again, LONG[:128])
    assert chunk.last_used == 6
    again.close()


def test_a_store_without_a_disk_works_in_ram():
    store = new_store(None)
    put(store, LONG[:150])
    put(store, LONG[:300])
    assert load(store, LONG) == 300
    assert sorted(len(chunk.tokens) for chunk in chunks_of(store)) == [44, 128, 128]
    store.flush()
    store.close()


def test_a_second_store_on_the_folder_learns_of_new_chunks(store, tmp_path):
    other = new_store(tmp_path)
    put(store, LONG)
    store.flush()
    assert load(other, LONG) == 0
    other.refresh()
    assert load(other, LONG) == 1000
    check_books(other)
    other.close()


def test_two_stores_may_compute_the_same_prompt(store, tmp_path):
    other = new_store(tmp_path)
    put(store, LONG)
    put(other, LONG, sampled=((0, 100),))
    store.flush()
    other.flush()
    store.refresh()
    other.refresh()
    for one in (store, other):
        for chunk in chunks_of(one):
            chunk.payload, one._books.warm_bytes = None, one._books.warm_bytes - len(chunk.payload)
        assert load(one, LONG) == 1000
        assert one.counters.damaged_chunks == 0
    other.close()


def test_chunks_evicted_by_another_process_are_a_miss(store, tmp_path):
    put(store, LONG)
    again = reopened(store, tmp_path)
    for path in chunk_files(tmp_path):
        path.unlink()
    assert load(again, LONG) == 0
    assert again.counters.vanished_chunks == 1
    check_books(again)
    put(again, LONG)
    assert load(again, LONG) == 1000
    again.close()


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


def test_waiters_of_one_read_are_all_told(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match("", LONG)
    chunk = match.segments[0].chunk
    results = [fetched(store, chunk) for _ in range(3)]
    assert results == [FetchState.READY] * 3
    assert store.counters.read_chunks == 1
    store.release(match)
    store.close()


def test_readahead_brings_a_prompts_chunks_into_ram(tmp_path):
    store = only_on_disk(tmp_path, LONG, prompt(500, seed=5))
    text = b"".join(PIECES[token] for token in LONG)
    started = store.readahead("", text, PIECES)
    match = store.match("", LONG)
    assert started == {segment.chunk.key for segment in match.segments}
    assert [fetched(store, s.chunk) for s in match.segments] == [FetchState.READY] * 8
    store.release(match)
    assert store.counters.read_chunks == 8
    assert store.readahead("", text, PIECES) == set()
    store.close()


def test_readahead_stays_in_its_namespace(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    assert store.readahead("alice", b"".join(PIECES[t] for t in LONG), PIECES) == set()
    store.close()


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


def test_two_thousand_small_chunks_open(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    store = new_store(tmp_path)
    cursor, payload = store.origin(""), memoryview(b"payload")
    for index in range(2000):
        cursor = store.insert(cursor, LONG[index % 1000 :][:1], payload, (), fork=True)
    again = reopened(store, tmp_path)
    assert again.match("", np.tile(LONG, 2)).tokens == 2000
    again.close()


# ── budgets ──


def test_ram_stays_within_its_budget_and_the_rest_is_read_back(tmp_path):
    store = new_store(tmp_path, warm=5 * CHUNK_BYTES)
    prompts = [prompt(400, seed=seed) for seed in range(6)]
    for tokens in prompts:
        put(store, tokens)
        store.flush()
        assert store._books.warm_bytes <= 5 * CHUNK_BYTES
    assert [load(store, tokens) for tokens in prompts] == [400] * 6
    assert store._books.warm_bytes <= 5 * CHUNK_BYTES
    check_books(store)
    store.close()


def test_without_a_disk_the_deepest_chunks_go_first():
    store = new_store(None, warm=6 * CHUNK_BYTES)
    put(store, LONG)
    kept = load(store, LONG)
    assert 0 < kept <= 6 * 128
    assert kept % 128 == 0
    check_books(store)


def test_a_ram_budget_too_small_for_one_chunk_keeps_nothing_and_ends():
    store = new_store(None, warm=CHUNK_BYTES // 2)
    put(store, LONG)
    assert chunks_of(store) == []
    check_books(store)


def test_pinned_chunks_stay_in_ram(tmp_path):
    store = new_store(tmp_path, warm=3 * CHUNK_BYTES)
    put(store, LONG[:256])
    store.flush()
    match = store.match("", LONG[:256])
    put(store, prompt(900, seed=1))
    store.flush()
    assert all(segment.chunk.payload is not None for segment in match.segments)
    store.release(match)
    store.close()


def test_the_disk_stays_within_its_budget(tmp_path):
    budget = 40_000
    store = new_store(tmp_path, cold=budget)
    for seed in range(8):
        put(store, prompt(500, seed=seed))
        store.flush()
        assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= budget
    assert store.counters.cold_evictions > 0
    check_books(store)
    files = {path.stem for path in chunk_files(tmp_path)}
    assert files == {chunk.key.hex() for chunk in chunks_of(store) if chunk.on_disk}
    store.close()


def test_eviction_never_takes_a_chunk_before_what_builds_on_it(tmp_path):
    store = new_store(tmp_path, cold=40_000)
    for seed in range(8):
        put(store, prompt(500, seed=seed))
    store.flush()
    again = reopened(store, tmp_path)
    found = [load(again, prompt(500, seed=seed)) for seed in range(8)]
    assert all(tokens % 128 == 0 or tokens == 500 for tokens in found)
    assert sum(found) == sum(len(chunk.tokens) for chunk in chunks_of(again))
    again.close()


def test_what_is_used_survives_what_is_not(tmp_path):
    store = new_store(tmp_path, cold=40_000)
    favourite = prompt(500, seed=100)
    put(store, favourite)
    for seed in range(12):
        put(store, prompt(500, seed=seed))
        assert load(store, favourite) == 500
        store.flush()
    assert load(store, favourite) == 500
    store.close()


def test_a_pinned_chunk_is_not_evicted_from_disk(tmp_path):
    store = new_store(tmp_path, cold=30_000)
    put(store, LONG[:500])
    match = store.match("", LONG[:500])
    for seed in range(6):
        put(store, prompt(500, seed=seed))
        store.flush()
    store.release(match)
    assert load(store, LONG[:500]) == 500
    store.close()


def test_other_models_stores_count_towards_the_budget(tmp_path):
    other = new_store(tmp_path, fingerprint=bytes(32))
    put(other, LONG)
    other.close()
    store = new_store(tmp_path, cold=20_000)
    put(store, LONG)
    store.flush()
    assert not (tmp_path / bytes(32).hex()[:32]).exists()
    assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= 20_000
    store.close()


# ── forgetting ──


def test_forgetting_a_namespace_removes_its_files_and_no_others(store, tmp_path):
    put(store, LONG, namespace="alice")
    put(store, LONG[:300], namespace="bob")
    store.flush()
    store.forget("alice")
    assert load(store, LONG, namespace="alice") == 0
    assert load(store, LONG, namespace="bob") == 300
    assert len(chunk_files(tmp_path)) == 3
    again = reopened(store, tmp_path)
    assert load(again, LONG, namespace="alice") == 0
    again.close()


def test_forgetting_also_removes_chunks_that_lost_their_parent(store, tmp_path):
    put(store, LONG, namespace="alice")
    store.flush()
    first = store.match("alice", LONG[:128]).segments[0].chunk
    store.close()
    file_of(tmp_path, first.key).unlink()
    again = new_store(tmp_path)
    again.forget("alice")
    assert chunk_files(tmp_path) == []
    again.close()


def test_a_running_sequence_goes_on_storing_after_its_namespace_was_forgotten(store):
    origin = store.origin("alice")
    put(store, LONG[:128], namespace="alice")
    store.forget("alice")
    cursor = store.advance(origin, LONG[:128])
    store.insert(cursor, LONG[:128], exported(LONG, 0, 128), (), fork=False)
    assert load(store, LONG, namespace="alice") == 128


# ── failing disks ──


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), OSError(30, "Read-only"), OSError(24, "Too many open files")]
)
def test_serving_goes_on_when_the_disk_refuses(store, monkeypatch, error):
    def refuse(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.write", refuse)
        put(store, LONG)
        store.flush()
        assert load(store, LONG) == 1000
        assert store.stats()["cold"]["refused_chunks"] > 0
        assert error.strerror in store.stats()["cold"]["last_error"]
        assert store.stats()["cold"]["written_chunks"] == 0


def test_refused_chunks_are_written_when_the_disk_is_well_again(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.write", _no_space)
        put(store, LONG[:500])
        store.flush()
    put(store, LONG)
    again = reopened(store, tmp_path)
    assert load(again, LONG) == 1000
    again.close()


def test_a_tail_stays_when_what_supersedes_it_is_lost_before_it_is_written(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    put(store, LONG[:50])
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.write", _no_space)
        longer = put(store, LONG[:128])
        store.flush()
    store._books.drop(longer.chunk)  # as if RAM had run short
    store._writer._paused_until = 0.0
    put(store, prompt(20, seed=1))
    store.flush()
    assert load(store, LONG) == 50
    store.close()


def test_a_tail_that_is_built_on_while_its_successor_is_written_stays(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    tail = put(store, LONG[:50])
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.chunkfile.write", _no_space)
        put(store, LONG[:128])
        store.flush()
    part = prompt(20, seed=3)
    whole = np.concatenate([LONG[:50], part])
    store.insert(tail, part, exported(whole, 50, 70), (), fork=False)
    store._writer._paused_until = 0.0
    put(store, prompt(20, seed=1))
    store.flush()
    assert load(store, whole) == 70
    assert load(store, LONG) == 128
    check_books(store)
    store.close()


def test_a_broken_disk_does_not_make_the_queue_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("emberkeep.kv.chunkfile.write", _no_space)
    store = new_store(tmp_path, warm=4 * CHUNK_BYTES)
    for seed in range(20):
        put(store, prompt(300, seed=seed))
    store.flush()
    store._writer._paused_until = 0.0
    put(store, prompt(20, seed=99))
    store.flush()
    assert store.stats()["cold"]["pending_chunks"] <= store.stats()["warm"]["chunks"]
    store.close()


def test_an_index_that_cannot_be_written_does_not_stop_the_writer(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    put(store, LONG[:50])
    store.flush()

    def refuse(keys):
        if list(keys):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(store._cold, "remove", refuse)
        put(store, LONG[:128])  # wants to remove the tail it supersedes
        store.flush()
    put(store, LONG)
    store.flush()
    assert load(store, LONG) == 1000
    assert len(chunks_of(store)) == 8
    store.close()


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


def test_a_write_that_loses_its_race_with_eviction_leaves_no_file(tmp_path, monkeypatch):
    from emberkeep.kv import chunkfile

    store, real = new_store(tmp_path), chunkfile.write

    def forgotten_meanwhile(path, *rest):
        store._books.forget("")
        return real(path, *rest)

    with monkeypatch.context() as racing:
        racing.setattr("emberkeep.kv.chunkfile.write", forgotten_meanwhile)
        put(store, LONG[:128])
        store.flush()
    assert chunk_files(tmp_path) == []
    assert PLENTY > store._books.cold_bytes == 0
    store.close()


def test_the_path_of_a_chunk_is_made_of_hex_digits_only(store, tmp_path):
    hostile = "../../../etc/passwd\0\n" + "x" * 400
    put(store, LONG[:128], namespace=hostile)
    store.flush()
    (path,) = chunk_files(tmp_path)
    assert path.name == f"{chunks_of(store)[0].key.hex()}.kv"
    assert np.array_equal(path_tokens(chunks_of(store)[0]), LONG[:128])


def _no_space(*_):
    raise OSError(28, "No space left on device")
