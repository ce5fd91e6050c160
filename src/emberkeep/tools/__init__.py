"""Tools: what a model can do besides talking."""

from __future__ import annotations

from emberkeep.tools.function import as_tool, tool

__all__ = ["as_tool", "tool"]
