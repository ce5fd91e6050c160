"""Models that run somewhere else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """One of them, as its user has named it. Keys are never part of it: only the variable that holds one."""

    name: str
    backend: str
    """What it is spoken to with: `openai`, `anthropic`, ... or the name of an entry point."""
    model: str = ""
    """What it is called there; empty takes the first that is served."""
    base_url: str | None = None
    """None: the vendor's own."""
    api_key_env: str | None = None
    """The variable that holds the key; None: the vendor's usual one."""
    max_tokens: int | None = None
    """Longest answer, unless a request says."""
    ctx: int | None = None
    """Longest conversation in tokens; None: as the service says, or the usual of such services."""
    description: str = ""
    """What it is good at, for the models that may ask it."""


DEPTH_HEADER = "X-Emberkeep-Depth"
"""How many models have asked each other already; one Emberkeep tells it another."""

HOPS_HEADER = "X-Emberkeep-Hops"
"""How many Emberkeeps have passed a request on."""
