from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from emberkeep.text import alternatives

WORDS = st.text("ab<\n.", max_size=5)


@given(st.lists(WORDS, max_size=12), st.text("ab<\n.", max_size=40))
def test_the_longest_of_those_that_begin_first_is_found(words: list[str], text: str) -> None:
    found = alternatives(words)
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    if found is None:
        assert not longest_first
    else:
        plain = re.compile("|".join(map(re.escape, longest_first)))
        assert [match.span() for match in found.finditer(text)] == [match.span() for match in plain.finditer(text)]


def test_beginnings_are_compared_once() -> None:
    """`re` compares alternatives one by one: six thousand at every `<` would take seconds for a page of HTML."""
    pattern = alternatives(f"<unused{number}>" for number in range(6000))
    assert pattern is not None
    assert pattern.pattern.count("unused") == 1
    assert pattern.findall("<unused12><unused5999>") == ["<unused12>", "<unused5999>"]


def test_texts_that_each_begin_with_the_one_before_are_no_matter_how_many() -> None:
    pattern = alternatives("a" * length for length in range(1, 600))
    assert pattern is not None
    assert pattern.findall("a" * 700) == ["a" * 599, "a" * 101]
