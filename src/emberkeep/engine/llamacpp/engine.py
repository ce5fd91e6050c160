"""The llama.cpp engine: one context over one model, with a unified KV cache and flash attention."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np

from emberkeep.engine.base import Capabilities, KvUnit, Logits, Outcome, Payload, Rows
from emberkeep.engine.llamacpp import binding, cores
from emberkeep.engine.llamacpp.blob import Shape, check_blob, in_order, read_shape
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.rows import BatchBuffer
from emberkeep.errors import EngineError

_F16 = 1
_FLASH_ON = 1
_SCRATCH = 0
"""llama.cpp's sequence that exports and imports go through; the scheduler's sequence n is its n + 1."""


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
    rope_switches: bool = True
    """Whether the model has two sets of RoPE factors, and the number of cells decides which one is used."""


class LlamaEngine:
    """Owns `model` and its context; `close` frees both. See `Engine` for the contracts."""

    def __init__(self, model: LlamaModel, settings: LlamaSettings, weights_digest: str) -> None:
        self._model = model
        self.vocab = model.vocab
        self._context = _open_context(model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = BatchBuffer(settings.batch)
        self._last_rows: list[int] = []
        self._shape = None if model.is_recurrent else self._learn_shape()
        self.capabilities = Capabilities(
            kv_unit=KvUnit.RANGE if self._shape else KvUnit.SNAPSHOT,
            can_shift=bool(llama_cpp.llama_memory_can_shift(self._memory)),
            max_sequences=settings.sequences,
            cells=settings.cells,
            context=min(settings.context, settings.cells),
            batch=settings.batch,
            kv_bytes_per_token=self._shape.row_bytes if self._shape else 0,
        )
        cells = llama_cpp.llama_n_ctx_seq(self._context)
        has_long_rope = settings.rope_switches and cells > _original_context(model)
        self.fingerprint = _fingerprint(model, weights_digest, has_long_rope, self._shape)

    # ── evaluation ──

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        llama_batch, self._last_rows = self._batch.fill(batch)
        code = llama_cpp.llama_decode(self._context, llama_batch)
        if code == 0:
            return Outcome.DONE
        if code == 1:
            binding.take_errors()
            return Outcome.NO_ROOM
        raise EngineError(f"llama.cpp could not evaluate a batch: {binding.take_errors() or f'code {code}'}.")

    def logits(self, index: int) -> Logits:
        pointer = llama_cpp.llama_get_logits_ith(self._context, self._last_rows[index])
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise EngineError("llama.cpp has no logits for that row.")
        array = (ctypes.c_float * self.vocab.size).from_address(address)
        return np.frombuffer(memoryview(array), np.float32)

    # ── state ──

    def export_kv(self, sequence: int, start: int, end: int) -> Payload:
        llama_cpp.llama_memory_seq_cp(self._memory, sequence + 1, _SCRATCH, start, end)
        try:
            size = llama_cpp.llama_state_seq_get_size(self._context, _SCRATCH)
            buffer = np.empty(size, np.uint8)
            pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            written = llama_cpp.llama_state_seq_get_data(self._context, pointer, size, _SCRATCH)
        finally:
            llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        if written != size or (self._shape and size != self._shape.blob_bytes(end - start)):
            raise EngineError(f"llama.cpp exported {written} bytes for the positions {start} to {end}.")
        return in_order(memoryview(buffer), self._shape) if self._shape else memoryview(buffer)

    def import_kv(self, sequence: int, start: int, end: int, payload: Payload, payload_start: int) -> Outcome:
        if self._shape is None:
            raise EngineError("This model's state cannot be imported by token range.")
        if not payload_start <= start < end <= payload_start + check_blob(payload, self._shape, payload_start):
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        if llama_cpp.llama_memory_seq_pos_max(self._memory, sequence + 1) != start - 1:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        data = np.frombuffer(payload, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = llama_cpp.llama_state_seq_set_data(self._context, pointer, len(data), _SCRATCH)
        if read == 0:
            llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            return Outcome.NO_ROOM
        llama_cpp.llama_memory_seq_cp(self._memory, _SCRATCH, sequence + 1, start, end)
        llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return Outcome.DONE

    def copy_kv(self, source: int, target: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source + 1, target + 1, 0, end)

    def trim(self, sequence: int, start: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence + 1, start, -1):
            raise EngineError(f"This model's state cannot be cut back to {start} tokens.")

    def shift(self, sequence: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence + 1, start, end)
        llama_cpp.llama_memory_seq_add(self._memory, sequence + 1, end, -1, start - end)

    def close(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
        self._model.close()

    def _learn_shape(self) -> Shape | None:
        """Evaluate two tokens once and read the layout off what llama.cpp exports for them.

        None for a layout that cannot be taken apart by token (a second cache for sliding-window layers).
        """
        probe = self.vocab.bos if self.vocab.bos is not None else 0
        self.evaluate([Rows(_SCRATCH - 1, 0, np.full(2, probe, np.int32), want_logits=False)])
        size = llama_cpp.llama_state_seq_get_size(self._context, _SCRATCH)
        buffer = np.empty(size, np.uint8)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        llama_cpp.llama_state_seq_get_data(self._context, pointer, size, _SCRATCH)
        # A step with logits touches what the first real one would otherwise have to wait for.
        self.evaluate([Rows(_SCRATCH - 1, 2, np.full(1, probe, np.int32), want_logits=True)])
        llama_cpp.llama_memory_clear(self._memory, True)
        try:
            return read_shape(memoryview(buffer))
        except (EngineError, struct.error):
            return None


def _open_context(model: LlamaModel, settings: LlamaSettings) -> llama_cpp.llama_context_p:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = settings.cells
    params.n_batch = params.n_ubatch = settings.batch
    params.n_seq_max = settings.sequences + 1
    params.n_outputs_max = settings.sequences + 1
    params.n_threads = params.n_threads_batch = settings.threads or cores.available()
    params.flash_attn_type = _FLASH_ON
    params.type_k = params.type_v = _F16
    params.kv_unified = True
    # The full-size window makes sliding-window layers range-addressable like the others.
    params.swa_full = True
    params.no_perf = True
    binding.take_errors()
    context = llama_cpp.llama_init_from_model(model.handle, params)
    if not context:
        raise EngineError(
            f"llama.cpp could not make room for {settings.cells} tokens of context, "
            f"{binding.take_errors() or 'out of memory'}: try a smaller --ctx or --parallel."
        )
    return context


def _fingerprint(model: LlamaModel, weights_digest: str, has_long_rope: bool, shape: Shape | None) -> bytes:
    """Everything that shapes the bytes: weights, RoPE, KV types and layout, engine and its build."""
    parts = [
        "llama.cpp",
        binding.version(),
        platform.machine(),
        weights_digest,
        model.metadata("general.architecture"),
        llama_cpp.llama_model_rope_type(model.handle),
        llama_cpp.llama_model_rope_freq_scale_train(model.handle),
        has_long_rope,
        "flash, unified, full window",
        shape,
    ]
    return hashlib.sha256("\0".join(repr(part) for part in parts).encode()).digest()


def _original_context(model: LlamaModel) -> int:
    given = model.metadata(f"{model.metadata('general.architecture')}.rope.scaling.original_context_length")
    return int(given) if given else model.train_context
