from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import Footprint
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import TooLarge
from emberkeep.sched.admission import (
    Admission,
    Calibration,
    Refusal,
    Room,
    choose,
    ladder,
    open_admission,
    peak,
)
from emberkeep.types.events import Admitted, Plan
from helpers.scheduling import LONG, PROMPT, Gate, Rig, reference, text

GIB = 1 << 30
GPU = Footprint("cuda:0", 10 * GIB, 4 * GIB, 40_000, 2_000, 100, 500_000)
WIDE = Plan(512, 16)


def room(**changes) -> Room:
    return replace(Room(GPU, 0.1, 64 * GIB, 16 * GIB, 40_000), **changes)


def admission(
    footprint: Footprint = GPU, *, free: int | None = 64 * GIB, packs=frozenset({16, 8, 4})
) -> Admission:
    shape = replace(FakeEngine().capabilities, kv_bytes_per_token=40_000, packs=packs)
    return Admission(
        lambda: footprint, shape, largest_slice=512, margin=0.1, store_room=lambda: 16 * GIB, free=lambda: free
    )


# ── prediction ──


def test_the_peak_is_what_the_footprint_says_of_the_worse_of_prompt_and_answer():
    prompt = 4 * GIB + 512 * 40_000 + 3000 * 2_000 + 512 * 3000 * 100 + 500_000
    assert peak(GPU, WIDE, 3000, 0, rows=1) == prompt == peak(GPU, WIDE, 3000, 10, rows=1)
    answer = 4 * GIB + 40_000 + 103_000 * 2_000 + 103_000 * 100 + 500_000
    assert peak(GPU, WIDE, 3000, 100_000, rows=1) == answer


# ── the ladder ──


def test_the_largest_slice_that_fits_is_taken():
    assert choose(room(), ladder(512, [16]), 1000, 256) == WIDE
    # 100 bytes a pair: 50,000 tokens need 2.4 GiB at 512, 1.2 GiB at 256.
    tight = room(footprint=replace(GPU, capacity=6 * GIB))
    assert choose(tight, ladder(512, [16]), 50_000, 256) == Plan(256, 16)


@given(
    st.integers(1, 1 << 20), st.integers(0, 4096), st.integers(0, 6 * GIB), st.sampled_from([None, GIB, 8 * GIB])
)
def test_what_is_suggested_fits_and_one_token_more_does_not(prompt, new, beyond, free):
    found = room(footprint=replace(GPU, capacity=4 * GIB + beyond), free_ram=free)
    plans = ladder(512, [16])
    chosen = choose(found, plans, prompt, new)
    if isinstance(chosen, Plan):
        assert found.lacks(chosen, prompt, new) is None
        return
    assert chosen.needed > chosen.available
    assert chosen.suggested_max_tokens < prompt
    assert found.lacks(plans[-1], chosen.suggested_max_tokens + 1, new)
    if chosen.suggested_max_tokens:
        assert found.lacks(plans[-1], chosen.suggested_max_tokens, new) is None


# ── RAM ──


def test_what_does_not_fit_into_ram_on_its_way_to_the_store_is_refused():
    refusal = choose(room(free_ram=GIB), ladder(512, [16]), 100_000, 0)
    assert isinstance(refusal, Refusal)
    assert refusal.place == "RAM"
    assert refusal.suggested_max_tokens == int(GIB / 1.1) // 40_000


@pytest.mark.parametrize(
    "reason",
    [
        {"store_room": 0},  # what is new replaces something
        {"kv_bytes_per_token": 0},  # nothing is kept
        {"in_ram": 100_000},  # it is there already
        {"free_ram": None},  # unknown
    ],
)
def test_ram_is_no_matter_where_the_store_does_not_grow(reason):
    assert choose(room(**{"free_ram": GIB, **reason}), ladder(512, [16]), 100_000, 0) == WIDE


def test_a_step_on_the_cpu_takes_ram_too():
    small = room(footprint=replace(GPU, device="cpu"), free_ram=100_000_000, store_room=0)
    assert choose(small, ladder(512, [16]), 1000, 0) == WIDE
    assert choose(small, ladder(512, [16]), 2500, 0) == Plan(256, 16)


