"""Opening a llama.cpp context, with one unified KV cache for all sequences: what it is opened with, the
fingerprint of its state, the batches that extend it, what it needs of memory, and what it tells of experts.

With a context nearly all memory is allocated: weights, cells and buffers for the largest step. In RAM, pages count
when they are touched: those of buffers in a step. On a GPU only scratch of the kernels comes later.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep.config.machine import resident_ram, total_ram
from emberkeep.engine.base import DRAFT_ROWS, Footprint, Rows
from emberkeep.engine.facts import Stored, known_as
from emberkeep.engine.llamacpp.c_api import (
    FLASH_ATTENTION_OFF,
    FLASH_ATTENTION_ON,
    TYPES,
    Handle,
    LlamaBatch,
    NodeCallback,
    Tensor,
    defaults,
)
from emberkeep.engine.llamacpp.gpus import Gpu, gpus
from emberkeep.engine.llamacpp.kv_layout import Bytes, Layout
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import (
    Allocation,
    build,
    llama,
    own_switches,
    take_errors,
)
from emberkeep.engine.llamacpp.threads import available_cores
from emberkeep.errors import EngineError
from emberkeep.types.models import ExpertStats, LayerExperts
from emberkeep.values import dataclass

_BESIDE_GPUS = 4
"""Threads that look up embeddings, where GPUs compute all else."""


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


def thread_count(model: LlamaModel, settings: LlamaSettings) -> int:
    """How many compute a step. They wait for it by turning round and round, so there are no more than it needs."""
    cores = available_cores()
    return settings.threads or (min(cores, _BESIDE_GPUS) if model.is_offloaded else cores)


def open_context(model: LlamaModel, settings: LlamaSettings, on_node: Any) -> Handle:
    params = defaults(llama().llama_context_default_params)
    params.n_ctx = settings.cells
    params.n_batch = params.n_ubatch = settings.batch
    params.n_seq_max = settings.sequences + 1
    params.n_outputs_max = outputs(settings)
    params.n_threads = params.n_threads_batch = thread_count(model, settings)
    params.flash_attn_type = FLASH_ATTENTION_ON if settings.flash else FLASH_ATTENTION_OFF
    params.type_k = params.type_v = TYPES[settings.kv_type]
    params.kv_unified = True
    # Layers with a window keep what they see, and not the whole context.
    params.swa_full = False
    params.no_perf = True
    if on_node is not None:
        params.cb_eval = ctypes.cast(on_node, ctypes.c_void_p)
    try:
        return model.open_context(params)
    except EngineError as reason:
        if "block size" in str(reason):
            raise EngineError(
                f"This model's state cannot be held as {settings.kv_type} ({reason}): use --kv-type f16."
            ) from None
        raise EngineError(
            f"llama.cpp could not make room for {settings.cells} tokens of context, {reason}: "
            "try a smaller --ctx or --parallel."
        ) from None


def outputs(settings: LlamaSettings) -> int:
    """Rows with logits in one step: one of each sequence, and drafts. Each takes as many floats as there are
    tokens."""
    return min(settings.sequences + 1 + DRAFT_ROWS, max(settings.batch, settings.sequences + 1))


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
    original = model.hyperparameter("rope.scaling.original_context_length") or model.train_context
    parts = [
        "llama.cpp",
        *build(),
        weights_digest,
        model.metadata("general.architecture"),
        llama().llama_model_rope_type(model.handle),
        llama().llama_model_rope_freq_scale_train(model.handle),
        settings.rope_switches and llama().llama_n_ctx_seq(context) > int(original),
        "either" if either else "flash" if settings.flash else "no flash",
        "unified, windows cut off",
        layout,
        settings.kv_type,
        own_switches(),
        [(adapter.digest, adapter.scale) for adapter in model.adapters],
        # llama.cpp adds up more than two in the order of their addresses, which are others at every start.
        os.urandom(16) if len(model.adapters) > 2 else None,
        model.placement,
    ]
    written = [repr(part) for part in parts]

    def digest(*threads: str) -> bytes:
        text = "\0".join((*written[:_THREADS_AT], *threads, *written[_THREADS_AT:]))
        return hashlib.sha256(text.encode()).digest()

    return known_as(digest(), lambda threads: digest(str(threads)), settings.stored)


def windows_suffice(context: Handle, layout: Layout, settings: LlamaSettings) -> bool:
    """Whether sequences may share the cells of windows.

    llama.cpp never gives up a shared cell, although all who share it may have left it behind. That is harmless
    where windows have as many cells as the whole context; otherwise they have just those that all sequences
    together can see.
    """
    seen = layout.window * (settings.sequences + 1) + llama().llama_n_ubatch(context)
    return not layout.windows or bool(seen >= llama().llama_n_ctx_seq(context))


# ── threads and memory ──
class BatchBuffer:
    """Owns the memory that its `llama_batch` points to."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._sequence_counts = np.ones(capacity, np.int32)
        self._sequence_pointers = self._sequences.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._wanted = np.zeros(capacity, np.int8)
        self._batch = LlamaBatch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._sequence_counts, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, batch: Sequence[Rows]) -> tuple[LlamaBatch, list[int]]:
        """The filled batch and, for each of `batch`, its first row that wants logits."""
        end = 0
        first_outputs = []
        for rows in batch:
            begin, end = end, end + len(rows.tokens)
            self._tokens[begin:end] = rows.tokens
            self._positions[begin:end] = np.arange(rows.start, rows.start + end - begin, dtype=np.int32)
            self._sequences[begin:end] = rows.sequence + 1  # 0 is the engine's scratch sequence
            self._wanted[begin:end] = 0
            self._wanted[end - rows.outputs : end] = 1
            first_outputs.append(end - rows.outputs)
        self._batch.n_tokens = end
        return self._batch, first_outputs

    def decode(self, context: Handle, rows: Rows) -> None:
        """Raises EngineError."""
        if llama().llama_decode(context, self.fill([rows])[0]):
            raise EngineError(f"llama.cpp could not evaluate a token: {take_errors()}.")

    def want_any(self) -> int:
        """Let at least one row of what was filled in want logits: the first that does."""
        end = self._batch.n_tokens
        if not self._wanted[:end].any():
            self._wanted[end - 1] = 1
        return int(self._wanted[:end].argmax())


