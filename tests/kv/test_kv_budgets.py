"""RAM and disk stay within their budgets, and what is evicted is what is needed least."""

from __future__ import annotations

import logging

from emberkeep.types.lineage import EXACT
from helpers.kv_building import (
    CHUNK_BYTES,
    LONG,
    check_ledger,
    chunk_files,
    chunks_of,
    load,
    new_store,
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


def test_without_a_disk_the_deepest_chunks_go_first():
    store = new_store(None, warm=6 * CHUNK_BYTES)
    put(store, LONG)
    kept = load(store, LONG)
    assert 0 < kept <= 6 * 128
    assert kept % 128 == 0


def test_a_ram_budget_too_small_for_one_chunk_keeps_nothing_and_ends():
    store = new_store(None, warm=CHUNK_BYTES // 2)
    put(store, LONG)
    assert chunks_of(store) == []


def test_pinned_chunks_stay_in_ram(tmp_path):
    store = new_store(tmp_path, warm=3 * CHUNK_BYTES)
    put(store, LONG[:256])
    store.flush()
    match = store.match(EXACT, LONG[:256])
    put(store, prompt(900, seed=1))
    store.flush()
    assert all(segment.chunk.payload is not None for segment in match.segments)
    store.release(match)


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


def test_a_pinned_chunk_is_not_evicted_from_disk(tmp_path):
    store = new_store(tmp_path, cold=30_000)
    put(store, LONG[:500])
    match = store.match(EXACT, LONG[:500])
    for seed in range(6):
        put(store, prompt(500, seed=seed))
        store.flush()
    store.release(match)
    assert load(store, LONG[:500]) == 500


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
