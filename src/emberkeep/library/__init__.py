"""The Python library: load a model, generate, chat, warm, verify, remember."""

from __future__ import annotations

from emberkeep.library.emberkeep import Emberkeep, ensure_model
from emberkeep.library.flash_attention import (
    flash_attention_available,
    install_flash_attention,
    uninstall_flash_attention,
)
from emberkeep.library.results import Choice, Result, Stream, WarmResult
from emberkeep.library.user_memory import UserMemory
from emberkeep.library.verify_report import VerifyReport, VerifySummary

__all__ = [
    "Choice",
    "Emberkeep",
    "Result",
    "Stream",
    "UserMemory",
    "VerifyReport",
    "VerifySummary",
    "WarmResult",
    "ensure_model",
    "flash_attention_available",
    "install_flash_attention",
    "uninstall_flash_attention",
]
