"""Texts from elsewhere: what is hidden in them goes, what cannot be encoded is replaced."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest

from emberkeep.text import did_you_mean, encodable, exceeds_depth, shorten, strip_hidden, strip_hidden_json


def test_lines_tabs_and_letters_of_all_scripts_stay() -> None:
    text = "a\tb\nñ 漢字 नमस्ते می‌خواهم 👩‍🚀"
    assert strip_hidden(text) == text


@pytest.mark.parametrize("hidden", ["\x1b", "\x00", "\x9b", "\u202e", "\u2066", "\u200b", "\ufeff", "\U000e0041"])
def test_characters_that_a_reader_does_not_see_go(hidden: str) -> None:
    assert strip_hidden(f"a{hidden}b") == "ab"
    assert strip_hidden_json({f"k{hidden}": [f"v{hidden}", 1, None]}) == {"k": ["v", 1, None]}


def test_a_cut_is_marked() -> None:
    assert (shorten("abc", 3), shorten("abcd", 3)) == ("abc", "ab…")


def test_halves_of_characters_are_replaced_and_the_result_is_a_plain_text() -> None:
    class Sail(StrEnum):
        JIB = "jib"

    assert encodable("a\ud800ñ") == "a?ñ"
    assert type(encodable(Sail.JIB)) is str


def test_a_name_that_is_not_known_gets_the_nearest_that_is_or_another_way_out() -> None:
    assert did_you_mean("red_file", ["read_file", "http_get"], "use none.") == "did you mean read_file?"
    assert did_you_mean("moor", ["read_file"], "use none.") == "use none."


@pytest.mark.parametrize(
    ("value", "levels"), [(1, 0), ([], 1), ({"a": 1}, 1), ([{"a": [1, 2]}, "x"], 3), ({"a": {"b": {}}}, 3)]
)
def test_levels_are_objects_and_lists_in_each_other(value: Any, levels: int) -> None:
    assert not exceeds_depth(value, max(levels, 1))
    assert levels == 0 or exceeds_depth(value, levels - 1)


def test_no_depth_is_too_deep_to_ask_about() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert exceeds_depth(value, 64)
