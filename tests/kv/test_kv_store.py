"""What was stored is found: token by token, by its owner, from disk, after a restart, and nothing else."""

from __future__ import annotations

import os

import numpy as np
import pytest

from emberkeep.kv.disk.transfers import FetchState
from emberkeep.types.lineage import EXACT, Lineage, private_namespace
from helpers.kv_building import (
    LONG,
    PIECES,
    check_ledger,
    chunk_files,
    chunks_of,
    exported,
    fetched,
    load,
    new_store,
    no_space,
    only_on_disk,
    path_tokens,
    prompt,
    put,
    reopened,
)

EDITED = np.concatenate([LONG[:200], LONG[200:201] + 1, LONG[201:]])


@pytest.mark.parametrize(
    ("stored", "wanted", "found"),
    [(LONG, LONG, 1000), (LONG[:300], LONG, 300), (LONG, EDITED, 200), (LONG, LONG[:0], 0)],
    ids=["all", "a longer prompt", "an edited prompt", "an empty prompt"],
)
def test_a_prompt_is_found_as_far_as_it_is_stored(store, stored, wanted, found):
    put(store, stored)
    assert load(store, wanted) == found


def test_an_edited_prompt_shares_what_comes_before_and_keeps_what_comes_after(store):
    put(store, LONG)
    before = len(chunks_of(store))
    put(store, EDITED)
    assert load(store, EDITED) == load(store, LONG) == 1000
    assert len(chunks_of(store)) - before == 7  # (1000 - 200) / 128


@pytest.mark.parametrize(("place", "end"), [(200, 256), (128, 256), (256, 256)], ids=["inside", "border", "end"])
def test_what_follows_a_place_explains_a_divergence(store, place, end):
    put(store, LONG[:256])
    here = store.advance(store.origin(EXACT), LONG[:place])
    assert store.stored_after(here).tolist() == LONG[place:end].tolist()


def test_equal_prefixes_are_stored_once_and_written_once(store):
    for tokens in (LONG, LONG, LONG[:700]):
        put(store, tokens)
    for _ in range(2):
        store.insert(store.origin(EXACT), LONG[:128], exported(LONG, 0, 128), (), fork=False)
    store.flush()
    assert store.counters.inserted_chunks == store.stats()["cold"]["written_chunks"] == 8


def test_a_place_that_was_evicted_leads_back_to_the_beginning(store):
    cursor = put(store, LONG[:128])
    store.reject(cursor.chunk)
    lost = store.insert(cursor, LONG[128:256], exported(LONG, 128, 256), (), fork=False)
    assert lost.position == 0
    assert chunks_of(store) == []
    put(store, LONG[:128])
    assert store.advance(cursor, LONG).position == 128, "the new chunk under the old key is used"
    assert store.advance(cursor, LONG).chunk is not cursor.chunk


def test_a_store_without_a_disk_works_in_ram():
    store = new_store(None)
    put(store, LONG[:150])
    put(store, LONG[:300])
    assert load(store, LONG) == 300
    assert sorted(len(chunk.tokens) for chunk in chunks_of(store)) == [44, 128, 128]
    store.flush()


def test_a_growing_conversation_supersedes_its_tail(store, tmp_path):
    for length in (150, 190, 255, 256, 300):
        put(store, LONG[:length])
        store.flush()
        assert load(store, LONG[:length]) == length
    assert sorted(len(chunk.tokens) for chunk in chunks_of(store)) == [44, 128, 128]
    assert len(chunk_files(tmp_path)) == 3


def test_a_fork_is_not_superseded_by_one_of_its_branches(store):
    put(store, LONG[:50], fork=True)
    put(store, LONG[:300])
    put(store, np.concatenate([LONG[:50], prompt(100, seed=9)]))
    store.flush()
    assert sorted(chunk.start for chunk in chunks_of(store)) == [0, 50, 50, 178]


def test_a_pinned_tail_stays_until_it_is_released(store):
    put(store, LONG[:50])
    match = store.match(EXACT, LONG[:50])
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


def test_a_tail_stays_when_what_supersedes_it_is_lost_before_it_is_written(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    put(store, LONG[:50])
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunkfile.write", no_space)
        longer = put(store, LONG[:128])
        store.flush()
    store.transact(lambda ledger: ledger.drop(longer.chunk, None))  # as if RAM had run short
    store._disk.writer._paused_until = 0.0
    put(store, prompt(20, seed=1))
    store.flush()
    assert load(store, LONG) == 50


def test_a_tail_that_is_built_on_while_its_successor_is_written_stays(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    tail = put(store, LONG[:50])
    store.flush()
    with monkeypatch.context() as broken:
        broken.setattr("emberkeep.kv.disk.chunkfile.write", no_space)
        put(store, LONG[:128])
        store.flush()
    part = prompt(20, seed=3)
    whole = np.concatenate([LONG[:50], part])
    store.insert(tail, part, exported(whole, 50, 70), (), fork=False)
    store._disk.writer._paused_until = 0.0
    put(store, prompt(20, seed=1))
    store.flush()
    assert load(store, whole) == 70
    assert load(store, LONG) == 128


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


def test_waiters_of_one_read_are_all_told(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    chunk = match.segments[0].chunk
    results = [fetched(store, chunk) for _ in range(3)]
    assert results == [FetchState.READY] * 3
    assert store.counters.read_chunks == 1
    store.release(match)


def test_opening_reads_no_payload_and_readahead_brings_a_prompts_chunks_into_ram(tmp_path):
    store = only_on_disk(tmp_path, LONG, prompt(500, seed=5))
    assert store.counters.read_chunks == 0
    text = b"".join(PIECES[token] for token in LONG)
    started = store.readahead(EXACT, text, PIECES)
    match = store.match(EXACT, LONG)
    assert started == {segment.chunk.key for segment in match.segments}
    assert [fetched(store, s.chunk) for s in match.segments] == [FetchState.READY] * 8
    store.release(match)
    assert store.counters.read_chunks == 8
    assert store.readahead(EXACT, text, PIECES) == set()


ALICE = private_namespace("alice")

BOB = private_namespace("bob")


def test_namespaces_do_not_see_each_other(tmp_path):
    store = new_store(tmp_path)
    put(store, LONG, namespace=ALICE)
    store = reopened(store, tmp_path)
    for namespace in (BOB, ""):
        assert load(store, LONG, namespace=namespace) == 0
        assert store.readahead(Lineage(namespace), b"".join(PIECES[t] for t in LONG), PIECES) == set()


def test_the_path_of_a_chunk_is_made_of_hex_digits_only(store, tmp_path):
    hostile = "../../../etc/passwd\0\n" + "x" * 400
    put(store, LONG[:128], namespace=hostile)
    store.flush()
    (path,) = chunk_files(tmp_path)
    assert path.name == f"{chunks_of(store)[0].key.hex()}.kv"
    assert np.array_equal(path_tokens(chunks_of(store)[0]), LONG[:128])


def test_a_running_sequence_goes_on_storing_after_its_namespace_was_forgotten(store):
    origin = store.origin(Lineage(ALICE))
    put(store, LONG[:128], namespace=ALICE)
    store.catalogue.forget_user("alice")
    cursor = store.advance(origin, LONG[:128])
    store.insert(cursor, LONG[:128], exported(LONG, 0, 128), (), fork=False)
    assert load(store, LONG, namespace=ALICE) == 128
