"""What a benchmark of swaps tells."""

from __future__ import annotations

from benchmarks.swap import rows
from emberkeep.bench.report import Series
from emberkeep.bench.servers import OURS, PEER
from helpers.benchmarks import reply

FAST, SLOW = reply(ttft_ms=10, cached=99), reply(ttft_ms=20, cached=99)
PEERS = reply(ttft_ms=40)


def test_rows_compare_both_servers_and_tell_what_each_reused() -> None:
    (row,) = rows({"after a swap": {OURS: [FAST, SLOW], PEER: [PEERS, PEERS]}})
    ratio = row.values["ratio"]
    assert isinstance(ratio, Series)
    assert ratio.samples == (4.0, 2.0)
    assert (row.values[f"reused by {OURS}"], row.values[f"reused by {PEER}"]) == ("99%", "0%")


def test_our_server_is_measured_alone_too() -> None:
    (row,) = rows({"after a swap": {OURS: [FAST]}})
    assert list(row.values) == [OURS, f"reused by {OURS}"]
