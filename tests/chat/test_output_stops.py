from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.output import StopScanner


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
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


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["STOP"], ["ST", "O"]) == ("STO", None)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_passes(stops: list[str]) -> None:
    assert run(stops, ["a", "b"]) == ("ab", None)
