"""A pytest plugin: the last lines of a run name fast tests that took more than two seconds of processor time.

It fails none: what a test takes depends on the machine, on its caches, and on what else runs.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

LIMIT_S = 2.0
_EXEMPT = ("slow", "serial", "smoke")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Counts processor time of this process, and of those that it waited for."""
    begin = _processor_s()
    result = yield
    if not any(item.get_closest_marker(name) for name in _EXEMPT):
        item.user_properties.append(("processor_s", round(_processor_s() - begin, 2)))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent = {
        report.nodeid: seconds
        for report in terminalreporter.getreports("passed")
        for name, seconds in report.user_properties
        if name == "processor_s" and seconds > LIMIT_S
    }
    for test, seconds in sorted(spent.items()):
        terminalreporter.write_line(f"{seconds:.1f} s of processor time: make {test} faster, or mark it slow")


def _processor_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
