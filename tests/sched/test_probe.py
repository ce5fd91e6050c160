from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from emberkeep.config.machine import free_ram, total_ram
from emberkeep.engine.base import Footprint, KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.sched import probe as probing
from emberkeep.sched.probe import DeviceProbe, Reading, assumed, log_plan, probe, step_seconds
from helpers.engines import evaluate

GPU = Footprint("cuda:0", 1000, 400, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def a_machine_may_be_busy(monkeypatch):
    monkeypatch.setattr(probing, "_EACH_S", 60)


def test_what_can_be_measured_is_measured_and_nothing_stays_in_the_folder(tmp_path):
    machine = probe(tmp_path, GPU, lambda: 0.25)
    for reading in (machine.copy_speed, machine.disk_speed):
        assert reading.measured
        assert reading.value > 0
    assert machine.step_seconds == Reading(0.25, measured=True)
    assert machine.total_ram == Reading(total_ram(), measured=True)
    assert not list(tmp_path.iterdir())


def test_the_device_is_as_the_engine_tells(tmp_path):
    machine = assumed(GPU)
    assert (machine.device, machine.device_total.value, machine.device_free.value) == ("cuda:0", 1000, 600)
    alone = assumed()
    assert (alone.device, alone.device_total) == ("cpu", alone.total_ram)


def test_a_folder_that_is_not_there_is_taken_for_a_slow_one(tmp_path):
    assert probe(tmp_path / "none").disk_speed == assumed().disk_speed
    assert not assumed().disk_speed.measured


def test_a_folder_that_hangs_is_taken_for_a_slow_one(tmp_path, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(probing, "_EACH_S", 0.01)
    monkeypatch.setattr(probing, "_disk_speed", lambda folder: float(never.wait()))
    assert probe(tmp_path).disk_speed == assumed().disk_speed
    never.set()


def test_a_step_that_fails_is_taken_for_a_slow_one(tmp_path):
    def fails() -> float:
        raise EngineError("Broken.")

    assert probe(tmp_path, step=fails).step_seconds == assumed().step_seconds


def test_free_ram_that_is_not_known_is_half_of_all(monkeypatch):
    monkeypatch.setattr(probing, "free_ram", lambda: None)
    assert assumed().free_ram == Reading(total_ram() // 2)


@pytest.mark.parametrize("unit", list(KvUnit))
def test_a_measured_step_leaves_nothing_in_the_engine(unit):
    engine, fresh = FakeEngine(kv_unit=unit), FakeEngine(kv_unit=unit)
    assert step_seconds(engine) > 0
    assert (evaluate(engine, 0, 0, 20) == evaluate(fresh, 0, 0, 20)).all()


def test_it_reads_as_json(tmp_path):
    told = replace(assumed(GPU), step_seconds=Reading(0.1, measured=True)).json()
    assert told["step_seconds"] == {"value": 0.1, "measured": True}
    assert told["device"] == "cuda:0"


def test_there_is_no_more_free_ram_than_ram():
    free = free_ram()
    assert free is None or 0 < free <= total_ram()


def test_a_device_with_memory_of_its_own_is_measured_too(tmp_path):
    machine = probe(tmp_path, GPU, device=DeviceProbe(lambda: 50e9, lambda: 4e12))
    assert (machine.load_speed, machine.device_speed) == (Reading(50e9, True), Reading(4e12, True))
    assert "RAM goes to cuda:0 at 47 GiB/s, memory there is used at 3.6 TiB/s" in machine.speeds
    assert probe(tmp_path).load_speed is None
    assert "cuda" not in probe(tmp_path).speeds


def test_a_device_that_cannot_be_measured_is_said_to_be_assumed(tmp_path):
    def fails() -> float:
        raise EngineError("No memory is left.")

    machine = probe(tmp_path, GPU, device=DeviceProbe(fails, fails))
    assert machine.load_speed is not None and not machine.load_speed.measured
    assert machine.speeds.count(" (assumed)") == 2


def test_the_log_has_what_memory_is_planned_with_and_how_fast_it_is(caplog):
    footprint = Footprint("cuda:0", 8 << 30, 1 << 30, 23_040, 11.5, 0.25, 196_608)
    with caplog.at_level(logging.INFO, "emberkeep.sched"):
        log_plan(footprint, replace(assumed(footprint), step_seconds=Reading(0.0081, measured=True)))
        log_plan(None, assumed())
    plan, speeds, alone = (record.getMessage() for record in caplog.records)
    assert plan == (
        "memory of cuda:0: 8.0 GiB in all, 1.0 GiB fixed; bytes per token of a step 23040, per token of context "
        "12, per pair of them 0.25, per row of logits 196608"
    )
    assert speeds.startswith("RAM is copied at 1.9 GiB/s (assumed), the data folder read at 95 MiB/s (assumed)")
    assert speeds.endswith("one token is computed in 8.1 ms")
    assert alone.startswith("RAM is copied at")
