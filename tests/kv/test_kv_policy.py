from __future__ import annotations

import time

import pytest

from emberkeep.kv.disk.tier import evict
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import CostModel, RamTier, Rate, Rhythm, StoreClock, worth, worth_writing
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


def grown(ledger: Ledger, name: str, length: int, *, hits: int = 0) -> list[Chunk]:
    """A conversation of `length` chunks on disk, a byte each."""
    chunks = [ledger.tree.root("")]
    for number in range(length):
        key = ChunkKey(f"{name}{number}".encode())
        chunk = Chunk(key=key, parent=chunks[-1], take=len(chunks[-1].tokens), tokens=ids(ord(name), 1), bytes=1)
        ledger.insert(chunk, memoryview(b"x"))
        ledger.enter_file(chunk, 1)
        for _ in range(hits):
            ledger.use(chunk)
        chunks.append(chunk)
    return chunks[1:]


def test_a_conversation_that_is_not_continued_goes_whole_before_the_end_of_one_that_is():
    ledger = Ledger()
    proven, alone = grown(ledger, "p", 3, hits=2), grown(ledger, "a", 5)
    assert evict(ledger, 3.1) == alone[::-1]
    assert set(ledger.tree) == set(proven)


def test_what_has_expired_goes_before_what_is_worth_least():
    ledger = Ledger()
    (proven,), (fresh,) = grown(ledger, "p", 1, hits=5), grown(ledger, "f", 1)
    proven.expires = -1.0
    assert evict(ledger, 1.1) == [proven]
    assert fresh in ledger.tree


def test_a_chunk_that_is_stored_again_keeps_its_history_and_sets_the_rhythm():
    ledger = Ledger()
    grown(ledger, "a", 1, hits=2)
    before = ledger.rhythm.lookups
    ledger.tick += 500
    evict(ledger, 0)
    (back,) = grown(ledger, "a", 1)
    assert (back.hits, back.came_back) == (2, True)
    assert ledger.rhythm.lookups > before


PAYLOAD = memoryview(bytes(10))


def below_each_other(*names: str, on_disk: bool) -> list[Chunk]:
    """Chunks one below the other."""
    chunks = [new_root("")]
    for name in names:
        above = chunks[-1]
        chunk = Chunk(key=ChunkKey(name.encode()), parent=above, take=len(above.tokens), tokens=ids(1, 2))
        chunk.on_disk = on_disk
        chunk.attach()
        chunks.append(chunk)
    return chunks[1:]


def filled(budget: int, *chunks: Chunk) -> RamTier:
    ram = RamTier(budget)
    for chunk in chunks:
        ram.put(chunk, PAYLOAD)
    return ram


def test_what_is_also_on_disk_goes_before_what_is_worth_less_and_exists_nowhere_else():
    (stored,), (only_here,) = below_each_other("s", on_disk=True), below_each_other("o", on_disk=False)
    ram = filled(15, only_here, stored)
    dropped: list[Chunk] = []
    assert ram.shrink(lambda chunk: float(chunk is stored), dropped.append) == 1
    assert dropped == [] and stored.payload is None and only_here.payload is not None


def test_a_parent_that_becomes_a_leaf_is_weighed_with_the_rest():
    """Otherwise the end of every conversation would go before the second chunk of any."""
    (old_above, old_below), (new_above, new_below) = (
        below_each_other(name, name * 2, on_disk=False) for name in "on"
    )
    ram = filled(25, old_above, old_below, new_above, new_below)

    def drop(chunk: Chunk) -> None:
        chunk.detach()
        ram.free(chunk)

    assert ram.shrink(lambda chunk: float(chunk in (new_above, new_below)), drop) == 2
    assert old_above.payload is None and old_below.payload is None
    assert new_above.payload is not None and new_below.payload is not None
