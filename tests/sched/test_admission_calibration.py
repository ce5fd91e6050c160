from __future__ import annotations

import pytest

from emberkeep.engine.base import Footprint
from emberkeep.engine.fake import FakeEngine
from emberkeep.sched.admission import Calibration
from emberkeep.types.events import Admitted, Plan
from helpers.scheduling import PROMPT, Gate, Recorder, Rig, text


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


def told(count: int, median: float | None, p95: float | None, least: float | None, most: float | None) -> dict:
    return {"count": count, "min": least, "median": median, "p95": p95, "max": most}


def alike(ratio: float | None, count: int = 1) -> dict:
    return told(count, ratio, ratio, ratio, ratio)


def test_the_middle_and_the_ends_of_the_ratios_are_told():
    calibration = Calibration()
    for actual in range(901, 1001):
        calibration.note(admitted(), actual)
    assert calibration.stats()["actual_to_predicted"] == told(100, 0.951, 0.996, 0.901, 1.0)


@pytest.mark.parametrize(
    ("actual", "suggested"),
    [
        ([1000] * 18 + [1250] * 2, 0.25),  # follows what 95 of 100 stay below
        ([1000] * 99 + [4000], 0.05),  # one that was an accident changes nothing
        ([800] * 16, 0.05),
        ([1800] * 16, 0.5),
        ([1250] * 15, None),  # too few
    ],
)
def test_the_suggested_margin_covers_what_was_predicted_too_low_within_limits(actual, suggested):
    calibration = Calibration()
    for each in actual:
        calibration.note(admitted(), each)
    assert calibration.stats()["suggested_margin"] == suggested


def test_nothing_is_suggested_before_anything_was_compared():
    stats = Calibration().stats()
    assert stats["suggested_margin"] is None
    assert stats["actual_to_predicted"] == alike(None, 0)


def test_its_memory_is_bounded_and_it_counts_on():
    calibration = Calibration()
    for number in range(3000):
        calibration.note(admitted(), 1000 if number < 1500 else 2000)
    stats = calibration.stats()
    assert stats["actual_to_predicted"] == alike(2.0, 3000)


# ── in the loop ──


def test_a_request_that_ran_alone_is_compared():
    with Rig(engine=Measured(999_999, 900)) as rig:
        calibration = rig.scheduler.calibration
        rig.run(PROMPT, admitted=admitted())
    assert calibration.stats()["actual_to_predicted"] == alike(0.9)


def test_on_a_cpu_what_the_store_holds_is_not_the_engines():
    engine = Measured(999_999, 10_000, device="cpu")
    with Rig(engine=engine) as rig:
        calibration = rig.scheduler.calibration
        rig.run(PROMPT, admitted=admitted(predicted=10_000))
        held = rig.store.held_bytes()[0]
    assert held
    assert calibration.stats()["actual_to_predicted"]["median"] < 1


def test_requests_that_ran_together_are_not_compared():
    calibration = Calibration()
    engine = Measured(999_999)
    gate = Gate(engine)
    with Rig(engine=engine) as rig:
        calibration = rig.scheduler.calibration
        first = rig.start(PROMPT, admitted=admitted())
        gate.reached()
        second = rig.start(text(500, seed=1), admitted=admitted())
        gate.open()
        assert first.answer
        assert second.answer
    assert calibration.stats()["actual_to_predicted"]["count"] == 0


def test_an_engine_that_tells_nothing_and_a_sequence_without_a_plan_are_no_trouble():
    with Rig(engine=Measured(None, None)) as rig:
        calibration = rig.scheduler.calibration
        assert rig.run(PROMPT, admitted=admitted()).answer
        assert rig.run(text(300), Recorder()).answer
    assert calibration.stats()["actual_to_predicted"]["count"] == 0
