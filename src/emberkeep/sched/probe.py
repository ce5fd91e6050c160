"""What this machine can do, measured once when a model was loaded, and never an error."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import numpy as np

from emberkeep.config.kinds import readable_size
from emberkeep.config.machine import free_ram, total_ram
from emberkeep.engine.base import Engine, Footprint, Rows
from emberkeep.sched.engine_thread import promised
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.sched")

_EACH_S = 0.6
"""A measurement of RAM or of a disk that takes longer is given up."""
_COPIED = 32 << 20
_READ = 8 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    value: float
    measured: bool = False
    """False: assumed, on the cautious side."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Memory in bytes, speeds in bytes per second."""

    total_ram: Reading
    free_ram: Reading
    device: str
    """Where the engine computes."""
    device_total: Reading
    device_free: Reading
    copy_speed: Reading = Reading(2e9)
    """Within RAM, by one thread."""
    disk_speed: Reading = Reading(1e8)
    """Reading in the data folder."""
    step_seconds: Reading = Reading(0.5)
    """Evaluating one token alone."""
    load_speed: Reading | None = None
    """From RAM to the device; None where that has no memory of its own, or the engine cannot measure it."""
    device_speed: Reading | None = None
    """Reading and writing within that memory."""

    @property
    def speeds(self) -> str:
        """As a person reads them."""
        parts = {"RAM is copied at": self.copy_speed, "the data folder read at": self.disk_speed}
        device = {f"RAM goes to {self.device} at": self.load_speed, "memory there is used at": self.device_speed}
        parts |= {what: reading for what, reading in device.items() if reading is not None}
        return ", ".join(f"{what} {_rate(reading)}" for what, reading in parts.items())

    def json(self) -> dict[str, Json]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """How an engine measures a device with memory of its own, in bytes per second. Both block."""

    load_speed: Callable[[], float]
    read_speed: Callable[[], float]


_SLOW_LINK, _SLOW_DEVICE = Reading(4e9), Reading(1e11)


def log_plan(footprint: Footprint | None, machine: MachineFacts) -> None:
    """What memory is planned with, and how fast it is: what an operator has to know where something does not
    fit or is slow."""
    if footprint is not None:
        log.info(
            "memory of %s: %s in all, %s fixed; bytes per token of a step %.0f, per token of context %.0f, "
            "per pair of them %.3g, per row of logits %.0f",
            footprint.device,
            readable_size(footprint.capacity),
            readable_size(footprint.fixed),
            footprint.per_step_token,
            footprint.per_context_token,
            footprint.per_pair,
            footprint.per_logits_row,
        )
    log.info("%s, one token is computed in %.1f ms", machine.speeds, 1e3 * machine.step_seconds.value)


def assumed(footprint: Footprint | None = None) -> MachineFacts:
    """Without measuring anything."""
    total, free = total_ram(), free_ram()
    ram = Reading(total, measured=True)
    ram_left = Reading(total // 2) if free is None else Reading(free, measured=True)
    if footprint is None:
        return MachineFacts(ram, ram_left, "cpu", ram, ram_left)
    left = Reading(max(footprint.capacity - footprint.fixed, 0), measured=True)
    return MachineFacts(ram, ram_left, footprint.device, Reading(footprint.capacity, measured=True), left)


def probe(
    folder: Path,
    footprint: Footprint | None = None,
    step: Callable[[], float] | None = None,
    device: DeviceProbe | None = None,
) -> MachineFacts:
    """Measure. `folder` is read and written (nothing stays there); `step` takes one step and tells its seconds.

    It and `device` may have to wait for the engine's thread: they are given as long as that takes.
    """
    cautious = assumed(footprint)
    return MachineFacts(
        cautious.total_ram,
        cautious.free_ram,
        cautious.device,
        cautious.device_total,
        cautious.device_free,
        copy_speed=_reading(lambda: _soon(_copy_speed), cautious.copy_speed),
        disk_speed=_reading(lambda: _soon(lambda: _disk_speed(folder)), cautious.disk_speed),
        step_seconds=_reading(step, cautious.step_seconds) if step else cautious.step_seconds,
        load_speed=_reading(device.load_speed, _SLOW_LINK) if device else None,
        device_speed=_reading(device.read_speed, _SLOW_DEVICE) if device else None,
    )


def step_seconds(engine: Engine) -> float:
    """Evaluate one token in an engine that holds nothing, and forget it. On its thread. Raises EngineError."""
    token = engine.vocab.bos if engine.vocab.bos is not None else 0
    begin = perf_counter()
    try:
        engine.evaluate([Rows(0, 0, np.array([token], np.int32), outputs=1)])
        return perf_counter() - begin
    finally:
        engine.trim(0, 0)


def _rate(reading: Reading) -> str:
    return f"{readable_size(reading.value)}/s{'' if reading.measured else ' (assumed)'}"


def _reading(measure: Callable[[], float], otherwise: Reading) -> Reading:
    try:
        return Reading(measure(), measured=True)
    except Exception:  # whatever it is, the model answers all the same
        return otherwise


def _soon(measure: Callable[[], float]) -> float:
    """Raises TimeoutError, or what `measure` raises."""
    future, run = promised(measure)
    threading.Thread(target=run, name="probe", daemon=True).start()
    return future.result(_EACH_S)


def _copy_speed() -> float:
    source = np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # the first one also brings the pages in
    begin = perf_counter()
    np.copyto(target, source)
    return _COPIED / (perf_counter() - begin)


def _disk_speed(folder: Path) -> float:
    # A file without a name: it is gone whatever happens.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(_READ))
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # Else it would be read from the system's cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = perf_counter()
        length = len(file.read(_READ))
        return length / (perf_counter() - begin)
