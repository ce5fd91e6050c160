"""Drafts from what is stored: its owner's, and no other's; there after a restart, and gone when it was deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv import corpus as corpus_module
from emberkeep.kv.corpus import TokenCorpus
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.store import KvStore
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import SHARED, Lineage, private_namespace
from emberkeep.types.request import Ttl
from helpers.canaries import TOKENS, Canary
from helpers.chance import examples
from helpers.kv_building import CHUNK_BYTES, LONG, chunks_of, load, new_store, prompt, put, reopened
from helpers.waiting import eventually

ALICE = Lineage(private_namespace("alice"))
BOB = Lineage(private_namespace("bob"))
ANN = Canary(7)


def label(key: str) -> Label:
    return Label(EntryKind.CONVERSATION, key, key, Ttl.SHORT, key)


def ready(store: KvStore, lineage: Lineage, owners: int = 2) -> TokenCorpus:
    """As after the first request of `lineage`, when its text and what is shared are there."""
    store.corpus.prepare(lineage)
    assert eventually(lambda: store.corpus.stats()["owners"] >= owners)
    return store.corpus


def draft(corpus: TokenCorpus, lineage: Lineage, context: TokenArray, limit: int = 8) -> list[int] | None:
    found = corpus.find(lineage, context, limit)
    return None if found is None else found.tokens.tolist()


# ── what is stored ──


def test_a_restarted_store_drafts_from_what_was_answered_before(tmp_path):
    store = new_store(tmp_path)
    put(store, LONG, namespace=ALICE)
    store = reopened(store, tmp_path)
    assert draft(store.corpus, ALICE, LONG[500:540]) is None  # nothing waits for it to be made
    corpus = ready(store, ALICE)
    assert draft(corpus, ALICE, LONG[500:540]) == LONG[540:548].tolist()
    assert draft(corpus, ALICE, LONG[125:135], 300) == LONG[135:435].tolist()  # across chunks


def test_no_user_drafts_from_the_text_of_another(store):
    put(store, LONG, namespace=ALICE)
    ready(store, ALICE)
    corpus = ready(store, BOB, owners=3)
    assert draft(corpus, BOB, LONG[500:540]) is None
    assert draft(corpus, Lineage(), LONG[500:540]) is None
    assert len(corpus.path(BOB, LONG[:500], 8)) == 0


def test_what_is_shared_is_drafted_for_all_and_what_grows_on_it_for_its_owner(store):
    put(store, LONG[:256], namespace=SHARED)
    put(store, LONG[:500], namespace=ALICE)
    assert {chunk.lineage.owner for chunk in chunks_of(store)} == {SHARED, ALICE.owner}
    ready(store, ALICE)
    corpus = ready(store, BOB, owners=3)
    assert draft(corpus, BOB, LONG[100:140], 400) == LONG[140:256].tolist()
    assert draft(corpus, ALICE, LONG[240:256], 400) == LONG[256:500].tolist()
    assert draft(corpus, BOB, LONG[300:340]) is None
    assert corpus.path(BOB, LONG[:200], 400).tolist() == LONG[200:256].tolist()
    assert corpus.path(ALICE, LONG[:200], 400).tolist() == LONG[200:500].tolist()


def test_every_branch_is_drafted_after_what_it_grows_from(store):
    branches = [np.concatenate([LONG[:at], prompt(150, seed=at)]) for at in (40, 128, 200, 300)]
    for tokens in (LONG[:400], *branches):
        put(store, tokens, namespace=ALICE)
    corpus = ready(store, ALICE)
    assert corpus.stats()["tokens"] < 128 + sum(len(chunk.tokens) for chunk in chunks_of(store)) + 5 * 32
    for at, tokens in zip((40, 128, 200, 300), branches, strict=True):
        assert draft(corpus, ALICE, tokens[at - 20 : at + 2]) == tokens[at + 2 : at + 10].tolist()


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=6))
def test_whatever_is_stored_is_found(growths):
    store = new_store(None)
    texts = [LONG[:50]]
    for number, (base, at) in enumerate(growths):
        before = texts[base % len(texts)]
        texts.append(np.concatenate([before[:at], prompt(90, seed=number + 1)]))
    for tokens in texts:
        put(store, tokens, namespace=ALICE)
    corpus = ready(store, ALICE)
    for tokens in texts[1:]:
        context = tokens[:-4][-36:]
        goes_on = draft(corpus, ALICE, context, 4)
        assert any(np.append(context, goes_on).astype(np.int32).tobytes() in text.tobytes() for text in texts)
    store.close()


# ── what is added ──


def test_a_turn_adds_what_is_new_in_it(store):
    corpus = ready(store, ALICE)
    corpus.add(ALICE, LONG[:300], 200)
    assert draft(corpus, ALICE, LONG[180:205]) == LONG[205:213].tolist()
    assert draft(corpus, ALICE, LONG[100:140]) is None  # it was there before: the store has it
    assert draft(corpus, BOB, LONG[180:205]) is None


def test_what_a_turn_adds_while_the_text_is_being_made_is_not_lost():
    gate, ledger = threading.Event(), Ledger()

    def transact(change: Callable[[Ledger], Any]) -> Any:
        assert threading.current_thread().name != "kv-corpus" or gate.wait(20)
        return change(ledger)

    corpus = TokenCorpus(transact)
    corpus.add(ALICE, LONG, 0)  # no request has begun: nothing to add to
    corpus.prepare(ALICE)
    corpus.add(ALICE, LONG[:300], 200)
    assert draft(corpus, ALICE, LONG[180:205]) is None
    gate.set()
    assert eventually(lambda: draft(corpus, ALICE, LONG[180:205]))
    assert draft(corpus, ALICE, LONG[400:440]) is None
    corpus.close()


def test_the_latest_used_text_is_kept_where_there_is_too_much(store, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_TOKENS", 300)
    old, new = prompt(250, seed=1), prompt(250, seed=2)
    for tokens in (old, new):
        store.release(store.match(ALICE, tokens))  # a lookup: time goes on
        put(store, tokens, namespace=ALICE)
    corpus = ready(store, ALICE)
    assert draft(corpus, ALICE, new[100:120]) == new[120:128].tolist()
    assert draft(corpus, ALICE, old[100:120]) is None


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOKENS_IN_ALL", 500), ("MAX_OWNERS", 2)])
def test_the_text_of_the_least_recently_used_owner_goes_first(store, monkeypatch, limit, value):
    monkeypatch.setattr(corpus_module, limit, value)
    put(store, LONG[:300], namespace=ALICE)
    put(store, LONG[:300], namespace=BOB)
    ready(store, ALICE)
    store.corpus.prepare(BOB)
    assert eventually(lambda: draft(store.corpus, BOB, LONG[100:140]))
    assert draft(store.corpus, ALICE, LONG[100:140]) is None
    store.corpus.prepare(ALICE)
    assert eventually(lambda: draft(store.corpus, ALICE, LONG[100:140]))


def test_old_text_is_made_anew_of_what_is_stored_by_then(store, monkeypatch):
    corpus = ready(store, ALICE)
    corpus.add(ALICE, prompt(300, seed=1), 0)  # the store has none of it, as if it were evicted
    put(store, LONG, namespace=ALICE)  # as another process does
    ready(store, ALICE)
    assert draft(corpus, ALICE, LONG[100:140]) is None
    now = corpus_module.monotonic()
    monkeypatch.setattr(corpus_module, "monotonic", lambda: now + 3601)
    ready(store, ALICE)
    assert draft(corpus, ALICE, LONG[100:140]) == LONG[140:148].tolist()
    assert draft(corpus, ALICE, prompt(300, seed=1)[100:140]) is None


# ── what is deleted ──


def test_a_user_who_is_forgotten_leaves_no_text(tmp_path):
    here, there = new_store(tmp_path), new_store(tmp_path)
    for store in (here, there):
        ANN.keep(store, TOKENS)
        corpus = ready(store, Lineage(ANN.namespace))
        assert draft(corpus, Lineage(ANN.namespace), ANN.tokens[100:140])
    here.catalogue.forget_user(ANN.user)
    there.notice_forgotten()
    for store in (here, there):
        assert store.corpus.find(Lineage(ANN.namespace), ANN.tokens[100:140], 8) is None
        corpus = ready(store, Lineage(ANN.namespace))
        assert corpus.find(Lineage(ANN.namespace), ANN.tokens[100:140], 8) is None
        assert corpus.stats()["tokens"] == 0
        store.close()


def test_a_listener_that_fails_lets_nothing_stay():
    store = new_store(None)
    ANN.keep(store, TOKENS)
    corpus = ready(store, Lineage(ANN.namespace))

    def fail(owners: object) -> None:
        raise RuntimeError("the engine is gone")

    store.holders.join("engine", store, fail)
    with pytest.raises(RuntimeError):
        store.holders.forget(ANN.user)
    assert corpus.find(Lineage(ANN.namespace), ANN.tokens[100:140], 8) is None


def test_text_that_is_forgotten_while_it_is_made_ready_does_not_come_back():
    store, listed, gate = new_store(None), threading.Event(), threading.Event()
    put(store, LONG, namespace=ALICE)

    def transact(change: Callable[[Ledger], Any]) -> Any:
        found = store.transact(change)
        if threading.current_thread().name == "kv-corpus":
            listed.set()
            assert gate.wait(20)
        return found

    corpus = TokenCorpus(transact)
    corpus.prepare(ALICE)
    assert listed.wait(20)
    corpus.forget({ALICE.owner})
    gate.set()
    assert eventually(lambda: corpus.stats()["owners"] == 1)  # what is shared comes after it
    assert draft(corpus, ALICE, LONG[100:140]) is None
    corpus.close()


def test_an_entry_that_is_removed_takes_its_text_with_it_and_leaves_that_of_others(store):
    secret, other = prompt(300, seed=1), prompt(300, seed=2)
    entry = store.turn_ended(label("secret"), put(store, secret, namespace=ALICE))
    store.turn_ended(label("other"), put(store, other, namespace=ALICE))
    corpus = ready(store, ALICE)
    assert draft(corpus, ALICE, secret[100:140])
    store.catalogue.remove(entry.id)
    assert draft(corpus, ALICE, secret[100:140]) is None
    ready(store, ALICE)
    assert draft(corpus, ALICE, secret[100:140]) is None
    assert draft(corpus, ALICE, other[100:140]) == other[140:148].tolist()


def test_what_was_evicted_stays_until_its_entry_is_removed():
    store = new_store(None, warm=3 * CHUNK_BYTES)
    secret = prompt(384, seed=1)
    entry = store.turn_ended(label("secret"), put(store, secret, namespace=ALICE))
    corpus = ready(store, ALICE)
    put(store, prompt(128, seed=2), namespace=ALICE)
    assert load(store, secret, namespace=ALICE) < len(secret)
    assert draft(corpus, ALICE, secret[300:340]) == secret[340:348].tolist()
    store.catalogue.remove(entry.id)
    assert draft(corpus, ALICE, secret[300:340]) is None
    ready(store, ALICE)
    assert draft(corpus, ALICE, secret[300:340]) is None


def test_what_has_expired_goes_with_its_text(store, monkeypatch):
    store.turn_ended(label("old"), put(store, LONG, namespace=ALICE))
    corpus = ready(store, ALICE)
    monkeypatch.setattr(store._ledger.clock, "now", lambda: 1e12)
    store.catalogue.gc()
    assert draft(corpus, ALICE, LONG[100:140]) is None


def test_what_another_process_removed_is_dropped_when_that_is_noticed(tmp_path):
    here, there = new_store(tmp_path), new_store(tmp_path)
    entry = here.turn_ended(label("secret"), put(here, LONG, namespace=ALICE))
    here.flush()
    there.refresh()
    corpus = ready(there, ALICE)
    assert draft(corpus, ALICE, LONG[100:140])
    here.catalogue.remove(entry.id)
    assert load(there, LONG, namespace=ALICE) == 0
    assert draft(corpus, ALICE, LONG[100:140]) is None


def test_text_that_cannot_be_made_ready_is_tried_again_by_the_next_request(store, monkeypatch, caplog):
    put(store, LONG, namespace=ALICE)

    def fail(chunks: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(corpus_module, "_segments", fail)
        store.corpus.prepare(ALICE)
        assert eventually(lambda: not store.corpus._texts)
    assert draft(ready(store, ALICE), ALICE, LONG[100:140]) == LONG[140:148].tolist()
    assert "not made ready" in caplog.text


# ── paths ──


def path(store: KvStore, tokens: TokenArray, limit: int, lineage: Lineage = ALICE) -> list[int]:
    return store.corpus.path(lineage, tokens, limit).tolist()


def test_a_prompt_that_was_answered_before_drafts_its_answer(store):
    put(store, LONG, namespace=ALICE)
    assert path(store, LONG[:300], 500) == LONG[300:800].tolist()
    assert path(store, LONG[:128], 3) == LONG[128:131].tolist()
    assert path(store, LONG, 10) == []
    assert path(store, np.append(LONG[:300], np.int32(1)), 10) == []
    assert path(store, LONG[:300], 10, BOB) == []


@pytest.mark.parametrize("branch", [256, 300])
def test_the_branch_that_was_used_last_is_followed(store, branch):
    first, second = LONG[:600], np.concatenate([LONG[:branch], prompt(200, seed=3)])
    for tokens in (first, second):
        store.release(store.match(ALICE, tokens))
        put(store, tokens, namespace=ALICE)
    assert path(store, LONG[:branch], 150) == second[branch : branch + 150].tolist()
    assert path(store, LONG[:100], 350) == second[100:450].tolist()
    store.release(store.match(ALICE, first))
    assert path(store, LONG[:branch], 150) == first[branch : branch + 150].tolist()
    assert path(store, LONG[:100], 350) == first[100:450].tolist()


def test_a_turn_that_ended_in_the_middle_of_what_goes_on_elsewhere_goes_on(store):
    put(store, LONG[:100], namespace=ALICE, fork=True)
    put(store, np.concatenate([LONG[:60], prompt(20, seed=1)]), namespace=ALICE)
    put(store, LONG[:400], namespace=ALICE)
    assert path(store, LONG[:100], 200) == LONG[100:300].tolist()


def test_approximate_state_is_followed_only_by_requests_that_would_reuse_it(store):
    coarse = Lineage(ALICE.owner, bits=8)
    put(store, LONG[:128], namespace=ALICE)
    put(store, LONG[:300], namespace=coarse)
    assert path(store, LONG[:100], 400) == LONG[100:128].tolist()
    assert path(store, LONG[:100], 400, coarse) == LONG[100:300].tolist()


def test_snapshots_are_no_text(store):
    cursor = put(store, LONG[:128], namespace=ALICE)
    store.insert_snapshot(cursor, memoryview(bytes(64)))
    put(store, LONG[:200], namespace=ALICE)
    corpus = ready(store, ALICE)
    assert path(store, LONG[:100], 400) == LONG[100:200].tolist()
    assert draft(corpus, ALICE, LONG[100:120], 400) == LONG[120:200].tolist()
