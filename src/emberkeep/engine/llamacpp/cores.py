"""A core for each compute thread.

OpenMP's threads wait for each other by spinning. Two of them on one core, put there by the kernel because another
process or a waking thread was on the other one, spin through each other's time slices: beside one busy process a
decode step takes three times as long as it needs to, beside a second server ten times. Bound to a core each, they
share it fairly with whatever else runs there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def one_core_each() -> Iterator[None]:
    """Open an engine inside of it: afterwards this thread and the workers that came with it have a core each.

    Nothing changes where there are fewer workers than cores: the kernel knows better which ones are free. What
    this thread starts from now on stays on its core, so it should be a thread of the engine's own.
    """
    if sys.platform != "linux":
        yield
        return
    own = threading.get_native_id()
    # A thread hands its name down to those that it starts, which is how its workers are found again.
    name = f"engine-{own}"
    with suppress(OSError):
        (_TASKS / str(own) / "comm").write_text(name)
    yield
    with suppress(OSError):
        _bind([own, *(task for task in _called(name) if task != own)])


def _called(name: str) -> list[int]:
    return sorted(int(task.name) for task in _TASKS.iterdir() if _name_of(task) == name)


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""


def _bind(threads: list[int]) -> None:
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(threads) == len(cores) > 1:
        for thread, core in zip(threads, cores, strict=True):
            os.sched_setaffinity(thread, {core})
