from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat import output
from emberkeep.chat.output import LineLimit, StopScanner
from emberkeep.types.request import Request


def run(words: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(words)
    out = ""
    for piece in pieces:
        passed, stop = scanner.feed(piece)
        out += passed
        if stop:
            return out, stop
    return out + scanner.flush(), None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    complete = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    first_end = min((end for end, _ in complete), default=None)
    out, stop = run(stops, pieces)
    assert (stop is not None) == bool(complete)
    assert out in ([text[:start] for end, start in complete if end == first_end] or [text])
    assert text.startswith(out + (stop or ""))


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.feed("One ST") == ("One ", None)
    assert scanner.feed("ST") == ("ST", None)
    assert scanner.feed("OP and more") == ("", "STOP")
    assert run(["STOP"], ["ST", "O"]) == ("STO", None)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_passes(stops: list[str]) -> None:
    assert run(stops, ["a", "b"]) == ("ab", None)


# ── lines ──


@pytest.mark.parametrize("pieces", [["  a", "\n  b\n", "c\n"], ["  a\n", "  ", "b", "\nc\n"], ["  a\n  b\nc\n"]])
def test_a_line_that_is_not_indented_enough_ends_the_answer_before_it(pieces: list[str]) -> None:
    assert Request(indent=2).limits_lines and not Request().limits_lines
    limit = LineLimit(None, 2)
    text = ""
    for piece in pieces:
        passed, ends = limit.feed(piece)
        text += passed
        if ends:
            break
    assert (text, ends) == ("  a\n  b\n", True)


def test_the_first_line_may_begin_as_it_likes() -> None:
    limit = LineLimit(None, 4)
    assert limit.feed("a = 1\n    b") == ("a = 1\n    b", False)


def test_after_its_time_an_answer_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output, "monotonic", lambda: now)
    limit = LineLimit(0.5, 0)
    assert limit.feed("a\n") == ("a\n", False)
    now = 100.6
    assert limit.feed("b") == ("b", False)
    assert limit.feed("c\n") == ("c\n", True)
