from __future__ import annotations

import pytest

from emberkeep.types.request import Json, exceeds_depth


@pytest.mark.parametrize(
    ("value", "levels"), [(1, 0), ([], 1), ({"a": 1}, 1), ([{"a": [1, 2]}, "x"], 3), ({"a": {"b": {}}}, 3)]
)
def test_levels_are_objects_and_lists_in_each_other(value: Json, levels: int) -> None:
    assert not exceeds_depth(value, max(levels, 1))
    assert levels == 0 or exceeds_depth(value, levels - 1)


def test_no_depth_is_too_deep_to_ask_about() -> None:
    value: Json = []
    for _ in range(100_000):
        value = [value]
    assert exceeds_depth(value, 64)
