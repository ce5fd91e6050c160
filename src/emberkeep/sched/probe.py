"""What this machine can do, measured once when a model is loaded: in two seconds at most, and never an error."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from emberkeep.config import free_ram, total_ram
from emberkeep.engine.base import Engine, Footprint, Rows
from emberkeep.sched.engine_thread import promised
from emberkeep.types import Json

_EACH_S = 0.6
"""Three measurements are timed; one that takes longer is given up."""
_COPIED = 32 << 20
_READ = 8 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    value: float
    measured: bool = False
    """False: assumed, on the cautious side."""


@dataclass(frozen=True, slots=True)
class Machine:
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
    """Of reading in the data folder."""
    step_seconds: Reading = Reading(0.5)
    """Of one token alone."""

    def json(self) -> dict[str, Json]:
        return asdict(self)


def assumed(footprint: Footprint | None = None) -> Machine:
    """Without measuring anything."""
    total, free = total_ram(), free_ram()
    ram = Reading(total, measured=True)
    ram_left = Reading(total // 2) if free is None else Reading(free, measured=True)
    if footprint is None:
        return Machine(ram, ram_left, "cpu", ram, ram_left)
    left = Reading(max(footprint.capacity - footprint.fixed, 0), measured=True)
    return Machine(ram, ram_left, footprint.device, Reading(footprint.capacity, measured=True), left)


def probe(folder: Path, footprint: Footprint | None = None, step: Callable[[], float] | None = None) -> Machine:
    """Measure. `folder` is read and written (nothing stays there); `step` takes one step and tells its seconds."""
    cautious = assumed(footprint)
    return Machine(
        cautious.total_ram,
        cautious.free_ram,
        cautious.device,
        cautious.device_total,
        cautious.device_free,
        copy_speed=_reading(_copy_speed, cautious.copy_speed),
        disk_speed=_reading(lambda: _disk_speed(folder), cautious.disk_speed),
        step_seconds=_reading(step, cautious.step_seconds) if step else cautious.step_seconds,
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


def _reading(measure: Callable[[], float], otherwise: Reading) -> Reading:
    future, run = promised(measure)
    threading.Thread(target=run, name="probe", daemon=True).start()
    try:
        return Reading(future.result(_EACH_S), measured=True)
    except Exception:  # whatever it is, a person waits for the model
        return otherwise


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