# ── admission ──


def test_who_wants_exact_state_never_gets_fewer_bits_and_others_get_them_where_ram_is_short():
    with pytest.raises(TooLarge):
        admission(free=GIB).admit(40_000, 0)
    assert admission(free=GIB).admit(40_000, 0, bits=8).plan == Plan(512, 8)
    assert admission(free=GIB).admit(80_000, 0, bits=8).plan == Plan(512, 4)
    with pytest.raises(TooLarge):
        admission(free=GIB, packs=frozenset({16, 8})).admit(80_000, 0, bits=8)


def test_a_refusal_tells_the_numbers_and_the_way_out():
    with pytest.raises(TooLarge) as caught:
        admission(free=GIB).admit(100_000, 0)
    error = caught.value
    assert (error.prompt_tokens, error.available, error.needed) == (100_000, GIB, 4_400_000_000)
    assert f"send at most {error.suggested_max_tokens:,} tokens" in str(error)
    with pytest.raises(TooLarge, match="free some memory"):
        admission(free=1000).admit(100_000, 0)


def test_an_answer_is_as_long_as_memory_lasts_and_never_a_reason_to_refuse():
    tight = replace(GPU, capacity=int(4.5 * GIB))
    assert admission(tight).admit(100, 500).max_new == 500
    admitted = admission(tight).admit(100, 1 << 20)
    assert 256 <= admitted.max_new < 1 << 20
    assert admitted.predicted * 1.1 <= tight.capacity
    assert admitted.beyond == admitted.predicted - tight.fixed <= admission(tight).budget


def test_tokens_in_ram_already_and_those_that_are_not_kept_take_none_and_are_looked_for_where_that_helps():
    asked = []

    def in_ram() -> int:
        asked.append(True)
        return 90_000

    admission().admit(100_000, 0, in_ram=in_ram)
    assert not asked
    assert admission(free=GIB).admit(100_000, 0, in_ram=in_ram).plan == WIDE
    assert asked
    assert admission(free=GIB).admit(100_000, 0, is_kept=False).plan == WIDE


def test_an_engine_that_nothing_is_known_about_is_not_planned_for(caplog):
    def opened(footprint: Footprint | None) -> Admission | None:
        shape = FakeEngine().capabilities
        return open_admission(lambda: footprint, shape, largest_slice=512, margin=0.1, store_room=lambda: 0)

    assert opened(None) is None
    assert opened(GPU) is not None
    assert not caplog.messages
    assert opened(replace(GPU, fixed=int(9.5 * GIB))) is None
    assert "without a plan" in caplog.messages[0]


# ── in the loop ──


def with_plan(slice_: int, beyond: int = 0) -> Admitted:
    return Admitted(Plan(slice_, 16), len(LONG), 12, predicted=beyond, beyond=beyond)


@pytest.mark.parametrize(
    "limit", [{"admitted": with_plan(48)}, {"prefill_slice": 48}], ids=["planned", "asked for"]
)
def test_a_prompt_is_evaluated_in_slices_of_its_plan_or_of_what_its_request_allows(limit):
    slices = []
    engine = FakeEngine(cells=1 << 15, on_evaluate=lambda batch: slices.extend(len(rows.tokens) for rows in batch))
    with Rig(engine=engine) as rig:
        answer = rig.run(LONG, **limit).answer
    assert max(slices) == 48
    assert answer == reference(LONG)


@pytest.mark.parametrize(("most", "largest"), [(None, 512), (48, 48), (4096, 512)])
def test_a_request_may_ask_for_smaller_slices(most, largest):
    assert admission().admit(1000, 1, most_slice=most).plan.prefill_slice == largest


