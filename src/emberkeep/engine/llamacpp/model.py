"""A loaded GGUF model: the owner of one `llama_model` handle."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

from emberkeep.config import resident_ram
from emberkeep.engine.llamacpp import binding
from emberkeep.engine.llamacpp.api import Handle, defaults
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.vocab import LlamaVocab
from emberkeep.errors import ModelBroken, ModelNotFound

log = logging.getLogger("emberkeep.engine")


class LlamaModel:
    """Raises ModelNotFound or ModelBroken. `close` frees the handle; contexts must be closed before."""

    def __init__(self, path: Path, *, gpu_layers: int = 0) -> None:
        binding.start()
        binding.take_errors()
        binding.take_buffers()
        self.resident_before = resident_ram() or 0
        """What the process held without it, in bytes."""
        if not path.is_file():
            raise ModelNotFound(f"There is no model file at {path}.")
        if gpu_layers and not llama().llama_supports_gpu_offload():
            log.warning("this build of llama.cpp has no GPU support: gpu_layers = %d changes nothing", gpu_layers)
        params = defaults(llama().llama_model_default_params)
        params.n_gpu_layers = gpu_layers
        self.handle: Handle | None = llama().llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ModelBroken(f"llama.cpp cannot load {path.name}: {binding.take_errors() or 'unknown format'}.")
        self.offloads = gpu_layers > 0 and bool(llama().llama_supports_gpu_offload())
        self.vocab = self._read_vocab()
        self.train_context: int = llama().llama_model_n_ctx_train(self.handle)

    def _read_vocab(self) -> LlamaVocab:
        try:
            pre = self.metadata("tokenizer.ggml.pre") or ""
            return LlamaVocab(llama().llama_model_get_vocab(self.handle), pre)
        except ModelBroken:
            self.close()
            raise

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
