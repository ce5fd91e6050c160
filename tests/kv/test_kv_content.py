"""Passages are found at other places, whole and token by token, and only where the asker may look."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv.content import WINDOW, Moved, to_pieces
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import Chunk, Segment
from emberkeep.types.lineage import EXACT, SHARED, Approximation, Lineage, Repair
from helpers.kv_building import (
    LONG,
    chunks_of,
    ids,
    lineage_of,
    new_store,
    path_tokens,
    prompt,
    put,
)

MOVE_ALL = Approximation(Repair.NONE)
PASSAGE = prompt(300, seed=7)


def lead(length: int) -> np.ndarray:
    return prompt(length, seed=1000 + length)


def found(store: KvStore, tokens: np.ndarray, *, namespace: str = "", begin: int = 0, how=MOVE_ALL):
    pieces = store.match_elsewhere(lineage_of(namespace), tokens, begin, how)
    for piece in pieces:
        store.release(piece)
        for segment in piece.segments:
            stored = path_tokens(segment.chunk)[segment.start : segment.end]
            assert np.array_equal(stored, tokens[segment.start + piece.shift : segment.end + piece.shift])
    return [(piece.start, piece.end) for piece in pieces]


@pytest.mark.parametrize("before", [0, 1, 31, 96, 128, 200])
@pytest.mark.parametrize("after", [5, 64, 129, 333])
def test_a_passage_is_found_whole_whatever_its_alignment(before, after):
    store = new_store(None)
    put(store, np.concatenate([lead(before), PASSAGE, prompt(50, seed=1)]))
    start = max(before, MOVE_ALL.sinks)  # what stood first was leant on
    skipped = start - before
    asked = np.concatenate([lead(after), PASSAGE, prompt(50, seed=2)])
    assert found(store, asked) == [(after + skipped, after + 300)]


def test_several_passages_are_found_in_another_order():
    store = new_store(None)
    documents = [prompt(150 + 10 * n, seed=n) for n in range(4)]
    put(store, np.concatenate([lead(40), *documents]))
    shuffled = [documents[2], documents[0], documents[3], documents[1]]
    pieces = found(store, np.concatenate([lead(9), *shuffled, prompt(30, seed=99)]))
    borders = np.cumsum([9, *map(len, shuffled)]).tolist()
    assert pieces == list(pairwise(borders))


def test_nothing_of_what_the_prefix_covers_is_moved():
    store = new_store(None)
    put(store, np.concatenate([lead(40), PASSAGE]))
    asked = np.concatenate([lead(9), PASSAGE])
    assert found(store, asked, begin=100) == [(100, 309)]


def test_sinks_are_neither_moved_nor_replaced():
    store = new_store(None)
    put(store, PASSAGE)
    how = replace(MOVE_ALL, sinks=20)
    assert found(store, PASSAGE[5:], how=how) == [(20, 295)]
    assert found(store, np.concatenate([lead(50), PASSAGE]), how=how) == [(70, 350)]


def test_short_passages_are_not_worth_it():
    store = new_store(None)
    put(store, np.concatenate([lead(32), PASSAGE]))
    assert found(store, np.concatenate([lead(9), PASSAGE[:WINDOW], prompt(40, seed=3)])) == [(9, 9 + WINDOW)]
    assert found(store, np.concatenate([lead(9), PASSAGE[: WINDOW - 1], prompt(40, seed=3)])) == []


def test_equal_hashes_alone_are_no_match(monkeypatch):
    monkeypatch.setattr("emberkeep.kv.content._hash", lambda windows: np.zeros(len(windows), np.uint64))
    store = new_store(None)
    put(store, PASSAGE)
    assert found(store, prompt(200, seed=8)) == []


def test_users_do_not_see_each_others_passages():
    store = new_store(None)
    put(store, np.concatenate([lead(40), PASSAGE]), namespace="alice")
    asked = np.concatenate([lead(9), PASSAGE])
    assert found(store, asked, namespace="bob") == []
    assert found(store, asked, namespace=SHARED) == []
    assert found(store, asked, namespace="alice") == [(9, 309)]


def test_every_user_sees_shared_passages_and_own_text_after_them():
    store = new_store(None)
    put(store, np.concatenate([lead(40), PASSAGE]), namespace=SHARED)
    own = prompt(100, seed=5)
    put(store, np.concatenate([lead(40), PASSAGE, own]), namespace="alice")
    asked = np.concatenate([lead(9), PASSAGE, own])
    assert found(store, asked, namespace="bob") == [(9, 309)]
    assert found(store, asked, namespace="alice") == [(9, 409)]


def test_approximate_state_is_no_source():
    store = new_store(None)
    marked = Lineage("alice", repair=Repair.NONE)
    put(store, lead(128), namespace="alice")
    put(store, np.concatenate([lead(128), PASSAGE]), namespace=marked)
    asked = np.concatenate([lead(9), PASSAGE])
    assert found(store, asked, namespace=marked) == found(store, asked, namespace="alice") == []


def test_chunks_that_come_and_go_are_known(store):
    asked = np.concatenate([lead(9), PASSAGE])
    assert found(store, asked) == []
    cursor = put(store, np.concatenate([lead(40), PASSAGE]))
    assert found(store, asked) == [(9, 309)]
    store.reject(cursor.chunk)
    (left,) = found(store, asked)
    assert left[0] == 9
    assert 200 < left[1] < 309


def test_a_phrase_that_is_everywhere_is_remembered_at_a_few_places_only():
    store = new_store(None)
    for number in range(30):
        put(store, np.concatenate([prompt(10, seed=number), PASSAGE]))
    matches = store.transact(lambda ledger: ledger.content.find("", np.concatenate([lead(9), PASSAGE]), 0, 0))
    assert 8 <= len(matches) < 15


def test_what_is_found_is_pinned_until_it_is_released(store):
    put(store, np.concatenate([lead(40), PASSAGE]))
    (piece,) = store.match_elsewhere(EXACT, np.concatenate([lead(9), PASSAGE]), 0, MOVE_ALL)
    assert all(chunk.pins == 1 and chunk.hits == 1 for chunk in piece.chunks)
    store.release(piece)
    assert all(chunk.pins == 0 for chunk in chunks_of(store))


def test_a_longer_exact_chunk_does_not_replace_an_approximate_tail():
    store = new_store(None)
    marked = Lineage(repair=Repair.NONE)
    put(store, LONG[:128])
    put(store, LONG[:200], namespace=marked)
    put(store, LONG[:256])
    assert {chunk.lineage for chunk in chunks_of(store) if chunk.start == 128} == {EXACT, marked}


# ── pieces ──


def match(start: int, end: int, source: int) -> Moved:
    tokens = np.zeros(source + end - start, np.int32)
    chunk = Chunk(key=b"k", parent=None, take=0, tokens=tokens)
    return Moved(start, (Segment(chunk, source, source + end - start),))


def spans(matches, **how) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in to_pieces(matches, Approximation(**how))]


@pytest.mark.parametrize(("side", "expected"), [("first", (116, 300)), ("last", (100, 284)), ("both", (116, 284))])
def test_selective_repair_leaves_the_tokens_at_the_seams_to_evaluation(side, expected):
    assert spans([match(100, 300, 0)], repair=Repair.SELECTIVE, boundary=16, side=side) == [expected]


def test_a_piece_of_which_the_seams_leave_too_little_is_evaluated():
    assert spans([match(100, 150, 0)], repair=Repair.SELECTIVE, boundary=20) == []
    assert spans([match(100, 150, 0)], repair=Repair.SELECTIVE, boundary=1000, side="both") == []


def test_where_matches_overlap_the_longest_keeps_what_both_know():
    assert spans([match(0, 100, 5), match(80, 200, 900)]) == [(0, 80), (80, 200)]
    assert spans([match(0, 150, 5), match(120, 200, 900)]) == [(0, 150), (150, 200)]


def test_overlap_says_how_many_of_the_tokens_that_both_know_are_evaluated():
    assert spans([match(0, 100, 5), match(80, 200, 900)], overlap=8) == [(0, 80), (88, 200)]
    assert spans([match(0, 100, 5), match(80, 200, 900)], overlap=64) == [(0, 80), (100, 200)]
    assert spans([match(0, 150, 5), match(120, 200, 900)], overlap=8) == [(0, 142), (150, 200)]


approximations = st.builds(
    Approximation,
    repair=st.sampled_from(Repair),
    boundary=st.integers(0, 40),
    side=st.sampled_from(["first", "last", "both"]),
    overlap=st.integers(0, 40),
    sinks=st.integers(0, 40),
)
texts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 250), st.integers(0, 250)), max_size=6)


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(0, 300), approximations)
def test_pieces_are_in_order_disjoint_inside_the_prompt_and_hold_its_tokens(stored, asked, begin, how):
    store = new_store(None)
    for text in stored:
        put(store, spliced(text))
    tokens = spliced(asked)
    pieces = found(store, tokens, begin=begin, how=how)
    borders = [border for piece in pieces for border in piece]
    assert borders == sorted(borders)
    assert all(end - start >= WINDOW for start, end in pieces)
    assert all(max(begin, how.sinks) <= start and end <= len(tokens) for start, end in pieces)
    sources = store.match_elsewhere(EXACT, tokens, begin, how)
    assert all(segment.start >= how.sinks for piece in sources for segment in piece.segments)


def spliced(parts) -> np.ndarray:
    """Passages of a few documents, so that the same ones come again and again."""
    cut = [prompt(250, seed=document)[min(a, b) : max(a, b)] for document, a, b in parts]
    return np.concatenate([ids(1), *cut])
