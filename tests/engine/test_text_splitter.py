from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine import text_splitter
from emberkeep.engine.text_splitter import RUNS, Run, TextSplitter
from helpers.waiting import Heartbeat

SPECIALS = ["<s>", "<|im_end|>", "\n\n"]
LETTERS = st.sampled_from([*"ab0 \n./<>s'_好\u0301", "\r\n", "<s>", "<|im_end|>", "aaaaaaaa", "        "])
TEXTS = st.lists(LETTERS, max_size=80).map("".join)


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_splitter, "MAX_MATCH", 32)
        patch.setattr(text_splitter, "MAX_SPECIALS", 4)
        patch.setattr(text_splitter, "_LOOK_BACK", 8)
        yield


def splitter(specials: list[str] = SPECIALS, *, strips: bool = False, limits_matches: bool = True) -> TextSplitter:
    return TextSplitter(specials, strips=strips, limits_matches=limits_matches)


@given(TEXTS)
def test_pieces_are_the_text(text: str) -> None:
    pieces = splitter().pieces(text)
    assert "".join(pieces) == text
    assert all(pieces)


@given(TEXTS)
def test_no_match_could_be_longer_than_the_limit(text: str) -> None:
    for piece in splitter([]).pieces(text):
        ends = [match.end() for match in text_splitter._BREAK.finditer(piece)]
        assert all(b - a <= 32 for a, b in zip([0, *ends], [*ends, len(piece)], strict=True))


@given(TEXTS, TEXTS)
def test_a_text_that_grows_keeps_its_pieces(text: str, more: str) -> None:
    pieces = splitter([]).pieces(text)[:-1]
    assert splitter([]).pieces(text + more)[: len(pieces)] == pieces


@given(TEXTS)
def test_special_tokens_stay_whole(text: str) -> None:
    pieces = splitter(["<|im_end|>"]).pieces(text)
    assert sum(piece.count("<|im_end|>") for piece in pieces) == text.count("<|im_end|>")


@pytest.mark.parametrize("text", ["a sentence, and another one. " * 20, "one\ntwo\n" * 20, "short", ""])
def test_ordinary_texts_are_not_cut(text: str) -> None:
    assert splitter().pieces(text) == ([text] if text else [])


def test_words_and_characters_stay_whole() -> None:
    assert splitter([]).pieces("a" * 30 + " bcd efg") == ["a" * 30, " bcd efg"]
    assert splitter([]).pieces("e" * 32 + "\u0301" + "e" * 8) == ["e" * 31, "e\u0301" + "e" * 8]
    assert splitter([]).pieces("\n" * 31 + "\r\n" + " " * 8) == ["\n" * 31, "\r\n" + " " * 8]


def test_blanks_are_left_to_the_special_token_that_takes_them() -> None:
    text = "<s> " * 3 + "<s>" + " " + "<s>" * 20
    assert splitter(strips=True).pieces(text)[0] == "<s> " * 4 + "<s>"
    assert splitter().pieces(text)[0] == "<s> " * 3 + "<s>"


def test_without_a_pre_tokenizer_only_special_tokens_end_a_piece() -> None:
    assert splitter(limits_matches=False).pieces("a" * 100) == ["a" * 100]
    assert splitter(limits_matches=False).pieces("<s>" * 40) == ["<s>" * 4] * 10


@pytest.mark.parametrize("unit", ["7", " "])
def test_long_runs_are_cut_from_their_own_start(unit: str) -> None:
    pieces = TextSplitter(runs=RUNS).pieces("xx" + unit * 600 + "好")
    assert pieces == ["xx" + unit * 255, unit * 255, unit * 90 + "好"]
    assert TextSplitter().pieces(unit * 600) == [unit * 600]


@given(st.text("7 a", max_size=80), st.text("7 a", max_size=10))
def test_runs_are_cut_at_the_same_places_however_they_end(text: str, more: str) -> None:
    splitter = TextSplitter(runs=[Run(re.compile(r"\s\s+"), 5), Run(re.compile(r"\d\d+"), 3)])
    pieces = splitter.pieces(text)
    assert "".join(pieces) == text
    assert not any(re.search(r"\s{6}|\d{4}", piece) for piece in pieces)
    assert splitter.pieces(text + more)[: max(len(pieces) - 1, 0)] == pieces[:-1]


@pytest.mark.parametrize(
    ("run", "text"),
    [(Run(re.compile("[^a][^a]+"), 1024), ("🎉" * 1000 + "a") * 1000), (RUNS[0], (" " * 200 + "a") * 5000)],
    ids=["emoji", "blanks"],
)
def test_looking_for_runs_that_are_just_too_short_is_quick(run: Run, text: str) -> None:
    with Heartbeat() as heart:
        TextSplitter(runs=[run]).pieces(text)
    assert heart.worst_s < 0.5, f"another thread waited {heart.worst_s:.2f} s"
