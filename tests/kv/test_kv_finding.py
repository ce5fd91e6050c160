"""What was stored is found: token by token, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep.types.lineage import EXACT
from helpers.kv_building import LONG, chunks_of, exported, load, new_store, put

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
