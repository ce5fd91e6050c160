"""Opening a llama.cpp context: one unified KV cache for all sequences, and threads that stay.

OpenMP's threads wait for each other by spinning. Two of them on one core, put there by the kernel because another
process or a waking thread was on the other one, spin through each other's time slices: beside one busy process a
decode step takes three times as long as it needs to, beside a second server ten times. Bound to a core each, they
share it fairly with whatever else runs there (`one_core_each`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import CFUNCTYPE, POINTER, byref, c_void_p
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep.engine.base import DRAFT_ROWS, Rows
from emberkeep.engine.former_names import Stored, known_as
from emberkeep.engine.llamacpp.c_api import (
    FLASH_ATTENTION_OFF,
    FLASH_ATTENTION_ON,
    TYPES,
    Handle,
    ThreadPoolParams,
    defaults,
)
from emberkeep.engine.llamacpp.kv_state import (
    EMPTY,
    HEAD_BYTES,
    PARTIAL,
    PROBE,
    UNKNOWN,
    VARIANTS,
    Attention,
    BatchBuffer,
    Bytes,
    Layout,
    Recurrent,
    read_state,
)
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import (
    llama,
    loaded_digest,
    loader_variables,
    system_info,
    take_errors,
    version,
)
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import EngineError
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    context: int
    """Longest single sequence, in tokens."""
    cells: int
    """Token cells shared by all sequences."""
    sequences: int
    """Sequences that the scheduler may use."""
    batch: int = 512
    """Most tokens evaluated in one step."""
    threads: int | None = None
    kv_type: str = "f16"
    """In what keys and values are held: one of `TYPES`."""
    flash: bool = True
    """Whether attention is computed in one pass; llama.cpp takes no other way with a `kv_type` other than f16."""
    rope_switches: bool = True
    """Whether the model has two sets of RoPE factors, and the number of cells decides which one is used."""
    chunk: int = 128
    """Tokens of the payloads that there will be most of: for a GPU their memory is prepared."""
    stored: Stored | None = None
    """None: nothing is, or not by a fingerprint of before."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured of a model on this machine, and what follows from it."""

    reason: str
    """Why flash attention is on or off, in a few words."""
    tables: Mapping[bool, StepTable] = field(default_factory=dict)
    """What steps take with flash attention and without: of the one way there is, or of both."""
    wide_rows: int | None = None
    """See `Capabilities.wide_rows`."""
    has_choice: bool = False
    """Whether the engine may change between both ways."""
    measure: Callable[[Callable[[], bool]], Tuning | None] | None = None
    """What measures all of it anew, unless the function that it is given says that something waits: None then.
    None where there is nothing to measure."""


NOT_TUNED = Tuning("nothing was measured")


def open_context(model: LlamaModel, settings: LlamaSettings, on_node: Any) -> Handle:
    params = defaults(llama().llama_context_default_params)
    params.n_ctx = settings.cells
    params.n_batch = params.n_ubatch = settings.batch
    params.n_seq_max = settings.sequences + 1
    params.n_outputs_max = outputs(settings)
    params.n_threads = params.n_threads_batch = settings.threads or available_cores()
    params.flash_attn_type = FLASH_ATTENTION_ON if settings.flash else FLASH_ATTENTION_OFF
    params.type_k = params.type_v = TYPES[settings.kv_type]
    params.kv_unified = True
    # Layers with a window keep what they see, and not the whole context.
    params.swa_full = False
    params.no_perf = True
    if on_node is not None:
        params.cb_eval = ctypes.cast(on_node, ctypes.c_void_p)
    take_errors()
    context: Handle | None = llama().llama_init_from_model(model.handle, params)
    if not context:
        raise EngineError(_cannot_open(settings, take_errors() or "out of memory"))
    model.adapt(context)
    return context


def outputs(settings: LlamaSettings) -> int:
    """Rows with logits in one step: one of each sequence, and drafts. Each takes as many floats as there are
    tokens."""
    return min(settings.sequences + 1 + DRAFT_ROWS, max(settings.batch, settings.sequences + 1))


def _cannot_open(settings: LlamaSettings, reason: str) -> str:
    if "block size" in reason:
        return f"This model's state cannot be held as {settings.kv_type} ({reason}): use --kv-type f16."
    return (
        f"llama.cpp could not make room for {settings.cells} tokens of context, {reason}: "
        "try a smaller --ctx or --parallel."
    )


_THREADS_AT = 4
"""Where the number of threads stood among the parts of a fingerprint."""


def fingerprint(
    model: LlamaModel,
    weights_digest: str,
    settings: LlamaSettings,
    context: Handle,
    layout: Layout | None,
    *,
    either: bool,
) -> bytes:
    """Everything that shapes the bytes: weights, RoPE, KV types and layout, engine and its build.

    Not the number of threads: it rounds one kind of step in another way, which the shape of a step does as well.
    `either`: flash attention is switched on and off, and `layout` is that of when it is on.
    """
    cells = llama().llama_n_ctx_seq(context)
    parts = [
        "llama.cpp",
        version(),
        loaded_digest(),
        # Which of its kernels a library chose for this CPU, and what they were compiled with.
        system_info(),
        platform.machine(),
        weights_digest,
        model.metadata("general.architecture"),
        llama().llama_model_rope_type(model.handle),
        llama().llama_model_rope_freq_scale_train(model.handle),
        settings.rope_switches and cells > _original_context(model),
        "either" if either else "flash" if settings.flash else "no flash",
        "unified, windows cut off",
        layout,
        settings.kv_type,
        # Its own switches: with one of them it does not rotate what it quantises, and writes nowhere that it did.
        [said for said in loader_variables() if said.startswith(("GGML_", "LLAMA_"))],
        [(adapter.digest, adapter.scale) for adapter in model.adapters],
        # llama.cpp adds up more than two in the order of their addresses, which are others at every start.
        os.urandom(16) if len(model.adapters) > 2 else None,
        model.placement,
    ]
    written = [repr(part) for part in parts]
    before = hashlib.sha256("\0".join(written[:_THREADS_AT]).encode())
    behind = "\0".join(written[_THREADS_AT:])

    def with_threads(threads: int) -> bytes:
        return _digest(before, f"\0{threads}\0{behind}")

    return known_as(_digest(before, f"\0{behind}"), with_threads, settings.stored)


