"""The Python library: load a model, generate, chat, warm, verify."""

from __future__ import annotations

from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.install import ensure_model
from emberkeep.library.results import Result, VerifyReport, WarmResult
from emberkeep.library.stream import Stream

__all__ = ["Emberkeep", "Result", "Stream", "VerifyReport", "WarmResult", "ensure_model"]
