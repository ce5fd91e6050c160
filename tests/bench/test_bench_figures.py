from __future__ import annotations

import pytest

from emberkeep.bench.figures import overhead, percentile, ratios, series, speedup

pytestmark = pytest.mark.slow


def test_a_series_has_a_median_and_a_spread() -> None:
    times = series([3.0, 1.0, 10.0, 2.0], "ms")
    assert (times.low, times.median, times.high) == (1.0, 2.5, 10.0)


def test_the_json_of_a_series_keeps_every_sample_in_order() -> None:
    assert series([3.0, 1.0], "ms").json() == {
        "median": 2.0,
        "low": 1.0,
        "high": 3.0,
        "unit": "ms",
        "samples": [3.0, 1.0],
    }


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios(series([10, 40], "ms"), series([5, 10], "ms")).samples == (2, 4)


def test_samples_that_were_not_taken_side_by_side_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios(series([1, 2], "ms"), series([1], "ms"))


def test_a_speedup_compares_every_sample_with_the_median_of_the_reference() -> None:
    assert speedup(series([90, 100, 300], "ms"), series([10, 20], "ms")).samples == (10, 5)


def test_overhead_is_in_percent_and_may_be_negative() -> None:
    assert overhead(series([103, 99], "ms"), series([100, 100], "ms")).samples == pytest.approx((3, -1))


@pytest.mark.parametrize(("percent", "expected"), [(95, 19), (100, 20), (50, 10), (1, 1), (0, 1)])
def test_a_percentile_is_one_of_the_samples(percent: float, expected: float) -> None:
    assert percentile([float(n) for n in range(20, 0, -1)], percent) == expected
