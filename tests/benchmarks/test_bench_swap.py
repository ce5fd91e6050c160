"""What a benchmark of swaps tells."""

from __future__ import annotations

from benchmarks.swap import rows
from emberkeep.bench.figures import Series
from emberkeep.bench.http_client import Reply
from emberkeep.bench.sides import OURS, PEER


def reply(ttft_ms: float, cached: int) -> Reply:
    return Reply(ttft_ms, "a", 100, 4, cached, "-", 0.0, 0.0, 1.0)


def test_rows_compare_both_servers_and_tell_what_each_reused() -> None:
    (row,) = rows({"after a swap": {OURS: [reply(10, 99), reply(20, 99)], PEER: [reply(40, 0)] * 2}})
    ratio = row.values["ratio"]
    assert isinstance(ratio, Series)
    assert ratio.samples == (4.0, 2.0)
    assert (row.values[f"reused by {OURS}"], row.values[f"reused by {PEER}"]) == ("99%", "0%")


def test_our_server_is_measured_alone_too() -> None:
    (row,) = rows({"after a swap": {OURS: [reply(10, 99)]}})
    assert list(row.values) == [OURS, f"reused by {OURS}"]
