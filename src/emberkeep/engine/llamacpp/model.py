"""A loaded GGUF model: the owner of one `llama_model` handle."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emberkeep.config import resident_ram
from emberkeep.engine.llamacpp import binding
from emberkeep.engine.llamacpp.api import Handle, defaults
from emberkeep.engine.llamacpp.placement import ON_CPU, Placement, PlacementParams, gpus
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.vocab import LlamaVocab
from emberkeep.errors import EngineError, ModelBroken, ModelNotFound


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """A LoRA adapter, whose header was checked against the model's: llama.cpp trusts types and some shapes."""

    digest: str
    scale: float
    path: Path


class LlamaModel:
    """Raises ModelNotFound, ModelBroken or EngineError. `close` frees the handle; contexts must be closed before.

    `adapters` apply to every context of it, in an order of their own: what they compute together depends on it.
    `repacks`: weights are copied into the layout that the CPU's fastest kernels want.
    """

    def __init__(
        self,
        path: Path,
        *,
        placement: Placement = ON_CPU,
        adapters: Sequence[Adapter] = (),
        repacks: bool = True,
    ) -> None:
        binding.start()
        binding.take_errors()
        binding.take_buffers()
        self.resident_before = resident_ram() or 0
        """What the process held without it, in bytes."""
        if not path.is_file():
            raise ModelNotFound(f"There is no model file at {path}.")
        found = gpus()
        params = defaults(llama().llama_model_default_params)
        placed = PlacementParams(placement, found)
        placed.put_into(params)
        params.use_extra_bufts = repacks
        self.handle: Handle | None = llama().llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            way_out = "; try fewer --gpu-layers" if found and placement.gpu_layers else ""
            reason = binding.take_errors() or "unknown format"
            raise ModelBroken(f"llama.cpp cannot load {path.name}: {reason}{way_out}.")
        self.offloads = bool(found and placement.gpu_layers)
        self.placement = placement.facts(found)
        """What is computed where, for fingerprints."""
        self.adapters = sorted(adapters)
        self._loaded_adapters = [self._load_adapter(adapter.path) for adapter in self.adapters]
        self.vocab = self._read_vocab()
        self.train_context: int = llama().llama_model_n_ctx_train(self.handle)

    def _read_vocab(self) -> LlamaVocab:
        try:
            pre = self.metadata("tokenizer.ggml.pre") or ""
            return LlamaVocab(llama().llama_model_get_vocab(self.handle), pre)
        except ModelBroken:
            self.close()
            raise

    def _load_adapter(self, path: Path) -> Handle:
        binding.take_errors()
        loaded: Handle | None = llama().llama_adapter_lora_init(self.handle, str(path).encode())
        if not loaded:
            reason = binding.take_errors() or "unknown format"
            self.close()
            raise EngineError(f"llama.cpp cannot use the adapter {path.name}, {reason}: leave --lora out.")
        return loaded

    def adapt(self, context: Handle) -> None:
        """Apply all adapters to a new context."""
        count = len(self._loaded_adapters)
        if count:
            scales = (adapter.scale for adapter in self.adapters)
            llama().llama_set_adapters_lora(
                context,
                (ctypes.c_void_p * count)(*self._loaded_adapters),
                count,
                (ctypes.c_float * count)(*scales),
            )

    @property
    def chat_template(self) -> str | None:
        source = llama().llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(1 << 12)
        length = llama().llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def close(self) -> None:
        if self.handle:
            llama().llama_model_free(self.handle)
            self.handle = None
