"""What replicas answer the gateway with."""

from __future__ import annotations

from emberkeep.cluster.asgi import Message
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Messages of an answer, and the replica that gives it."""

    replica: str
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that was waited for."""

    replica: str
    """Its name, which people and metrics know it by; empty where it is the answer of several."""
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
