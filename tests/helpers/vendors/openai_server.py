"""OpenAI's chat completions as they are on the wire, and what the vendors' servers do differently."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from emberkeep.types.request import Message, Request
from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream

KEY = "sk-proj-canary-5c1e77"
MODEL = "gpt-6"
DONE = "data: [DONE]\n\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
PATHS = {"gemini": "/v1beta/openai"}
_SHARED = {"model", "messages", "stream", "stream_options", "tools", "tool_choice", "response_format", "stop"}

_SHARED |= {"temperature", "top_p"}

KNOWN = {
    "gemini": _SHARED | {"max_tokens", "extra_body"},
    "grok": _SHARED
    | {"max_completion_tokens", "frequency_penalty", "presence_penalty", "seed", "parallel_tool_calls", "user"},
    "openai": _SHARED
    | {"max_completion_tokens", "frequency_penalty", "presence_penalty", "seed", "parallel_tool_calls"}
    | {"logit_bias", "prediction", "prompt_cache_key", "safety_identifier"},
}
"""Fields of servers that refuse all others."""


class OpenAIServer(LoopbackServer):
    def __init__(
        self,
        *replies: Reply | Stream,
        key: str | None = KEY,
        models: Sequence[Mapping[str, Any]] = ({"id": MODEL},),
        kind: str = "compatible",
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """Says hello after its `replies`. `beside`: what other endpoints answer."""
        super().__init__()
        self._replies = list(replies)
        self._key = key
        self._models = models
        self._kind = kind
        self._beside = beside or {}

    def reply(self, asked: Asked) -> Reply | Stream:
        given = asked.headers.get("authorization")
        if given != (self._key and f"Bearer {self._key}"):
            status = 400 if self._kind in ("gemini", "grok") else 401
            words = "API key not valid" if self._kind == "gemini" else "Incorrect API key provided"
            return failed(status, "invalid_request_error", f"{words}: {given}", kind=self._kind)
        if asked.path in self._beside:
            return Reply(self._beside[asked.path])
        path = PATHS.get(self._kind, "/v1")
        if asked.path == f"{path}/models":
            cards = [{"object": "model", "created": 1, "owned_by": "example", **one} for one in self._models]
            return Reply({"object": "list", "data": cards})
        if asked.path != f"{path}/chat/completions" or not asked.body["stream"]:
            return failed(404, "not_found", f"Invalid URL ({asked.path})", kind=self._kind)
        if unknown := asked.body.keys() - KNOWN.get(self._kind, asked.body.keys()):
            return failed(400, "invalid_argument", f"Unknown name {sorted(unknown)}", kind=self._kind)
        return self._replies.pop(0) if self._replies else said("Hello!")


def failed(
    status: int,
    type: str,
    message: str,
    code: Any = None,
    headers: Mapping[str, str] | None = None,
    kind: str = "compatible",
) -> Reply:
    return Reply(failure(type, message, status if kind == "gemini" else code, kind), status, headers or {})


def failure(type: str, message: str, code: Any = None, kind: str = "compatible") -> Any:
    if kind == "grok":
        return {"code": type, "error": message}
    if kind == "gemini":
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"}
        return [{"error": {"code": code, "message": message, "status": type.upper(), "details": [retry]}}]
    return {"error": {"message": message, "type": type, "param": None, "code": code}}


def said(*pieces: str, usage: Mapping[str, Any] = USAGE) -> Stream:
    return answer(*({"content": piece} for piece in pieces), usage=usage)


def answer(
    *deltas: Mapping[str, Any],
    finish: str | None = "stop",
    usage: Mapping[str, Any] | None = USAGE,
    end: str = "whole",
) -> Stream:
    """A whole answer, with its usage in a last chunk without choices."""
    events = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas)]
    if finish is not None:
        events.append(chunk({}, finish))
    if usage is not None:
        events.append(event({**_base(), "choices": [], "usage": dict(usage)}))
    return Stream([*events, DONE], end)


def chunk(delta: Mapping[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
    return event({**_base(), "choices": [choice], "usage": None})


def call(
    index: int | None = 0, id: str | None = None, name: str | None = None, arguments: str = "", **more: Any
) -> Any:
    """A delta with a piece of a tool call."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    piece = {"index": index, "id": id, "type": "function" if id else None, "function": function, **more}
    return {"tool_calls": [{key: value for key, value in piece.items() if value is not None}]}


def event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _base() -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}


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
