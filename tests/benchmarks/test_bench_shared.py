from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared import distinct_prefixes, grown_tokens
from helpers.benchmarks import reply


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_unique_tokens_are_the_different_prefixes(sequences: list[list[int]]) -> None:
    prefixes = {tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)}
    assert distinct_prefixes(sequences) == len(prefixes)


def test_a_conversation_grows_by_its_answers_its_ends_of_turn_and_its_later_questions() -> None:
    # 100 prompt + 10 answer + 2 closing, then 28 new tokens of a question, 7 of an answer, 2 closing.
    first, later = reply(prompt=100, completion=10), reply(prompt=140, completion=7, cached=112)
    assert grown_tokens([first], closing=2) == 12
    assert grown_tokens([first, later], closing=2) == 12 + 28 + 7 + 2
