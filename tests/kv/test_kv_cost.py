from __future__ import annotations

from emberkeep.kv.cost import CostModel, Rate
from emberkeep.kv.tree import Chunk, Cursor, Segment, new_root
from helpers.kv_building import ids


def chain(count: int, size: int = 1000) -> tuple[Segment, ...]:
    segments, cursor = [], Cursor(new_root(""), 0, "")
    for _ in range(count):
        chunk = Chunk(key=b"", parent=cursor.chunk, take=cursor.used, tokens=ids(*range(100)), size=size)
        segments.append(Segment(chunk, chunk.start, chunk.end))
        cursor = Cursor(chunk, 100, "")
    return tuple(segments)


def costs(*, evaluate: float, read: float, import_: float = 1e12) -> CostModel:
    return CostModel(evaluate=Rate(evaluate), import_=Rate(import_), read=Rate(read))


def test_nothing_measured_means_everything_is_loaded():
    segments = chain(3)
    assert CostModel().worth_loading(segments) == segments


def test_a_slow_disk_is_not_waited_for():
    assert costs(evaluate=100_000, read=1000).worth_loading(chain(3)) == ()


def test_a_quick_disk_is_used_to_the_end():
    segments = chain(3)
    assert costs(evaluate=100, read=1e6).worth_loading(segments) == segments


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
