"""Tools that a server runs by itself, as an operator sees them."""

from __future__ import annotations

from enum import StrEnum

from emberkeep.values import dataclass


class ToolMode(StrEnum):
    RUNS = "runs"  # whenever a model calls it
    ASKS = "asks"  # a person is asked first; where none can be, models do not get it
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HostTool:
    name: str
    group: str
    description: str
    mode: ToolMode
    allowed_by: str
    """A setting that would let it run unasked, if there is one of its own."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """An MCP server whose tools are used here."""

    name: str
    status: str
    reason: str
    """Why it has stopped."""
    about: str
    """The server's own name and version."""
    tools: int
    unapproved: tuple[str, ...]
    """Tools that are new, or have changed since they were approved."""
