"""Tool calls however they are cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emberkeep.backend.remote.calls import Calls
from emberkeep.types import ToolCallDelta


def test_arguments_that_come_before_their_name_wait_for_it() -> None:
    calls = Calls()

    assert list(calls.piece(0, "c1", None, '{"a"')) == []
    assert list(calls.piece(0, None, "add", ": 1")) == [ToolCallDelta(0, 0, "c1", "add", '{"a": 1')]
    assert list(calls.piece(0, None, None, "}")) == [ToolCallDelta(0, 0, None, None, "}")]


@given(st.lists(st.text(max_size=4), max_size=6), st.lists(st.text(max_size=4), max_size=6), st.data())
def test_pieces_of_two_calls_in_any_order_come_together_again(
    first: list[str], second: list[str], data: st.DataObject
) -> None:
    left = {0: list(first), 1: list(second)}
    calls = Calls()
    heard = [*calls.piece(0, "c0", "a", ""), *calls.piece(1, "c1", "b", "")]

    while any(left.values()):
        key = data.draw(st.sampled_from([key for key, pieces in left.items() if pieces]))
        heard += calls.piece(key, None, None, left[key].pop(0))

    said = ["".join(one.arguments for one in heard if one.call_index == index) for index in (0, 1)]
    assert said == ["".join(first), "".join(second)]
    assert [one.id for one in heard if one.id] == calls.ids == ["c0", "c1"]
