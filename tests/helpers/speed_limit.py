"""A pytest plugin: a test that is not marked slow takes at most two seconds of its own.

What a test takes depends on what stands in caches, and on what else runs. So one that took too long runs again,
and fails only if it takes too long every time.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from _pytest.runner import runtestprotocol

LIMIT_S = 2.0
TRIES = 3
_EXEMPT = ("slow", "serial", "smoke")
_TRIES_LEFT = pytest.StashKey[int]()
_IS_TOO_LONG = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if any(item.get_closest_marker(name) for name in _EXEMPT):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(TRIES)):
        item.stash[_TRIES_LEFT], item.stash[_IS_TOO_LONG] = left, False
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not item.stash[_IS_TOO_LONG]:
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Counts processor time, of this process and of those that it waited for. Fails a test that went well but took
    too much, when it is tried for the last time."""
    begin = _processor_s()
    result = yield
    spent = _processor_s() - begin
    item.user_properties.append(("processor_s", round(spent, 2)))
    item.stash[_IS_TOO_LONG] = _TRIES_LEFT in item.stash and spent > LIMIT_S and not _is_busy()
    if item.stash[_IS_TOO_LONG] and not item.stash[_TRIES_LEFT]:
        pytest.fail(f"it took {spent:.1f} s of processor time: make it faster than {LIMIT_S:g} s, or mark it slow")
    return result


def _is_busy() -> bool:
    """Whether more is running than workers and what they start: threads that spin cost processor time, too."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def _processor_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
