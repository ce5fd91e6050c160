"""OpenAI's chat completions as they are on the wire, and what servers like it do differently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream

KEY = "sk-proj-canary-5c1e77"
DONE = "data: [DONE]\n\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


class OpenAIServer(LoopbackServer):
    def __init__(
        self,
        *replies: Reply | Stream,
        key: str | None = KEY,
        models: Sequence[Mapping[str, Any]] = ({"id": "gpt-6"},),
    ) -> None:
        """Without replies it says hello."""
        super().__init__()
        self._replies = list(replies)
        self._key = key
        self._models = models

    def reply(self, asked: Asked) -> Reply | Stream:
        given = asked.headers.get("authorization")
        if given != (self._key and f"Bearer {self._key}"):
            return failed(401, "invalid_request_error", f"Incorrect API key provided: {given}", "invalid_api_key")
        if asked.path == "/v1/models":
            cards = [{"object": "model", "created": 1, "owned_by": "example", **one} for one in self._models]
            return Reply({"object": "list", "data": cards})
        if asked.path != "/v1/chat/completions" or not asked.body["stream"]:
            return failed(404, "invalid_request_error", f"Invalid URL ({asked.path})")
        return self._replies.pop(0) if self._replies else said("Hello!")


def failed(
    status: int, kind: str, message: str, code: Any = None, headers: Mapping[str, str] | None = None
) -> Reply:
    return Reply({"error": failure(kind, message, code)}, status, headers or {})


def failure(kind: str, message: str, code: Any = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}


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
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-6"}
