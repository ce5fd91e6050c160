"""What a fast test may take, and how it is counted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from helpers import speed_limit


class Item:
    """As much of a test as the plugin looks at."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers
        self.user_properties: list[tuple[str, object]] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def run(
    patch: pytest.MonkeyPatch,
    item: Item,
    seconds: float,
    test: Callable[[], object] = lambda: None,
    *,
    is_busy: bool = False,
) -> None:
    """A test that takes so much processor time."""
    clock = iter((5.0, 5.0 + seconds))
    with patch.context() as only_here:  # this test is timed too
        only_here.setattr(speed_limit, "_processor_s", lambda: next(clock))
        only_here.setattr(speed_limit, "_is_busy", lambda: is_busy)
        call = speed_limit.pytest_runtest_call(item)  # type: ignore[arg-type]
        next(call)
        test()
        with pytest.raises(StopIteration):
            call.send(None)


def test_a_test_within_the_limit_passes_and_its_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item()
    run(monkeypatch, item, 1.9)
    assert item.user_properties == [("processor_s", 1.9)]


def test_a_test_beyond_it_fails_and_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"2\.1 s .* mark it slow"):
        run(monkeypatch, Item(), 2.1)


def test_a_busy_machine_fails_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, Item(), 60.0, is_busy=True)


@pytest.mark.parametrize("marker", ["slow", "serial", "smoke"])
def test_what_is_marked_may_take_longer(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    run(monkeypatch, Item(marker), 60.0)


def test_the_first_one_that_imports_something_pays_for_all_and_is_let_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports() -> None:
        monkeypatch.setitem(sys.modules, "a_module_of_this_test", types.ModuleType("a_module_of_this_test"))

    run(monkeypatch, Item(), 60.0, imports)
