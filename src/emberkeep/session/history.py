"""The messages of a conversation, and a name for every place in it.

Clients send the whole history with every request and rarely say which conversation it is. What a conversation has
said so far names it: the names form a chain, so that a history that was edited has new names from there on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberkeep.types import Message

_SYSTEM = ("system", "developer")
_NAME_CHARS = 16


@dataclass(frozen=True, slots=True)
class History:
    messages: tuple[Message, ...]
    spoken: tuple[int, ...]
    """Indices of the messages that are not the system's: those may change with the time of day."""
    keys: tuple[bytes, ...]
    """One for each of them: everything that was said up to it."""
    conversation: str

    @property
    def last_user(self) -> int | None:
        """Which of the spoken messages is the user's latest."""
        users = [i for i, index in enumerate(self.spoken) if self.messages[index].role == "user"]
        return users[-1] if users else None


def read_history(messages: Sequence[Message], conversation_id: str | None) -> History:
    """`conversation_id`: as the client calls it; otherwise its first message and what follows that name it, since
    many conversations begin with the same greeting."""
    spoken = tuple(i for i, message in enumerate(messages) if message.role not in _SYSTEM)
    keys = tuple(_chain((messages[i] for i in spoken), conversation_id or ""))
    name = conversation_id or (keys[:2][-1].hex()[:_NAME_CHARS] if keys else "")
    return History(tuple(messages), spoken, keys, name)


def _chain(messages: Iterator[Message], seed: str) -> Iterator[bytes]:
    key = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for message in messages:
        key = hashlib.blake2b(_spelled(message), digest_size=16, key=key).digest()
        yield key


def _spelled(message: Message) -> bytes:
    """Every field that clients send back; each with its length, so that no two messages look alike."""
    fields = [message.role, message.content, message.tool_call_id or "", message.name or ""]
    fields += [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
    fields += [image.url for image in message.images]
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join(len(field).to_bytes(8, "little") + field for field in encoded)
