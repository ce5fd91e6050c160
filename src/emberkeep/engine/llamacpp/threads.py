"""The threads that llama.cpp computes with: they stay, and each has a core of its own.

OpenMP's threads wait for each other by spinning. Two of them on one core, put there by the kernel because
another process or a waking thread was on the other one, spin through each other's time slices: beside one busy
process a decode step takes three times as long as it needs to, beside a second server ten times. Bound to a
core each, they share it fairly with whatever else runs there (`one_core_each`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CFUNCTYPE, POINTER, byref, c_void_p
from pathlib import Path
from typing import Any

from emberkeep.engine.llamacpp.c_api import Handle, ThreadPoolParams, defaults
from emberkeep.engine.llamacpp.shared_library import llama, system_info
from emberkeep.errors import EngineError

_CPU = 0
"""ggml's number for devices of this type."""
_TASKS = Path("/proc/self/task")


class ThreadPool:
    """Compute threads that stay. Must outlive the contexts it is attached to.

    A library with OpenMP keeps its threads, and then this does nothing. One without starts them anew for every
    step, unless it is given a pool.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def start(self, threads: int) -> None:
        """Raises EngineError."""
        if threads > 1 and "OPENMP = 1" not in system_info():
            params = defaults(llama().ggml_threadpool_params_default, threads)
            self._handle = _cpu_function("ggml_threadpool_new", c_void_p, POINTER(ThreadPoolParams))(byref(params))
            if not self._handle:
                raise EngineError(f"llama.cpp could not start {threads} threads: try fewer --threads.")

    def attach(self, context: Handle) -> None:
        if self._handle:
            llama().llama_attach_threadpool(context, self._handle, None)

    def close(self) -> None:
        if self._handle:
            _cpu_function("ggml_threadpool_free", None, c_void_p)(self._handle)
            self._handle = None


def _cpu_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the CPU backend, which may be in a file that the library has opened by itself."""
    device = llama().ggml_backend_dev_by_type(_CPU)
    address = llama().ggml_backend_reg_get_proc_address(
        llama().ggml_backend_dev_backend_reg(device), name.encode()
    )
    return CFUNCTYPE(result, *arguments)(address)


_own = threading.local()
"""`cores`: those that this thread could use before it was bound to one of them."""


def available_cores() -> int:
    """Cores that this process may use, also where this thread is bound to one."""
    return len(own_cores()) if sys.platform == "linux" else os.cpu_count() or 1


def own_cores() -> set[int]:
    """Those of `available_cores`; none where they cannot be told apart."""
    cores: set[int] | None = getattr(_own, "cores", None)
    return cores or (os.sched_getaffinity(0) if sys.platform == "linux" else set())


def name_workers() -> str:
    """Give this thread a name of its own, which the workers that it starts inherit: how they are found again."""
    name = f"engine-{threading.get_native_id()}"
    with suppress(OSError):
        (_TASKS / str(threading.get_native_id()) / "comm").write_text(name)
    return name


@contextmanager
def one_core_each() -> Iterator[None]:
    """Take an engine's first step inside of it: afterwards this thread and its workers have a core each.

    Nothing changes where there are fewer workers than cores: the kernel knows better which ones are free. What
    this thread starts from now on stays on its core, so it should be a thread of the engine's own. Another engine
    that is opened on it has workers of its own, which get a core each as well.
    """
    if sys.platform != "linux":
        yield
        return
    own, name, cores = threading.get_native_id(), name_workers(), own_cores()
    with suppress(OSError):
        os.sched_setaffinity(own, cores)
    before = _threads_named(name)
    yield
    with suppress(OSError):
        new = [task for task in _threads_named(name) if task not in before]
        # None that are new: OpenMP has one team for all engines of a thread.
        _bind([own, *(new or (task for task in before if task != own))], cores)


@contextmanager
def cores_kept() -> Iterator[None]:
    """Afterwards this thread may use the cores that it may use now."""
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    try:
        yield
    finally:
        if sys.platform == "linux":
            os.sched_setaffinity(0, cores)


def _threads_named(name: str) -> list[int]:
    return sorted(int(task.name) for task in _TASKS.iterdir() if _name_of(task) == name)


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""


def _bind(threads: list[int], cores: set[int]) -> None:
    """The first is this one."""
    if sys.platform == "linux" and len(threads) == len(cores) > 1:
        _own.cores = cores
        for thread, core in zip(threads, sorted(cores), strict=True):
            os.sched_setaffinity(thread, {core})
