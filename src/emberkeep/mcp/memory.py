"""Memory as things to read: `memory://facts` and the like."""

from __future__ import annotations

from dataclasses import asdict
from urllib.parse import quote, unquote

from emberkeep.errors import NoSuchEntry
from emberkeep.memory.memory import Memory
from emberkeep.memory.records import message_json
from emberkeep.types import Json, SavedConversation

_CONVERSATIONS = "memory://conversations"

TEXTS = {
    "memory://facts": "Everything that was told to be remembered.",
    _CONVERSATIONS: "The latest saved conversations, each with the URI of its messages.",
    "memory://stats": "How much is remembered.",
}
TEMPLATE = (f"{_CONVERSATIONS}/{{id}}", "One saved conversation with its messages.")


def read(memory: Memory, owner: str, uri: str) -> Json:
    """Blocks. Raises NoSuchEntry, MemoryFailed."""
    match uri:
        case "memory://facts":
            return [asdict(fact) for fact in memory.facts(owner)]
        case "memory://stats":
            return memory.stats(owner)
        case "memory://conversations":
            return [_head(conversation) for conversation in memory.conversations(owner)]
    place, _, name = uri.rpartition("/")
    found = memory.conversation(owner, unquote(name)) if place == _CONVERSATIONS else None
    if found is None:
        raise NoSuchEntry(f"There is no resource {uri}: {', '.join(TEXTS)} are there.")
    return {**_head(found), "messages": [message_json(message) for message in found.messages]}


def _head(conversation: SavedConversation) -> dict[str, Json]:
    told = {name: value for name, value in asdict(conversation).items() if name != "messages"}
    return {"uri": f"{_CONVERSATIONS}/{quote(conversation.id, safe='')}", **told}
