"""GGUF models through llama.cpp's C API. The only package that sees ctypes."""

from emberkeep.engine.llamacpp.context import LlamaSettings, one_core_each
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import (
    ON_CPU,
    Adapter,
    Gpu,
    LayerBytes,
    LlamaModel,
    ModelBytes,
    Placement,
    gpus,
    planned,
    shared_out,
)
from emberkeep.engine.llamacpp.shared_library import is_installed, system_info, version
from emberkeep.engine.llamacpp.trial import choose, failing, prove_model

__all__ = [
    "ON_CPU",
    "Adapter",
    "Gpu",
    "LayerBytes",
    "LlamaEngine",
    "LlamaModel",
    "LlamaSettings",
    "ModelBytes",
    "Placement",
    "choose",
    "failing",
    "gpus",
    "is_installed",
    "one_core_each",
    "planned",
    "prove_model",
    "shared_out",
    "system_info",
    "version",
]
