"""A fast test that takes long is named, and does not fail."""

from __future__ import annotations

import pytest

TESTS = """
import pytest
from helpers import speed_limit

@pytest.mark.parametrize("seconds", [1.5, 2.5])
{marker}
def test_that_takes(monkeypatch, seconds):
    monkeypatch.setattr(speed_limit, "_processor_s", lambda after=speed_limit._processor_s(): after + seconds)
"""


@pytest.mark.parametrize("marker", ["", "@pytest.mark.slow"])
def test_a_fast_test_that_takes_long_is_named(pytester: pytest.Pytester, marker: str) -> None:
    pytester.makepyfile(TESTS.format(marker=marker))
    result = pytester.runpytest_inprocess("-p", "helpers.speed_limit", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    named = [line for line in result.outlines if line.endswith("faster, or mark it slow")]
    assert ["that_takes[2.5]" in line for line in named] == ([] if marker else [True])
