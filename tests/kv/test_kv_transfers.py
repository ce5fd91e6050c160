"""Chunks come from disk when they are needed, and once."""

from __future__ import annotations

from emberkeep.kv.disk.transfers import FetchState
from emberkeep.types.lineage import EXACT
from helpers.kv_building import LONG, PIECES, chunks_of, fetched, only_on_disk, prompt


def test_opening_reads_no_payload(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    assert all(chunk.payload is None for chunk in chunks_of(store))
    assert store.match(EXACT, LONG).tokens == 1000
    assert store.counters.read_chunks == 0


def test_waiters_of_one_read_are_all_told(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    match = store.match(EXACT, LONG)
    chunk = match.segments[0].chunk
    results = [fetched(store, chunk) for _ in range(3)]
    assert results == [FetchState.READY] * 3
    assert store.counters.read_chunks == 1
    store.release(match)


def test_readahead_brings_a_prompts_chunks_into_ram(tmp_path):
    store = only_on_disk(tmp_path, LONG, prompt(500, seed=5))
    text = b"".join(PIECES[token] for token in LONG)
    started = store.readahead(EXACT, text, PIECES)
    match = store.match(EXACT, LONG)
    assert started == {segment.chunk.key for segment in match.segments}
    assert [fetched(store, s.chunk) for s in match.segments] == [FetchState.READY] * 8
    store.release(match)
    assert store.counters.read_chunks == 8
    assert store.readahead(EXACT, text, PIECES) == set()
