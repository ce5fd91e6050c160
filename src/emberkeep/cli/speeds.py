"""How fast this machine moves bytes, in bytes per second; None where that cannot be measured within a moment."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from emberkeep.sched.engine_thread import promised

_EACH_S = 0.6
_COPIED = 32 << 20
_READ = 8 << 20


def copy_speed() -> float | None:
    """Copies within RAM, by one thread."""
    return measured(_copy_speed)


def disk_speed(folder: Path) -> float | None:
    """Writes and reads in `folder`, where nothing stays."""
    return measured(lambda: _disk_speed(folder))


def measured(measure: Callable[[], float]) -> float | None:
    """Never raises."""
    future, run = promised(measure)
    threading.Thread(target=run, name="speed", daemon=True).start()
    try:
        return future.result(_EACH_S)
    except Exception:
        return None


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
