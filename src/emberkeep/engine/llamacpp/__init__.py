"""GGUF models through llama.cpp's C API. The only package that sees ctypes."""

from emberkeep.engine.llamacpp.context import LlamaSettings, name_workers, one_core_each
from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine, LlamaEmbeddingSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.facts import facts_about
from emberkeep.engine.llamacpp.model import (
    ON_CPU,
    Adapter,
    Gpu,
    LayerBytes,
    LlamaModel,
    ModelBytes,
    Placement,
    gpus,
    plan_placement,
    seen_devices,
    share_layers,
)
from emberkeep.engine.llamacpp.shared_library import is_installed, system_info, version
from emberkeep.engine.llamacpp.trial import (
    choose_known_library,
    choose_library,
    find_failures,
    prove_embedding,
    prove_model,
    try_together,
)
from emberkeep.engine.llamacpp.tuning import Subject, tune

__all__ = [
    "ON_CPU",
    "Adapter",
    "Gpu",
    "LayerBytes",
    "LlamaEmbeddingEngine",
    "LlamaEmbeddingSettings",
    "LlamaEngine",
    "LlamaModel",
    "LlamaSettings",
    "ModelBytes",
    "Placement",
    "Subject",
    "choose_known_library",
    "choose_library",
    "facts_about",
    "find_failures",
    "gpus",
    "is_installed",
    "name_workers",
    "one_core_each",
    "plan_placement",
    "prove_embedding",
    "prove_model",
    "seen_devices",
    "share_layers",
    "system_info",
    "try_together",
    "tune",
    "version",
]
