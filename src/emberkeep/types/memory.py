"""What is remembered of conversations."""

from __future__ import annotations

from enum import StrEnum

from emberkeep.types.request import Json, Message
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call with its result."""

    name: str
    arguments: str
    result: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages of a conversation that have left its context together."""

    key: bytes
    """A hash of everything the conversation said up to the end of this turn; unique for an owner."""
    conversation: str
    at: float
    """Unix seconds."""
    user_text: str
    assistant_text: str
    tool_uses: tuple[ToolUse, ...] = ()


class NoteKind(StrEnum):
    EVICTED = "evicted"  # everything up to here that may leave has left
    INSERTED = "inserted"  # something stands here that the client does not know of
    WRITTEN = "written"  # the model wrote this message otherwise than the client sends it back


@dataclass(frozen=True, slots=True)
class Note:
    """What is known about one position of a conversation, so that the next prompt begins as the last one did."""

    key: bytes
    """As a turn's key, up to that position."""
    kind: NoteKind
    data: Json


class MemoryKind(StrEnum):
    TURN = "turn"
    ANSWER = "answer"  # a question and its answer that a user stored


@dataclass(frozen=True, slots=True)
class Recollection:
    """Something found in memory."""

    id: int
    kind: MemoryKind
    score: float
    """0..1, the best first."""
    user_text: str
    assistant_text: str
    tool_uses: tuple[ToolUse, ...]
    at: float
    conversation: str
    passage: str
    """The one that matched, word by word."""
    matches: tuple[tuple[int, int], ...]
    """Where in it the words stand that did: from and to, in characters."""
    key: bytes = b""
    """The turn's."""

    @property
    def highlight(self) -> str:
        """The passage for people, with **marks** around the words."""
        pieces, at = [], 0
        for start, stop in self.matches:
            pieces += [self.passage[at:start], "**", self.passage[start:stop], "**"]
            at = stop
        return "".join([*pieces, self.passage[at:]])


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    at: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    turns: int = 0
    answers: int = 0
    facts: int = 0
    conversations: int = 0
    responses: int = 0
    bytes: int = 0
    """The file has become so much smaller."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer of the Responses API, with what it was asked."""

    id: str
    conversation: str
    """The one it belongs to; that of a chain has the id of its first response."""
    previous: str | None
    """The response that it continues."""
    in_conversation: bool
    """What it continues is the conversation, and its items are there too."""
    data: dict[str, Json]
    """The response itself, with its output."""
    input: list[dict[str, Json]]
    """What it was asked, without what came before."""


@dataclass(frozen=True, slots=True)
class ApiConversation:
    """A list of items that a client has made, and that responses add theirs to."""

    id: str
    created: float
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class SavedConversation:
    id: str
    title: str
    model: str
    created: float
    updated: float
    messages: tuple[Message, ...] = ()
    """Empty in a list of conversations."""
    message_count: int = 0