def _digest(before: hashlib._Hash, behind: str) -> bytes:
    whole = before.copy()
    whole.update(behind.encode())
    return whole.digest()


def windows_suffice(context: Handle, layout: Layout, settings: LlamaSettings) -> bool:
    """Whether sequences may share the cells of windows.

    llama.cpp never gives up a shared cell, although all who share it may have left it behind. That is harmless
    where windows have as many cells as the whole context; otherwise they have just those that all sequences
    together can see.
    """
    seen = layout.window * (settings.sequences + 1) + llama().llama_n_ubatch(context)
    return not layout.windows or bool(seen >= llama().llama_n_ctx_seq(context))


def _original_context(model: LlamaModel) -> int:
    given = model.metadata(f"{model.metadata('general.architecture')}.rope.scaling.original_context_length")
    return int(given) if given else model.train_context


# ── the layout of its state ──

_FIRST = 0
"""llama.cpp's sequence."""


@dataclass(frozen=True, slots=True)
class Exports:
    """Two exports of one sequence: all of it, and what llama.cpp cannot take apart by range."""

    whole: Bytes
    partial: Bytes

    @classmethod
    def read(cls, context: Handle) -> Exports:
        return cls(read_state(context, _FIRST), read_state(context, _FIRST, PARTIAL))


def learn_layout(empty: Exports, probe: Exports, window: int) -> Layout:
    """The layout of a context, from exports of a sequence without tokens and of one with `PROBE` of them.

    Raises EngineError when it is none that this version knows.
    """
    attention, recurrent = _inventory(empty.whole)
    windows, partial_recurrent = _inventory(empty.partial)
    if recurrent != partial_recurrent:
        raise EngineError(UNKNOWN)
    if len(empty.whole) == len(empty.partial) and not recurrent:
        windows = 0  # what has only ranges is never partial
    has_rest = windows or recurrent
    rest = probe.partial[HEAD_BYTES:] if has_rest else probe.partial[:0]
    layout = Layout(
        head=bytes(empty.whole[:HEAD_BYTES]),
        ranges=_read_parts(probe.whole[HEAD_BYTES : len(probe.whole) - len(rest)], attention - windows),
        windows=_read_parts(rest[: len(rest) - (recurrent.size if recurrent else 0)], windows),
        window=window,
        recurrent=recurrent,
        nothing=bytes(empty.partial[HEAD_BYTES:]) if has_rest else b"",
    )
    _check_layout(layout, probe)
    return layout


def probe_layout(context: Handle, model: LlamaModel) -> Layout | None:
    """Evaluate a few tokens in an empty context, and read the layout off what llama.cpp exports for them.

    None for one that this version does not know. Raises EngineError.
    """
    memory = llama().llama_get_memory(context)
    buffer = BatchBuffer(PROBE)
    empty = Exports.read(context)
    probe = model.vocab.bos if model.vocab.bos is not None else 0
    buffer.decode(context, Rows(_FIRST - 1, 0, np.full(PROBE, probe, np.int32), outputs=0))
    exports = Exports.read(context)
    # A step with logits touches what the first real one would otherwise have to wait for.
    buffer.decode(context, Rows(_FIRST - 1, PROBE, np.full(1, probe, np.int32), outputs=1))
    llama().llama_memory_clear(memory, True)
    try:
        return learn_layout(empty, exports, llama().llama_model_n_swa(model.handle))
    except EngineError:
        return None


def _check_layout(layout: Layout, probe: Exports) -> None:
    if not layout.ranges and not layout.unit.has_snapshots:
        raise EngineError(UNKNOWN)
    for payload in layout.split(probe.whole, (0, PROBE)) if layout.ranges else ():
        layout.check_range(payload, 0)
    if layout.unit.has_snapshots:
        layout.check_snapshot(memoryview(probe.partial), PROBE)


def _inventory(empty: Bytes) -> tuple[int, Recurrent | None]:
    """How many attention parts a state without cells has, and its recurrent part."""
    count, rest = 0, empty[HEAD_BYTES:]
    while bytes(rest[: len(EMPTY)]) == EMPTY:
        count, rest = count + 1, rest[len(EMPTY) :]
    return count, Recurrent.read(rest) if len(rest) else None


def _read_parts(state: Bytes, count: int) -> tuple[Attention, ...]:
    """The `count` parts that `state` consists of, from first to last byte."""
    if count == 0 and len(state) == 0:
        return ()
    for has_values, extra in VARIANTS if count else ():
        part = Attention.read(state, PROBE, has_values=has_values, extra=extra)
        if part is not None and part.size(PROBE) <= len(state):
            with suppress(EngineError):
                return part, *_read_parts(state[part.size(PROBE) :], count - 1)
    raise EngineError(UNKNOWN)


# ── threads and memory ──

_F32 = 4
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


def score_bytes(model: LlamaModel, settings: LlamaSettings) -> int:
    """What a step takes without flash attention at most: a number for each row, cell and head."""
    heads = max(int(llama().llama_model_n_head(model.handle)), 1)
    return settings.batch * settings.cells * heads * _F32