def test_sequences_that_together_need_too_much_run_one_after_the_other():
    engine = FakeEngine(cells=1 << 15)
    gate = Gate(engine)
    together: list[int] = []
    with Rig(engine=engine, memory=100) as rig:
        first = rig.start(PROMPT, admitted=with_plan(512, beyond=60))
        gate.reached()
        second = rig.start(text(500, seed=1), admitted=with_plan(512, beyond=60))
        third = rig.start(text(500, seed=2), admitted=with_plan(512, beyond=1000))
        engine.on_evaluate = lambda batch: together.append(len({rows.sequence for rows in batch}))
        gate.open()
        for recorder in (first, second, third):
            assert recorder.answer
    assert set(together) == {1}


def admitted(predicted: int = 1000) -> Admitted:
    return Admitted(Plan(512, 16), 700, 12, predicted, predicted)


class Measured(FakeEngine):
    """Tells peaks that a test chose, in turn."""

    def __init__(self, *peaks: int | None, device: str = "cuda:0") -> None:
        super().__init__(cells=1 << 15)
        self.footprint = Footprint(device, 1 << 40, 0, 0, 0, 0, 0)
        self.peaks = list(peaks)

    def peak_bytes(self) -> int | None:
        return self.peaks.pop(0)


# ── figures ──


def compared(*actual: int) -> dict:
    """What is told after so many requests were each predicted to need 1000 bytes, and needed these."""
    calibration = Calibration(Measured(*(peak for each in actual for peak in (None, each))), lambda: 0)
    for _ in actual:
        alone = SimpleNamespace(prompt=SimpleNamespace(admitted=admitted()))
        calibration.started(alone, alone=True)
        calibration.ended(alone)
    return calibration.stats()


def alike(ratio: float | None, count: int = 1) -> dict:
    return {"count": count, "min": ratio, "median": ratio, "p95": ratio, "max": ratio}


def test_the_middle_and_the_ends_of_the_ratios_are_told():
    ratios = compared(*range(901, 1001))["actual_to_predicted"]
    assert ratios == {"count": 100, "min": 0.901, "median": 0.951, "p95": 0.996, "max": 1.0}


@pytest.mark.parametrize(
    ("actual", "suggested"),
    [
        ([1000] * 18 + [1250] * 2, 0.25),  # follows what 95 of 100 stay below
        ([1000] * 99 + [4000], 0.05),  # one that was an accident changes nothing
        ([800] * 16, 0.05),
        ([1800] * 16, 0.5),
        ([1250] * 15, None),  # too few
        ([], None),
    ],
)
def test_the_suggested_margin_covers_what_was_predicted_too_low_within_limits(actual, suggested):
    assert compared(*actual)["suggested_margin"] == suggested


def test_the_latest_comparisons_count():
    assert compared(*[1000] * 1500, *[2000] * 1500)["actual_to_predicted"] == alike(2.0, 3000)


# ── in the loop ──


def test_a_request_that_ran_alone_is_compared():
    with Rig(engine=Measured(999_999, 900)) as rig:
        rig.run(PROMPT, admitted=admitted())
        assert rig.scheduler.calibration.stats()["actual_to_predicted"] == alike(0.9)


def test_on_a_cpu_what_the_store_holds_is_not_the_engines():
    with Rig(engine=Measured(999_999, 10_000, device="cpu")) as rig:
        rig.run(PROMPT, admitted=admitted(predicted=10_000))
        assert rig.store.held_bytes()[0]
        assert rig.scheduler.calibration.stats()["actual_to_predicted"]["median"] < 1


def test_requests_that_ran_together_are_not_compared():
    engine = Measured(999_999)
    gate = Gate(engine)
    with Rig(engine=engine) as rig:
        first = rig.start(PROMPT, admitted=admitted())
        gate.reached()
        second = rig.start(text(500, seed=1), admitted=admitted())
        gate.open()
        assert first.answer
        assert second.answer
        assert rig.scheduler.calibration.stats()["actual_to_predicted"]["count"] == 0


def test_an_engine_that_tells_nothing_and_a_sequence_without_a_plan_are_no_trouble():
    with Rig(engine=Measured(None, None)) as rig:
        assert rig.run(PROMPT, admitted=admitted()).answer
        assert rig.run(text(300)).answer
        assert rig.scheduler.calibration.stats()["actual_to_predicted"]["count"] == 0
