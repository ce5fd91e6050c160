"""What the vendors' wire formats share: what is taken from a request, and tool calls in pieces."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.backend.remote.vendor_wire import (
    CallPieces,
    Keepsakes,
    arguments_of,
    chosen_sampling,
    inline_image,
    json_format,
)
from emberkeep.errors import InvalidField
from emberkeep.types.events import ToolCallDelta
from emberkeep.types.request import Image, Json, JsonFormat, RegexFormat, Request, Sampling


def test_arguments_that_come_before_their_name_wait_for_it() -> None:
    calls = CallPieces()

    assert list(calls.piece(0, "c1", None, '{"a"')) == []
    assert list(calls.piece(0, None, "add", ": 1")) == [ToolCallDelta(0, 0, "c1", "add", '{"a": 1')]
    assert list(calls.piece(0, None, None, "}")) == [ToolCallDelta(0, 0, None, None, "}")]


@given(st.lists(st.text(max_size=4), max_size=6), st.lists(st.text(max_size=4), max_size=6), st.data())
def test_pieces_of_two_calls_in_any_order_come_together_again(
    first: list[str], second: list[str], data: st.DataObject
) -> None:
    left = {0: list(first), 1: list(second)}
    calls = CallPieces()
    pieces = [*calls.piece(0, "c0", "a", ""), *calls.piece(1, "c1", "b", "")]

    while any(left.values()):
        key = data.draw(st.sampled_from([key for key, pieces in left.items() if pieces]))
        pieces += calls.piece(key, None, None, left[key].pop(0))

    said = ["".join(one.arguments for one in pieces if one.call_index == index) for index in (0, 1)]
    assert said == ["".join(first), "".join(second)]
    assert [one.id for one in pieces if one.id] == calls.ids == ["c0", "c1"]


def test_only_the_latest_are_kept() -> None:
    kept: Keepsakes[int] = Keepsakes(most=2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.get("a") == 1
    kept.keep("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)


def test_only_what_the_user_has_chosen_and_the_vendor_knows_is_sent() -> None:
    assert chosen_sampling(Sampling(), ("seed", "top_p")) == {}
    cold = Sampling(temperature=0, seed=0)
    assert chosen_sampling(cold, ("temperature", "seed", "top_p")) == {"temperature": 0, "seed": 0}
    assert chosen_sampling(cold, ("seed",)) == {"seed": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ('{"a": 1}', {"a": 1}), ("[1]", {"arguments": [1]}), ("{oops", {"arguments": "{oops"})],
)
def test_arguments_are_always_an_object(text: str, expected: Json) -> None:
    assert arguments_of(text) == expected


@pytest.mark.parametrize(
    ("url", "kind", "data"),
    [
        ("data:image/webp;base64,cG5n", "image/webp", b"png"),
        ("data:image/svg+xml;charset=utf-8,%3Csvg%2F%3E", "image/svg+xml", b"<svg/>"),
        ("data:;base64,cG5n", "image/png", b"png"),
    ],
)
def test_a_data_address_is_the_image_itself(url: str, kind: str, data: bytes) -> None:
    found = inline_image(Image(url))
    assert found is not None
    assert (found.media_type, base64.b64decode(found.base64)) == (kind, data)
    assert inline_image(Image("https://example.org/a.png")) is None


def test_a_format_other_than_json_is_refused_by_the_name_that_the_client_gave_it() -> None:
    assert json_format(Request(prompt="x")) is None
    assert json_format(Request(prompt="x", format=JsonFormat({"type": "integer"}))) == JsonFormat(
        {"type": "integer"}
    )
    with pytest.raises(InvalidField, match="guided_regex: needs a model that runs here"):
        json_format(Request(prompt="x", format=RegexFormat("a+", param="guided_regex")))
