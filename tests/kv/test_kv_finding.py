"""What was stored is found: token by token, and nothing else."""

from __future__ import annotations

import numpy as np

from emberkeep.types.lineage import EXACT
from helpers.kv_building import (
    LONG,
    chunks_of,
    exported,
    load,
    new_store,
    put,
)


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


def test_an_empty_prompt_matches_nothing(store):
    put(store, LONG)
    assert load(store, LONG[:0]) == 0


def test_what_follows_a_place_explains_a_divergence(store):
    put(store, LONG[:256])
    inside = store.advance(store.origin(EXACT), LONG[:200])
    assert np.array_equal(store.stored_after(inside), LONG[200:256])
    border = store.advance(store.origin(EXACT), LONG[:128])
    assert np.array_equal(store.stored_after(border), LONG[128:256])
    end = store.advance(store.origin(EXACT), LONG[:256])
    assert len(store.stored_after(end)) == 0


def test_equal_prefixes_are_stored_once(store):
    put(store, LONG)
    before = store.counters.inserted_chunks
    put(store, LONG)
    put(store, LONG[:700])
    assert store.counters.inserted_chunks == before


def test_inserting_what_is_known_queues_no_second_write(store):
    for _ in range(3):
        store.insert(store.origin(EXACT), LONG[:128], exported(LONG, 0, 128), (), fork=False)
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


def test_a_store_without_a_disk_works_in_ram():
    store = new_store(None)
    put(store, LONG[:150])
    put(store, LONG[:300])
    assert load(store, LONG) == 300
    assert sorted(len(chunk.tokens) for chunk in chunks_of(store)) == [44, 128, 128]
    store.flush()
    store.close()
