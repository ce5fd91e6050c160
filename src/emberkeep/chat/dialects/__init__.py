"""How models write tool calls and reasoning: markers as data, and a reader for each way of writing."""

from __future__ import annotations

from emberkeep.chat.dialects.calls import CallPiece, Calls, NoCall
from emberkeep.chat.dialects.markers import Markers
from emberkeep.chat.dialects.reasoning import REASONING, Reasoning, open_reasoning
from emberkeep.chat.dialects.table import (
    BARE,
    MARKED_DIALECTS,
    STRAY_ENDS,
    TAGGED,
    Dialect,
    framing,
    hidden_tokens,
)
from emberkeep.chat.dialects.tape import Tape

__all__ = [
    "BARE",
    "MARKED_DIALECTS",
    "REASONING",
    "STRAY_ENDS",
    "TAGGED",
    "CallPiece",
    "Calls",
    "Dialect",
    "Markers",
    "NoCall",
    "Reasoning",
    "Tape",
    "framing",
    "hidden_tokens",
    "open_reasoning",
]
