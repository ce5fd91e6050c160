"""Many threads on one store: in whatever order they run, the ledger is right and so is every payload."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.store import KvStore
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import EXACT
from helpers.chance import examples, seed, times
from helpers.kv_building import CHUNK_TOKENS, check_ledger, chunks_of, exported, load, new_store, right_bytes

pytestmark = pytest.mark.usefixtures("quick_disk")

ROUNDS = times(30)


def conversation(number: int, length: int) -> TokenArray:
    """Conversations share their first 40 tokens, pairs of them 200."""
    random = np.random.default_rng([number // 2, 7])
    tokens = random.integers(32, 127, 600, dtype=np.int32)
    tokens[:40] = np.arange(40, 80)
    tokens[200:] += number % 2
    return tokens[:length]


PAYLOADS = {number: exported(conversation(number, 600), 0, 600) for number in range(6)}
CELL = len(PAYLOADS[0]) // 600


def keep(store: KvStore, number: int, length: int) -> None:
    """What a sequence does as it grows, with payloads prepared beforehand."""
    tokens, cursor, before = conversation(number, length), store.origin(EXACT), -1
    while before < (cursor := store.advance(cursor, tokens)).position < length:
        before = cursor.position
        begin = store.growth_point(cursor)
        end = min(begin.position + CHUNK_TOKENS, length)
        payload = PAYLOADS[number][begin.position * CELL : end * CELL]
        cursor = store.insert(begin, tokens[begin.position : end], payload, (), fork=length % 3 == 0)


def use(store: KvStore, worker: int) -> None:
    random = np.random.default_rng(seed(worker))
    for _ in range(ROUNDS):
        number, length = int(random.integers(6)), int(random.integers(1, 600))
        if worker % 2:
            keep(store, number, length)
        else:
            load(store, conversation(number, length))
        if random.random() < 0.1:
            store.refresh()
        if random.random() < 0.03:
            store.catalogue.forget_user("")
        if random.random() < 0.05:
            match = store.match(EXACT, conversation(number, length))
            store.release(match)
            for segment in match.segments[-1:]:
                store.reject(segment.chunk)


@pytest.mark.parametrize("cold_budget", [25_000, 1 << 30])
def test_threads_leave_a_right_ledger_and_right_payloads(tmp_path, cold_budget):
    store = new_store(tmp_path, warm=6 * CHUNK_TOKENS * CELL, cold=cold_budget)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            use(store, worker)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    assert failures == []
    check_ledger(store)
    assert all(chunk.pins == 0 for chunk in chunks_of(store))
    assert all(chunk.payload == right_bytes(chunk) for chunk in chunks_of(store) if chunk.payload is not None)
    for number in range(6):
        load(store, conversation(number, 600))
    store.close()
    again = new_store(tmp_path)
    for number in range(6):
        load(again, conversation(number, 600))
    assert again.counters.damaged_chunks == 0


actions = st.lists(
    st.tuples(
        st.sampled_from(["keep", "load", "forget", "reject", "restart", "flush"]),
        st.integers(0, 5),
        st.integers(1, 600),
    ),
    max_size=12,
)


@examples(25)
@given(actions, st.integers(1, 8), st.sampled_from([12_000, 1 << 30]))
def test_any_history_leaves_a_right_ledger_and_right_payloads(tmp_path_factory, history, warm_chunks, cold_budget):
    folder, warm = tmp_path_factory.mktemp("kv"), warm_chunks * CHUNK_TOKENS * CELL
    store = new_store(folder, warm=warm, cold=cold_budget)
    for action, number, length in history:
        tokens = conversation(number, length)
        if action == "keep":
            keep(store, number, length)
        elif action == "load":
            load(store, tokens)
        elif action == "forget":
            store.catalogue.forget_user("")
        elif action == "reject":
            match = store.match(EXACT, tokens)
            store.release(match)
            for segment in match.segments[-1:]:
                store.reject(segment.chunk)
        elif action == "flush":
            store.flush()
        else:
            store.close()
            store = new_store(folder, warm=warm, cold=cold_budget)
        check_ledger(store)
    store.flush()
    check_ledger(store)
    store.close()
