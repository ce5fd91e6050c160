"""GGUF models through the low-level API of llama-cpp-python. The only package that sees ctypes."""

from emberkeep.engine.llamacpp.binding import system_info
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.cores import one_core_each
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel

__all__ = ["LlamaEngine", "LlamaModel", "LlamaSettings", "one_core_each", "system_info"]
