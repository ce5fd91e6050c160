"""Ollama's API as it is on the wire: one JSON object per line, the last with the counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream

MODEL = "qwen3:latest"


class OllamaServer(LoopbackServer):
    def __init__(
        self,
        *replies: Reply | Stream,
        key: str | None = None,
        models: Sequence[str] = (MODEL,),
        shown: Mapping[str, Any] | None = None,
        loaded: Mapping[str, int] | None = None,
    ) -> None:
        """Without replies it says hello. `loaded`: models in memory with their contexts."""
        super().__init__()
        self._replies = list(replies)
        self._key = key
        self._models = models
        self._shown = shown or {"model_info": {"qwen3.context_length": 40960}}
        self._loaded = loaded or {}

    def reply(self, asked: Asked) -> Reply | Stream:
        if asked.headers.get("authorization") != (self._key and f"Bearer {self._key}"):
            return failed(401, f"unauthorized: {asked.headers.get('authorization')}")
        match asked.path:
            case "/api/tags":
                return Reply({"models": [{"model": name, "name": name} for name in self._models]})
            case "/api/ps":
                loaded = [{"model": name, "context_length": size} for name, size in self._loaded.items()]
                return Reply({"models": loaded})
            case "/api/show":
                return Reply(self._shown)
            case "/api/chat":
                return self._replies.pop(0) if self._replies else said("Hello!")
        return failed(404, "not found")


def failed(status: int, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply({"error": message}, status, headers or {})


def said(*pieces: str) -> Stream:
    return answer(*({"content": piece} for piece in pieces))


def answer(*messages: Mapping[str, Any], reason: str = "stop") -> Stream:
    return Stream([*map(part, messages), ended(reason)])


def part(message: Mapping[str, Any]) -> str:
    return line({**_base(), "message": {"role": "assistant", "content": "", **message}, "done": False})


def ended(reason: str = "stop") -> str:
    counts = {"total_duration": 5, "prompt_eval_count": 26, "prompt_eval_duration": 2, "eval_count": 9}
    last = {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": reason}
    return line({**_base(), **last, **counts})


def line(data: Any) -> str:
    return f"{json.dumps(data)}\n"


def _base() -> dict[str, Any]:
    return {"model": MODEL, "created_at": "2026-01-01T00:00:00.000000Z"}