def _pointer(array: np.ndarray[tuple[int], np.dtype[np.generic]], to: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(to))


# ── the state of single sequences ──

WHOLE, PARTIAL = 0, 1
"""All of a state; what cannot be taken apart by range."""


def read_state(context: Handle, sequence: int, flags: int = WHOLE, into: Bytes | None = None) -> Bytes:
    """A copy, in the memory of `into` if that is large enough. Raises EngineError."""
    size = llama().llama_state_seq_get_size_ext(context, sequence, flags)
    state = np.empty(size, np.uint8) if into is None or len(into) < size else into[:size]
    written = llama().llama_state_seq_get_data_ext(context, _pointer(state, ctypes.c_uint8), size, sequence, flags)
    if written != size:
        raise EngineError(f"llama.cpp exported {written} bytes instead of {size}.")
    return state


def write_state(context: Handle, sequence: int, state: Bytes, flags: int = WHOLE) -> bool:
    """Replace a sequence's state. False when there is no room: what was to be replaced is then gone.

    llama.cpp trusts the bytes: they must have been checked.
    """
    read = llama().llama_state_seq_set_data_ext(
        context, _pointer(state, ctypes.c_uint8), len(state), sequence, flags
    )
    if read == 0:
        take_errors()
    return bool(read)


@contextmanager
def share_ranges(memory: Handle, target: int, ranges: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    """Inside of it the empty sequence `target` shares these: of which sequence, from where, to where. No bytes are
    copied."""
    for source, start, end in ranges:
        llama().llama_memory_seq_cp(memory, source, target, start, end)
    try:
        yield
    finally:
        llama().llama_memory_seq_rm(memory, target, -1, -1)


# ── memory ──

_OF_STEPS = ("compute", "output")
"""Kinds of buffers that are not touched before a step needs them."""

_F32 = 4

_UNPACKED = 4
"""So many times as large are keys and values as f16, at most."""


def score_bytes(model: LlamaModel, settings: LlamaSettings) -> int:
    """What a step takes without flash attention at most: a number for each row, cell and head."""
    heads = max(int(llama().llama_model_n_head(model.handle)), 1)
    return settings.batch * settings.cells * heads * _F32


def footprint_of(
    model: LlamaModel,
    settings: LlamaSettings,
    buffers: Sequence[Allocation],
    kv_bytes_per_token: int,
    has_scores: bool,
) -> Footprint | None:
    """What an engine needs that is open, idle, and has taken a step. None where it does not say what is on a GPU.

    `buffers`: what was allocated for it. `has_scores`: it may be opened without flash attention, although it was
    opened with it or with fewer cells.
    """
    if model.offloads:
        return on_gpu(model, settings, buffers, kv_bytes_per_token, gpus())
    of_steps = sum(buffer.size for buffer in buffers if buffer.kind in _OF_STEPS)
    later = of_steps + (score_bytes(model, settings) if has_scores else 0)
    least = int(llama().llama_model_size(model.handle)) + settings.cells * kv_bytes_per_token
    held = max(sum(buffer.size for buffer in buffers) - of_steps, least)
    return Footprint(
        device="cpu",
        capacity=total_ram(),
        # The process has more than the buffers: vocabulary, threads and what they compute with. It may have less:
        # weights that are mapped come when they are used.
        fixed=max(resident_ram() or 0, model.resident_before + held) + later,
        per_step_token=kv_bytes_per_token,  # what a step computed is copied out of the context
        per_context_token=0,
        per_pair=0,
        per_logits_row=0,
    )


def on_gpu(
    model: LlamaModel,
    settings: LlamaSettings,
    buffers: Sequence[Allocation],
    kv_bytes_per_token: int,
    found: Sequence[Gpu],
) -> Footprint | None:
    """What is needed of the GPU in use that has least free: what a step adds, it adds on each of them. None where
    it is not told which has what, or what is free."""
    used = {gpu.name: sum(buffer.size for buffer in buffers if _is_on(gpu, buffer)) for gpu in found}
    tightest = min((gpu for gpu in found if used[gpu.name] and gpu.total), key=lambda gpu: gpu.free, default=None)
    if tightest is None:
        return None
    fixed = used[tightest.name]
    is_packed = settings.kv_type != "f16"
    return Footprint(
        device=tightest.name,
        # A driver that cannot tell says that everything is free.
        capacity=min(fixed + tightest.free, tightest.total),
        fixed=fixed,
        per_step_token=_scratch(model),
        # Flash attention unpacks the keys and values of a layer.
        per_context_token=_UNPACKED * kv_bytes_per_token / _number(model, "block_count", 1) if is_packed else 0,
        per_pair=0,
        per_logits_row=0,
        in_ram=sum(buffer.size for buffer in buffers) - sum(used.values()),
    )


def _is_on(gpu: Gpu, buffer: Allocation) -> bool:
    return buffer.place == gpu.name or buffer.place.startswith(f"{gpu.name}_")


def _scratch(model: LlamaModel) -> int:
    """What kernels have in hand for a token: the input and the output of the widest product, which experts have
    several times."""
    width, wide = _number(model, "embedding_length", 0), _number(model, "feed_forward_length", 0)
    experts, of_one = _number(model, "expert_used_count", 0), _number(model, "expert_feed_forward_length", wide)
    return _F32 * max(width + (wide or 4 * width), experts * (width + of_one))


def _number(model: LlamaModel, key: str, otherwise: int) -> int:
    """The largest, where each layer has its own."""
    return max(map(int, re.findall(r"\d+", model.hyperparameter(key) or "")), default=otherwise)


# ── which experts of a mixture are chosen ──

log = logging.getLogger("emberkeep.engine")
_CHOSEN = b"ffn_moe_topk-"
"""How llama.cpp names the node that holds the chosen experts, before the number of the layer."""
_NAME = Tensor.name.offset
_Totals = npt.NDArray[np.int64]
"""Per expert how many tokens chose it, and after that the number of tokens."""


class GraphExpertCounter:
    """See `ExpertTracking` for the contracts. `reopen` opens the engine's context anew, with this `callback`.

    llama.cpp asks the callback about every node of a graph, some thousand per step, and computes the graph in one
    go where there is none. It takes one only when a context is opened: watching begins with opening another one.
    """

    def __init__(self, experts: int, used: int | None, reopen: Callable[[], None]) -> None:
        self._experts = experts
        self._used = used
        self._reopen = reopen
        self._step: dict[int, _Totals] = {}
        self._totals: Mapping[int, _Totals] = {}
        self._on_node = NodeCallback(self._see)
        self.enabled = False

    @classmethod
    def of(cls, model: LlamaModel, reopen: Callable[[], None]) -> GraphExpertCounter | None:
        """None for a model without experts to choose from."""
        experts = int(model.hyperparameter("expert_count") or 0)
        used = model.hyperparameter("expert_used_count")  # a list of numbers is not among the metadata
        return cls(experts, int(used) if used else None, reopen) if experts > 1 else None

    @property
    def callback(self) -> Callable[..., bool] | None:
        """What a context is to be opened with; it must outlive the context."""
        return self._on_node if self.enabled else None

    def track(self, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            self._reopen()

    def reset(self) -> None:
        self._totals = {}

    def stats(self) -> ExpertStats:
        layers = tuple(
            LayerExperts(layer, tokens, tuple(counts))
            for layer, (*counts, tokens) in sorted((n, total.tolist()) for n, total in self._totals.items())
        )
        return ExpertStats(self.enabled, self._experts, self._used, layers)

    def step_done(self) -> None:
        """Count what was seen since the last call. Cheap when that is nothing."""
        if self._step:
            # One assignment of a new mapping: readers need no lock, and see all layers after the same step.
            self._totals = {**self._totals, **{n: self._totals.get(n, 0) + seen for n, seen in self._step.items()}}
            self._step = {}

    def _see(self, address: int, is_question: bool, _user_data: object) -> bool:
        """Asked about every node before it is computed, and told about those that it answered True for."""
        if is_question:
            return ctypes.string_at(address + _NAME, len(_CHOSEN)) == _CHOSEN
        try:
            tensor = Tensor.from_address(address)
            if len(chosen := _read_experts(tensor)):
                layer = int(tensor.name.removeprefix(_CHOSEN))
                seen = np.append(np.bincount(chosen.ravel(), minlength=self._experts), len(chosen))
                self._step[layer] = self._step.get(layer, 0) + seen
        except BaseException:
            log.exception("the experts of a step were not counted")
        return True  # anything else, an exception included, would leave the rest of the graph uncomputed


def _read_experts(tensor: Tensor) -> npt.NDArray[np.int32]:
    """One row per token. The last layer has none in a step without logits."""
    used, tokens = tensor.ne[:2]
    if not tokens:
        return np.empty((0, used), np.int32)
    # A view of all experts, sorted: its rows are further apart than they are long.
    step, row = tensor.nb[:2]
    size = (tokens - 1) * row + used * step
    buffer = np.empty(size, np.uint8)
    llama().ggml_backend_tensor_get(ctypes.byref(tensor), buffer.ctypes.data_as(ctypes.c_void_p), 0, size)
    return np.ndarray((tokens, used), np.int32, buffer, strides=(row, step))
