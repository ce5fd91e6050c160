"""OpenAI's chat completions as they are on the wire, and what the vendors' servers do differently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
