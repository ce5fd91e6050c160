"""How an engine over a Hugging Face model is set up."""

from __future__ import annotations

from dataclasses import dataclass

from emberkeep.types import AttentionTier


@dataclass(frozen=True, slots=True)
class HfSettings:
    context: int
    """Longest sequence."""
    cells: int | None
    """Token cells for all sequences; None: what the device has room for."""
    sequences: int
    batch: int
    """Most tokens per step."""
    attention: AttentionTier | None = None
    """None: the fastest that there is."""
    threads: int | None = None
