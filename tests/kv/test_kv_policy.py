from __future__ import annotations

import time

import pytest

from emberkeep.kv.policy import CostModel, Rate, Rhythm, StoreClock, worth, worth_writing
from emberkeep.kv.tree import Chunk, ChunkKey, Cursor, Segment, new_root
from helpers.kv_building import ids


def a_chunk(*, tokens: int = 128, size: int = 1000, hits: int = 0, used: int = 0) -> Chunk:
    chunk = Chunk(key=ChunkKey(b"k"), parent=new_root(""), take=0, tokens=ids(*range(tokens)), bytes=size)
    chunk.hits, chunk.last_used = hits, used
    return chunk


# ── worth ──


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"used": 3}, {"used": 9}),
        ({"hits": 0}, {"hits": 1}),
        ({"hits": 1}, {"hits": 3}),
        ({"hits": 3}, {"hits": 100}),
        ({"tokens": 20}, {"tokens": 128}),
        ({"size": 4000}, {"size": 1000}),
    ],
)
def test_what_was_used_lately_or_often_or_saves_more_tokens_per_byte_is_worth_more(less, more):
    assert worth(a_chunk(**less), 10, 8) < worth(a_chunk(**more), 10, 8)


def test_each_doubling_of_asks_makes_up_for_one_rhythm():
    for doublings in range(5):
        old = a_chunk(hits=2**doublings - 1, used=1000 - doublings * 50)
        assert worth(old, 1000, 50) == pytest.approx(worth(a_chunk(used=1000), 1000, 50))


def test_alone_the_latest_counts_and_in_a_crowd_the_proven():
    latest, proven = a_chunk(used=100), a_chunk(used=90, hits=3)
    assert worth(latest, 100, 1) > worth(proven, 100, 1)
    assert worth(latest, 100, 50) < worth(proven, 100, 50)


def test_having_come_back_counts_as_asked_for():
    back = a_chunk()
    back.came_back = True
    assert worth(back, 10, 8) == worth(a_chunk(hits=1), 10, 8)


def test_a_snapshot_is_worth_the_tokens_that_lead_to_it():
    above = a_chunk()
    above.attach()
    snapshot = Chunk(key=ChunkKey(b"s"), parent=above, take=100, tokens=ids(), bytes=1000)
    assert worth(snapshot, 10, 8) == pytest.approx(worth(a_chunk(tokens=100), 10, 8))


def test_a_clock_behind_the_last_use_is_no_trouble():
    assert worth(a_chunk(used=50), 3, 8) == worth(a_chunk(used=50), 50, 8)


# ── the rhythm ──


def test_the_rhythm_follows_what_it_hears():
    rhythm = Rhythm()
    for _ in range(10_000):
        rhythm.observe(300)
    assert rhythm.lookups == pytest.approx(300, rel=0.01)
    for _ in range(10_000):
        rhythm.observe(0)
    assert rhythm.lookups == pytest.approx(1, rel=0.01)


def test_one_that_comes_back_after_a_week_changes_little():
    rhythm = Rhythm()
    for _ in range(10_000):
        rhythm.observe(2)
    rhythm.observe(1_000_000)
    assert rhythm.lookups < 2.1


# ── worth writing ──


@pytest.mark.parametrize(
    ("hits", "was_written", "spent", "budget", "expected"),
    [
        (0, False, 0, None, True),  # no budget
        (0, False, 9000, 10_000, True),  # it just fits
        (0, False, 9001, 10_000, False),
        (1, False, 99_999, 10_000, True),  # what was reused may go beyond
        (0, True, 0, None, False),  # never reused: not a second time
        (1, True, 0, None, True),
    ],
)
def test_the_ssd_wears_for_new_chunks_within_the_budget_and_for_reused_ones(
    hits, was_written, spent, budget, expected
):
    chunk = a_chunk(hits=hits)
    chunk.was_written = was_written
    assert worth_writing(chunk, spent, budget) is expected


# ── load or recompute ──


def chain(count: int, size: int = 1000) -> tuple[Segment, ...]:
    segments, cursor = [], Cursor(new_root(""), 0, "")
    for _ in range(count):
        chunk = Chunk(key=b"", parent=cursor.chunk, take=cursor.used, tokens=ids(*range(100)), bytes=size)
        segments.append(Segment(chunk, chunk.start, chunk.end))
        cursor = Cursor(chunk, 100, "")
    return tuple(segments)


def costs(*, evaluate: float, read: float, import_: float = 1e12) -> CostModel:
    return CostModel(evaluate=Rate(evaluate), import_=Rate(import_), read=Rate(read))


@pytest.mark.parametrize(
    ("measured", "loaded"),
    [(CostModel(), 3), (costs(evaluate=100_000, read=1000), 0), (costs(evaluate=100, read=1e6), 3)],
    ids=["nothing measured", "a slow disk", "a quick disk"],
)
def test_what_is_quicker_than_evaluating_is_loaded(measured, loaded):
    assert len(measured.worth_loading(chain(3))) == loaded


def test_what_is_in_ram_already_costs_no_reading():
    segments = chain(2)
    for segment in segments:
        segment.chunk.payload = memoryview(bytes(1000))
    assert costs(evaluate=1000, read=1.0).worth_loading(segments) == segments


def test_only_the_end_is_left_to_recomputation():
    first, second, third = chain(3)
    third.chunk.bytes = 10_000_000
    assert costs(evaluate=100, read=1e6).worth_loading((first, second, third)) == (first, second)
    first.chunk.bytes, third.chunk.bytes = 1_500_000, 1000
    assert costs(evaluate=100, read=1e6).worth_loading((first, second, third)) == (first, second, third)


def test_rates_follow_what_is_measured():
    rate = Rate()
    assert rate.seconds(5) == 0
    rate.measure(100, 0)
    assert rate.value is None
    rate.measure(100, 2)
    assert rate.seconds(100) == 2
    rate.measure(100, 1)
    assert 50 < rate.value < 100


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system does not tell")
def test_the_stores_clock_runs_while_the_machine_sleeps(monkeypatch):
    seconds = {time.CLOCK_MONOTONIC: 10.0, time.CLOCK_BOOTTIME: 10.0}
    monkeypatch.setattr("emberkeep.kv.policy.time.clock_gettime", seconds.__getitem__)
    clock = StoreClock()
    begin = clock.now()
    seconds[time.CLOCK_BOOTTIME] += 3600
    assert clock.now() - begin == 3600
