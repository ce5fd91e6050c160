"""trtllm-serve as it is on the wire: OpenAI's endpoint, and events of the KV cache that are gone once read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from emberkeep.types.request import Message, Request
from helpers.vendors.loopback import Asked, Reply, Stream
from helpers.vendors.openai_server import OpenAIServer, said

BLOCK = 32


class TrtllmServer(OpenAIServer):
    def __init__(
        self, *replies: Reply | Stream, has_events: bool = True, key: str | None = None, model: str = "tiny"
    ) -> None:
        super().__init__(*replies, key=key, models=({"id": model, "owned_by": "tensorrt_llm"},))
        self.happened: list[Any] = [created()]
        self.was_polled = asyncio.Event()
        self._has_events = has_events

    def reply(self, asked: Asked) -> Reply | Stream:
        if asked.path != "/kv_cache_events":
            return super().reply(asked)
        self.was_polled.set()
        if not self._has_events or asked.method != "POST":
            return Reply({"detail": "Not Found"}, 404)
        events, self.happened = self.happened, []
        return Reply([{"event_id": number, **event} for number, event in enumerate(events)])


def used(prompt: int, completion: int, text: str = "Yes.") -> Stream:
    return said(text, usage={"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0})


def created() -> Any:
    return {"data": {"type": "created", "num_blocks_per_cache_level": [100, 0]}}


def stored(parent: int | None, *hashes: int, last: int = BLOCK, **event: Any) -> Any:
    """A chain of blocks, of which the last may hold fewer tokens."""
    sizes = [BLOCK] * (len(hashes) - 1) + [last]
    blocks = [_block(hash, size) for hash, size in zip(hashes, sizes, strict=True)]
    return {"data": {"type": "stored", "parent_hash": parent, "blocks": blocks}, **event}


def removed(*hashes: int, **event: Any) -> Any:
    return {"data": {"type": "removed", "block_hashes": list(hashes)}, **event}


def moved(hash: int) -> Any:
    """To the host's memory: it is still there."""
    diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
    return {"data": {"type": "updated", "block_hash": hash, "cache_level": diff, "priority": None}}


def _block(hash: int, size: int) -> Any:
    tokens = [{"type": "unique_token", "token_id": 7, "token_extra_id": 0}] * size
    return {"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35}


SYSTEM = Message("system", "s" * 100)
USER = Message("user", "u" * 100)
ANSWER = Message("assistant", "a" * 100)


class Told:
    """What has been said to be gone, newest last."""

    def __init__(self) -> None:
        self.calls: list[tuple[Request, list[int]]] = []

    def __call__(self, request: Request, places: Sequence[int]) -> None:
        self.calls.append((request, list(places)))

    @property
    def places(self) -> list[list[int]]:
        return [places for _, places in self.calls]


def conversation(name: str, *messages: Message) -> Request:
    return Request(messages=messages or (SYSTEM, USER), conversation_id=name)
