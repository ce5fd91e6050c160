"""Compute threads that stay.

A library with OpenMP keeps its threads. One without starts them anew for every step, unless it is given a pool.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, byref, c_void_p
from typing import Any

from emberkeep.engine.llamacpp.api import Handle, ThreadPoolParams, defaults
from emberkeep.engine.llamacpp.binding import system_info
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.errors import EngineError

_CPU = 0


class ThreadPool:
    """Must outlive the contexts it is attached to. Does nothing where the library keeps threads of its own."""

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
