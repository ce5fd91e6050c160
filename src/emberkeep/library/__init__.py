"""The Python library: load a model, generate, chat, warm, verify, remember."""

from __future__ import annotations

from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.install import ensure_model
from emberkeep.library.memory import UserMemory
from emberkeep.library.results import Result, WarmResult
from emberkeep.library.stream import Stream
from emberkeep.library.verifying import VerifyReport

__all__ = ["Emberkeep", "Result", "Stream", "UserMemory", "VerifyReport", "WarmResult", "ensure_model"]
