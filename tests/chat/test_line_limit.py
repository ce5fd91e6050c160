from __future__ import annotations

import pytest

from emberkeep.chat import line_limit
from emberkeep.chat.line_limit import LineLimit
from emberkeep.types.request import Request


def test_most_requests_have_none() -> None:
    assert not Request().limits_lines


@pytest.mark.parametrize("pieces", [["  a", "\n  b\n", "c\n"], ["  a\n", "  ", "b", "\nc\n"], ["  a\n  b\nc\n"]])
def test_a_line_that_is_not_indented_enough_ends_the_answer_before_it(pieces: list[str]) -> None:
    assert Request(indent=2).limits_lines
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
    monkeypatch.setattr(line_limit, "monotonic", lambda: now)
    limit = LineLimit(0.5, 0)
    assert limit.feed("a\n") == ("a\n", False)
    now = 100.6
    assert limit.feed("b") == ("b", False)
    assert limit.feed("c\n") == ("c\n", True)
