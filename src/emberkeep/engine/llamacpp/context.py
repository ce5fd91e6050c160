"""Opening a llama.cpp context: one unified KV cache for all sequences, and flash attention."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from dataclasses import dataclass
from typing import Any

from emberkeep.engine.llamacpp import binding, cores
from emberkeep.engine.llamacpp.api import FLASH_ATTENTION_ON, TYPES, Handle, defaults
from emberkeep.engine.llamacpp.layout import Layout
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama, loaded_digest, loader_variables
from emberkeep.errors import EngineError


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
    rope_switches: bool = True
    """Whether the model has two sets of RoPE factors, and the number of cells decides which one is used."""


def open_context(model: LlamaModel, settings: LlamaSettings, on_node: Any) -> Handle:
    params = defaults(llama().llama_context_default_params)
    params.n_ctx = settings.cells
    params.n_batch = params.n_ubatch = settings.batch
    params.n_seq_max = settings.sequences + 1
    params.n_outputs_max = settings.sequences + 1
    params.n_threads = params.n_threads_batch = settings.threads or cores.available()
    params.flash_attn_type = FLASH_ATTENTION_ON
    params.type_k = params.type_v = TYPES[settings.kv_type]
    params.kv_unified = True
    # Layers with a window keep what they see, and not the whole context.
    params.swa_full = False
    params.no_perf = True
    if on_node is not None:
        params.cb_eval = ctypes.cast(on_node, ctypes.c_void_p)
    binding.take_errors()
    context: Handle | None = llama().llama_init_from_model(model.handle, params)
    if not context:
        raise EngineError(_cannot_open(settings, binding.take_errors() or "out of memory"))
    model.adapt(context)
    return context


def _cannot_open(settings: LlamaSettings, reason: str) -> str:
    if "block size" in reason:
        return f"This model's state cannot be held as {settings.kv_type} ({reason}): use --kv-type f16."
    return (
        f"llama.cpp could not make room for {settings.cells} tokens of context, {reason}: "
        "try a smaller --ctx or --parallel."
    )


def fingerprint(
    model: LlamaModel,
    weights_digest: str,
    settings: LlamaSettings,
    context: Handle,
    layout: Layout | None,
) -> bytes:
    """Everything that shapes the bytes: weights, RoPE, KV types and layout, engine and its build."""
    cells = llama().llama_n_ctx_seq(context)
    parts = [
        "llama.cpp",
        binding.version(),
        loaded_digest(),
        # Which of its kernels a library chose for this CPU, and what they were compiled with.
        binding.system_info(),
        # Attention of a few rows is split among the threads, and adds up in another order with more of them.
        settings.threads or cores.available(),
        platform.machine(),
        weights_digest,
        model.metadata("general.architecture"),
        llama().llama_model_rope_type(model.handle),
        llama().llama_model_rope_freq_scale_train(model.handle),
        settings.rope_switches and cells > _original_context(model),
        "flash, unified, windows cut off",
        layout,
        settings.kv_type,
        # Its own switches: with one of them it does not rotate what it quantises, and writes nowhere that it did.
        [said for said in loader_variables() if said.startswith(("GGML_", "LLAMA_"))],
        [(adapter.digest, adapter.scale) for adapter in model.adapters],
        # llama.cpp adds up more than two in the order of their addresses, which are others at every start.
        os.urandom(16) if len(model.adapters) > 2 else None,
        model.placement,
    ]
    return hashlib.sha256("\0".join(repr(part) for part in parts).encode()).digest()


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
