"""What followed the end of a text before is found, as looking at every place would find it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kv import ngram_index
from emberkeep.kv.ngram_index import FEW, MAX_MATCH, MIN_MATCH, OCCURRENCES, NgramIndex
from helpers.kv_building import prompt

Segments = Sequence[Sequence[int]]


def index_of(*segments: Sequence[int]) -> NgramIndex:
    index = NgramIndex()
    for segment in segments:
        index.begin(segment)
    return index


def found(index: NgramIndex, context: Sequence[int], limit: int = 8) -> list[int] | None:
    continuation = index.find(np.array(context, np.int32), limit)
    return None if continuation is None else continuation.tokens.tolist()


def by_looking_everywhere(
    segments: Segments, context: list[int], limit: int
) -> tuple[int, int, list[int], list[int]]:
    """How many tokens match, at how many places, the continuation, and how many agree with each of its tokens."""
    rows: dict[int, list[list[int]]] = {}
    for number, segment in enumerate(segments):
        for at in range(1, len(segment)):
            matched = 0
            while (
                matched < min(at, len(context), MAX_MATCH) and segment[at - 1 - matched] == context[-1 - matched]
            ):
                matched += 1
            row = list(segment[at:])
            is_own_end = matched and segment[-matched:] == context[-matched:]
            if number == len(segments) - 1 and is_own_end:
                row = row * limit
            rows.setdefault(matched, []).insert(0, row[:limit])
    matched = max(rows, default=0)
    if matched < MIN_MATCH:
        return 0, 0, [], []
    tokens: list[int] = []
    votes: list[int] = []
    alive = rows[matched][:OCCURRENCES]
    while going_on := [row[len(tokens)] for row in alive if len(row) > len(tokens)]:
        best = max(dict.fromkeys(going_on), key=going_on.count)
        alive = [row for row in alive if row[len(tokens) : len(tokens) + 1] == [best]]
        tokens.append(best)
        votes.append(len(alive))
    return matched, len(rows[matched][:OCCURRENCES]), tokens, votes


words = st.integers(0, 3)
loops = st.builds(lambda part, times: part * times, st.lists(words, min_size=1, max_size=5), st.integers(1, 12))
texts = st.lists(words, min_size=1, max_size=40) | loops


@given(st.lists(texts, max_size=8), texts, st.sets(st.integers(0, 8)), st.booleans(), st.integers(1, 12))
def test_what_is_found_is_what_looking_everywhere_finds(segments, context, sorted_before, is_own, limit):
    index = NgramIndex()
    for number, segment in enumerate(segments):
        if number in sorted_before:
            index.compact()
        index.begin(segment[:-1])
        index.extend(segment[-1:])
    if is_own and segments:
        context = segments[-1]
    matched, places, tokens, votes = by_looking_everywhere(segments, context, limit)
    continuation = index.find(np.array(context, np.int32), limit)
    assert len(index) == sum(map(len, segments))
    if not matched:
        assert continuation is None
        return
    assert continuation is not None
    assert (continuation.matched, continuation.tokens.tolist()) == (matched, tokens)
    going_on = np.array(votes) / [places, *votes[:-1]]
    assert len(continuation.agreement) == len(tokens)
    assert all(0 < agreement < 1 for agreement in continuation.agreement)
    if sum(map(len, segments)) <= FEW:  # else only the latest places may have been looked at
        assert np.all(np.array(continuation.agreement) < np.cumprod(going_on))


@given(texts, texts, st.integers(1, 40))
def test_a_token_at_a_time_finds_the_same(text, context, limit):
    one_by_one, at_once = index_of([]), index_of(text)
    for number, token in enumerate(text):
        one_by_one.extend((token,))
        if number % 7 == 3:
            one_by_one.compact()
    assert found(one_by_one, context, limit) == found(at_once, context, limit)


def test_the_most_frequent_continuation_is_followed_and_the_latest_among_equals():
    assert found(index_of([1, 2, 50], [1, 2, 50], [1, 2, 60]), [1, 2]) == [50]
    assert found(index_of([1, 2, 50], [1, 2, 60]), [1, 2]) == [60]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_loop_goes_on_for_as_long_as_is_asked(is_sorted):
    text = [9, 8, *[1, 2, 3] * 3]
    index = index_of(text)
    if is_sorted:
        index.compact()
    assert found(index, text, 100) == ([1, 2, 3] * 34)[:100]


def test_more_places_that_agree_say_more_and_none_is_certain():
    def first_share(places: int, matched: int) -> float:
        index = index_of(*[[*range(10, 10 + matched), 7]] * places)
        continuation = index.find(np.arange(10, 10 + matched, dtype=np.int32), 1)
        assert continuation is not None
        return continuation.agreement[0]

    assert first_share(1, 2) < first_share(2, 2) < first_share(9, 2) < 1.0
    assert first_share(1, 2) < first_share(1, 4) < first_share(1, 30) < 1.0


def test_a_suffix_that_stands_nearly_everywhere_is_found_in_time_and_place(monkeypatch):
    """Where not all places can be looked at, the latest have their say."""
    monkeypatch.setattr(ngram_index, "_CANDIDATES", 64)
    index = index_of(*[[1, 2, 3]] * 200, *[[1, 2, 4]] * OCCURRENCES)
    assert found(index, [1, 2]) == [4]
    index.compact()
    assert found(index, [1, 2]) is not None


def test_large_token_ids_and_long_matches_are_found():
    text = np.concatenate([prompt(500), np.array([2**31 - 1, 2**18], np.int32), prompt(40, seed=2)])
    index = index_of(text.tolist())
    index.compact()
    continuation = index.find(text[450:502], 10)
    assert continuation is not None
    assert continuation.matched == MAX_MATCH
    assert continuation.tokens.tolist() == text[502:512].tolist()


def test_sorting_on_another_thread_disturbs_no_lookup():
    text = prompt(4000)
    index = index_of(text[:1000].tolist())
    is_over = threading.Event()

    def sort() -> None:
        while not is_over.is_set():
            index.compact()

    sorter = threading.Thread(target=sort)
    sorter.start()
    try:
        for at in range(1000, 4000):
            index.extend(text[at : at + 1])
            place = at * 7919 % (at - 60) + 40
            assert found(index, text[place - 36 : place].tolist(), 3) == text[place : place + 3].tolist()
    finally:
        is_over.set()
        sorter.join()
