"""A pytest plugin: a test that is not marked slow takes at most two seconds of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

LIMIT_S = 2.0
_EXEMPT = ("slow", "serial", "smoke")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Counts processor time, of this process and of those that it waited for.

    Fails a test that went well but took too much. One that imported something for the first time is let off: it
    paid for every later test, and which one comes first depends on the order. So are all on a machine that has
    much else to do: threads that spin, and caches that others fill, cost processor time too.
    """
    imported, begin = len(sys.modules), _processor_s()
    result = yield
    spent = _processor_s() - begin
    item.user_properties.append(("processor_s", round(spent, 2)))
    is_exempt = len(sys.modules) > imported or any(item.get_closest_marker(name) for name in _EXEMPT)
    if spent > LIMIT_S and not is_exempt and not _is_busy():
        pytest.fail(f"it took {spent:.1f} s of processor time: make it faster than {LIMIT_S:g} s, or mark it slow")
    return result


def _is_busy() -> bool:
    """Whether more is running than workers and what they start."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def _processor_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
