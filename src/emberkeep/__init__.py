"""Emberkeep: a local LLM runtime that never evaluates a token twice.

from emberkeep import Emberkeep

with Emberkeep.load() as llm:
    print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it, without `typing`
if TYPE_CHECKING:
    from typing import Any

    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.library.flash_attention import (
        flash_attention_available,
        install_flash_attention,
        uninstall_flash_attention,
    )
    from emberkeep.tools import tool

__version__ = "0.1.0"
__all__ = [
    "Emberkeep",
    "__version__",
    "flash_attention_available",
    "install_flash_attention",
    "tool",
    "uninstall_flash_attention",
]

_ATTENTION = ("flash_attention_available", "install_flash_attention", "uninstall_flash_attention")


def __getattr__(name: str) -> Any:
    # Lazy, so that `import emberkeep` (and `emberkeep --help`) loads neither engine nor database.
    if name == "Emberkeep":
        from emberkeep.library.emberkeep import Emberkeep

        return Emberkeep
    if name in _ATTENTION:
        from emberkeep.library import flash_attention

        return getattr(flash_attention, name)
    if name == "tool":
        from emberkeep.tools import tool

        return tool
    raise AttributeError(f"module 'emberkeep' has no attribute {name!r}")
