"""Which weights stay on a device, which pass, and where these wait: planned before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.engine.hf.residency import LayerBytes, Placing, plan_host, plan_residency
from emberkeep.errors import EngineError
from emberkeep.types.models import Residency

EVEN = [LayerBytes(10, 30)] * 8


@pytest.mark.parametrize(
    ("budget", "for_state", "mode", "streamed", "needed"),
    [
        (340, 0, Residency.FULL, (), 340),
        (340, 80, Residency.FULL, (), 340),  # state gets room only where some weights have to pass
        (265, 0, Residency.PARTIAL, (2, 3, 4, 5), 20 + 4 * 40 + 2 * 40),
        (265, 80, Residency.PARTIAL, (1, 2, 3, 4, 5, 6), 180),
        (110, 0, Residency.STREAM, tuple(range(8)), 100),
        (110, 80, Residency.STREAM, tuple(range(8)), 100),  # and never makes weights not fit
    ],
)
def test_as_much_stays_as_fits_beside_the_slots(budget, for_state, mode, streamed, needed):
    plan = plan_residency(EVEN, rest=20, budget=budget, for_state=for_state)
    assert (plan.mode, plan.streamed, plan.device_bytes) == (mode, streamed, needed)
    assert plan.passing_bytes == 40 * len(streamed)


def test_feed_forward_parts_pass_alone():
    plan = plan_residency(EVEN, rest=20, budget=200, placing=Placing(Residency.FFN))
    assert (plan.resident_bytes, plan.slot_bytes, plan.passing_bytes) == (100, 60, 240)


@pytest.mark.parametrize("wanted", list(Residency))
def test_what_does_not_fit_is_refused_with_a_sentence(wanted):
    with pytest.raises(EngineError, match="choose"):
        plan_residency(EVEN, rest=20, budget=60, placing=Placing(wanted))


def test_layers_that_are_to_stay_do():
    plan = plan_residency(EVEN, rest=20, budget=1000, placing=Placing(keep_first=3, keep_last=1))
    assert plan.streamed == (3, 4, 5, 6)
    assert plan_residency(EVEN, rest=20, budget=1000, placing=Placing(keep_first=99)).streamed == ()


# ── where what passes waits ──


def test_units_wait_in_ram_if_they_fit():
    plan = plan_host([40] * 8, ram=320, disk=0)
    assert (plan.on_disk, plan.buffers, plan.ram_bytes, plan.disk_bytes) == ((), (), 320, 0)


def test_units_on_disk_are_spread_among_those_in_ram():
    plan = plan_host([40] * 12, ram=400, disk=1000)
    assert plan.on_disk == (1, 4, 7, 10)
    assert plan.ram_bytes == 8 * 40 + sum(plan.buffers) == 400
    assert plan.disk_bytes == 160


@pytest.mark.parametrize(("ram", "disk"), [(79, 10_000), (300, 59)])
def test_units_that_have_no_room_anywhere_are_refused_with_a_sentence(ram, disk):
    with pytest.raises(EngineError, match=r"need 0.0 GB to wait in, .* of RAM and .* of disk .*: make room"):
        plan_host([40] * 12, ram, disk)


# ── a GPU that computes from RAM ──


@pytest.mark.parametrize("asked", [Placing(Residency.STREAM), Placing(Residency.FFN), Placing(keep_first=2)])
def test_nothing_passes_to_a_device_that_shares_ram_and_who_asks_for_it_is_told(asked, caplog):
    given = replace(asked, ram=100).in_unified_memory(100)
    assert (given.residency, given.lets_weights_pass) == (Residency.FULL, False)
    assert caplog.messages == [
        "every weight stays where it is, whatever residency says: this GPU computes from RAM"
    ]


def test_what_is_promised_to_others_is_there_for_weights_that_stay_in_ram(caplog):
    assert Placing(ram=60, promised_ram=40).in_unified_memory(100).residency is Residency.FULL
    assert caplog.messages == []
    with pytest.raises(EngineError, match=r"RAM that this GPU shares.*: close other programs"):
        Placing(ram=60, promised_ram=39).in_unified_memory(100)
