"""A conversation that grows supersedes its tail, unless a sequence still needs it."""

from __future__ import annotations

import numpy as np

from emberkeep.kv.disk.transfers import FetchState
from emberkeep.types.lineage import EXACT
from helpers.kv_building import (
    LONG,
    chunk_files,
    chunks_of,
    exported,
    fetched,
    load,
    new_store,
    no_space,
    prompt,
    put,
)


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


def test_a_tail_that_others_build_on_is_not_superseded(store):
    put(store, LONG[:50])
    cursor = store.advance(store.origin(EXACT), LONG[:50])
    part = prompt(20, seed=3)
    whole = np.concatenate([LONG[:50], part])
    store.insert(cursor, part, exported(whole, 50, 70), (), fork=False)
    put(store, LONG[:128])
    store.flush()
    assert load(store, whole) == 70
    assert load(store, LONG[:128]) == 128


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
