"""The ids that were sampled for a text are found again by the text."""

from __future__ import annotations

import numpy as np

from emberkeep.types.lineage import EXACT
from helpers.kv_building import LONG, PIECES, exported, put, replayed


def test_sampled_tokens_are_replayed_by_their_text(store):
    letter_ids = np.array([ord(c) for c in "the then"], np.int32)
    put(store, np.concatenate([LONG[:100], letter_ids]), sampled=((100, 108),))
    cursor = store.advance(store.origin(EXACT), LONG[:100])
    assert replayed(store, cursor, b"the then", PIECES) == tuple(letter_ids)
    assert replayed(store, cursor, b"the", PIECES) == tuple(letter_ids[:3])
    assert replayed(store, cursor, b"then", PIECES) == ()
    assert replayed(store, store.origin(EXACT), b"the then", PIECES) == ()


def test_a_replay_follows_an_answer_over_chunk_borders(store):
    answer = np.array([ord(c) for c in "a long answer " * 30], np.int32)
    whole = np.concatenate([LONG[:100], answer])
    cursor = store.origin(EXACT)
    for begin in range(0, len(whole), 128):
        end = min(begin + 128, len(whole))
        span = ((max(100 - begin, 0), end - begin),)
        cursor = store.insert(cursor, whole[begin:end], exported(whole, begin, end), span, fork=False)
    at = store.advance(store.origin(EXACT), LONG[:100])
    assert replayed(store, at, b"a long answer " * 30, PIECES) == tuple(answer)


def test_text_that_was_not_sampled_is_not_replayed(store):
    put(store, np.array([ord(c) for c in "the"], np.int32))
    assert replayed(store, store.origin(EXACT), b"the", PIECES) == ()


def test_stored_tokens_outside_the_vocabulary_are_passed_over(store):
    alien = np.array([5, 2_000_000], np.int32)
    put(store, alien, sampled=((0, 2),))
    assert replayed(store, store.origin(EXACT), b"\x05!", PIECES) == ()
    assert store.readahead(EXACT, b"\x05!", PIECES) == set()
