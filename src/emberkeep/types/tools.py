"""What happens when a model calls a tool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from emberkeep.types.asking import Message, ToolCall


class Decision(StrEnum):
    """What a person says to a call that may do harm."""

    ONCE = "once"
    NO = "no"  # not this one
    ALWAYS = "always"  # of this tool, for this session
    NEVER = "never"  # neither


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a tool runs."""

    owner: str = ""
    """The user's namespace: what is remembered belongs to it."""
    depth: int = 0
    """How many models stand between the user and this call."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to. A call that failed has a result too: the model reads why."""

    call: ToolCall
    text: str
    failed: bool = False
    ms: float = 0.0
    remark: str = ""
    """For the person who watches: whose answer it is, how many tokens it took."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallEnded:
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PermissionAsked:
    """The call waits until somebody has decided."""

    call: ToolCall
    group: str


@dataclass(frozen=True, slots=True)
class Exchanged:
    """From now on the conversation has these: what the model said and called, and the results."""

    messages: tuple[Message, ...]
