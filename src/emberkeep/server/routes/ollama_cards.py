"""Models as Ollama describes them. What is not known of one that runs elsewhere stays empty."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from emberkeep.api.ollama.answer import timestamp
from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.embedding_backend import EmbeddingBackend
from emberkeep.errors import ModelError
from emberkeep.models.embedding import embedding_profile
from emberkeep.models.gguf import SkippedArray, Value, read_header
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.models.profile import ModelProfile, profile_of
from emberkeep.types.models import ModelStatus
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_FOREVER_S = 100 * 365 * 86400
"""Until a model expires that is never unloaded."""
_LONGEST_LIST = 64
"""The most values of one key that are shown."""
_FILLS_IN = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
"""Keys of models that were trained to fill in the middle."""
_THINKS = re.compile(r"enable_thinking|<think>|reasoning_content|reasoning_effort|thinking")


def tag_json(card: ModelCard, library: ModelLibrary) -> dict[str, Json]:
    """Blocks."""
    return _Known.of(card, library).tag()


def loaded_json(card: ModelCard, library: ModelLibrary, status: ModelStatus) -> dict[str, Json]:
    """A model in memory. Blocks."""
    known = _Known.of(card, library)
    size = known.size
    left_s = _FOREVER_S if status.expires_s is None else status.expires_s
    layers, on_gpu = card_number(card, "layers"), card_number(card, "gpu_layers")
    return {
        **known.tag(),
        "expires_at": timestamp(time.time_ns() + int(left_s * 1e9)),
        "size_vram": size * min(on_gpu, layers) // layers if layers else 0,
        "context_length": card.context,
    }


def show_json(backend: Backend, library: ModelLibrary) -> dict[str, Json]:
    """Blocks."""
    card = backend.card
    known = _Known.of(card, library)
    template = known.profile.chat_template if known.profile else None
    source = known.installed.record.source if known.installed else card.id
    parameters = f"num_ctx {card.context}" if card.context else ""
    info = known.info()
    return {
        "modelfile": f"FROM {source}\n" + (f"PARAMETER {parameters}\n" if parameters else ""),
        "parameters": parameters,
        "template": template or "",
        "details": known.details(),
        "model_info": info,
        "capabilities": _capabilities(backend, known, template or "", info),
        "modified_at": known.modified_at,
    }


def _capabilities(backend: Backend, known: _Known, template: str, info: Mapping[str, Json]) -> list[str]:
    is_embedding = isinstance(backend, EmbeddingBackend)
    if known.installed is not None:
        is_embedding = embedding_profile(known.installed.path) is not None
    can = {
        "completion": not is_embedding,
        "tools": not is_embedding and backend.card.calls_tools,
        "insert": any(key in info for key in _FILLS_IN),
        "thinking": _THINKS.search(template) is not None,
        "embedding": is_embedding or backend.embedder is not None,
    }
    return [name for name, is_so in can.items() if is_so]


@dataclass(frozen=True, slots=True)
class _Known:
    """A model's card, and what is known of its file."""

    card: ModelCard
    installed: InstalledModel | None
    profile: ModelProfile | None

    @classmethod
    def of(cls, card: ModelCard, library: ModelLibrary) -> _Known:
        try:
            installed = library.get(card.id)
            return cls(card, installed, _profile(installed.path, installed.path.stat().st_mtime_ns))
        except (ModelError, OSError):
            return cls(card, None, None)

    @property
    def size(self) -> int:
        return self.installed.record.size if self.installed else 0

    @property
    def modified_at(self) -> str:
        seconds = self.installed.record.pulled_at if self.installed else self.card.created
        return timestamp(seconds * 10**9)

    def tag(self) -> dict[str, Json]:
        name = self.card.id if ":" in self.card.id else f"{self.card.id}:latest"
        digest = self._detail("weights_sha256") or (self.installed.record.sha256 if self.installed else None)
        return {
            "name": name,
            "model": name,
            "modified_at": self.modified_at,
            "size": self.size,
            "digest": digest or hashlib.sha256(name.encode()).hexdigest(),  # clients show its first 12 characters
            "details": self.details(),
        }

    def details(self) -> dict[str, Json]:
        family = self.profile.architecture if self.profile else self._detail("architecture") or ""
        parameters = self.profile.parameters if self.profile else card_number(self.card, "parameters")
        is_folder = self.installed is not None and self.installed.is_folder
        return {
            "parent_model": "",
            "format": "" if self.card.remote else "safetensors" if is_folder else "gguf",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _short_count(parameters),
            "quantization_level": self.profile.quantisation
            if self.profile
            else self._detail("quantisation") or "",
        }

    def info(self) -> dict[str, Json]:
        """The metadata of the file, without its vocabulary."""
        if self.installed is None or self.profile is None:
            return self._card_info()
        counted = {"general.parameter_count": self.profile.parameters}
        if self.installed.is_folder:
            return {**_folder_info(self.profile), **counted}
        metadata = read_header(self.installed.path).metadata
        shown = {key: _shown(value) for key, value in metadata.items() if key != "tokenizer.chat_template"}
        return {**shown, **counted}

    def _card_info(self) -> dict[str, Json]:
        family = self._detail("architecture") or "unknown"
        context = card_number(self.card, "trained_context") or self.card.context
        return {"general.architecture": family, f"{family}.context_length": context}

    def _detail(self, name: str) -> Json:
        return (self.card.details or {}).get(name)


def card_number(card: ModelCard, name: str) -> int:
    """0 for what the card does not tell."""
    value = (card.details or {}).get(name)
    return value if isinstance(value, int) else 0


@lru_cache(maxsize=256)
def _profile(path: Path, changed: int) -> ModelProfile:
    """`changed`: when the file was, so that a new one is read."""
    return profile_of(path)


def _folder_info(profile: ModelProfile) -> Mapping[str, Json]:
    family = profile.architecture
    return {
        "general.architecture": family,
        f"{family}.context_length": profile.context_length,
        f"{family}.block_count": profile.layers,
        f"{family}.attention.key_length": profile.key_length,
        f"{family}.attention.value_length": profile.value_length,
        f"{family}.vocab_size": profile.vocab_size,
    }


def _shown(value: Value) -> Json:
    """None for a list that is too long."""
    if isinstance(value, SkippedArray) or (isinstance(value, tuple) and len(value) > _LONGEST_LIST):
        return None
    return list(value) if isinstance(value, tuple) else value


def _short_count(parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.4g}{letter}"
    return str(parameters) if parameters else ""
