"""What a fast test may take, and how it is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers import speed_limit

SLEEPS = """
import pytest
from helpers import speed_limit

spent = iter({spent})
tries = []

@pytest.fixture
def anew():
    tries.append([])
    return tries[-1]

{marker}
def test_that_takes(anew, monkeypatch):
    assert anew == []  # what it was given before is not there any more
    anew.append("used")
    clock = iter((next(spent),))
    monkeypatch.setattr(speed_limit, "_processor_s", lambda: next(clock))

def test_after_it():
    assert len(tries) == {tries}
"""


@pytest.fixture
def tried(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a test that takes so many seconds of processor time: the first time, the second, ..."""
    monkeypatch.setattr(speed_limit, "_is_busy", lambda: False)
    monkeypatch.setattr(speed_limit, "_processor_s", lambda: 0.0)

    def run(spent: Sequence[float], tries: int, marker: str = "") -> pytest.RunResult:
        pytester.makeini("[pytest]\nmarkers =\n    slow\n    serial\n    smoke\n")
        pytester.makepyfile(SLEEPS.format(spent=list(spent), tries=tries, marker=marker))
        return pytester.runpytest_inprocess("-p", "helpers.speed_limit", "-p", "no:cacheprovider")

    return run


def test_a_test_within_the_limit_runs_once(tried) -> None:
    tried([1.9], tries=1).assert_outcomes(passed=2)


def test_a_test_beyond_it_runs_again_and_fails_if_it_always_is(tried) -> None:
    result = tried([9.0, 2.1, 2.2], tries=3)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines("*it took 2.2 s of processor time: *mark it slow*")


def test_what_took_long_only_the_first_time_passes(tried) -> None:
    tried([9.0, 0.1], tries=2).assert_outcomes(passed=2)


def test_a_busy_machine_fails_no_test(tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_limit, "_is_busy", lambda: True)
    tried([60.0], tries=1).assert_outcomes(passed=2)


@pytest.mark.parametrize("marker", ["slow", "serial", "smoke"])
def test_what_is_marked_may_take_longer(tried, marker: str) -> None:
    tried([60.0], tries=1, marker=f"@pytest.mark.{marker}").assert_outcomes(passed=2)
