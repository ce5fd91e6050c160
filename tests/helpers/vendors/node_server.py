"""Servers of whole nodes, as they are on the wire: vLLM, SGLang and TensorRT-LLM, with prefix caches."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream
from helpers.vendors.openai_server import DONE, event

CONTEXT = 32_768
_CARDS: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"owned_by": "vllm", "root": "big", "parent": None, "max_model_len": CONTEXT, "permission": []},
    "sglang": {"owned_by": "sglang", "root": "big", "max_model_len": CONTEXT},
    "trtllm": {"owned_by": "tensorrt_llm"},
}
_THOUGHTS = {"vllm": "reasoning", "sglang": "reasoning_content", "trtllm": "reasoning_content"}
"""What each calls them."""


class NodeServer(LoopbackServer):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.answered = 0
        self._seen: list[str] = []

    def reply(self, asked: Asked) -> Reply | Stream:
        if asked.path == "/v1/models":
            card = {"id": "big", "object": "model", "created": 1, **_CARDS[self.kind]}
            return Reply({"object": "list", "data": [card]})
        if asked.path != "/v1/chat/completions":
            return Reply({"detail": "Not Found"}, 404)
        self.answered += 1
        return self._answer(asked.body["messages"])

    def _answer(self, messages: Sequence[Mapping[str, Any]]) -> Stream:
        text = "".join(f"{message['role']}: {_text(message['content'])}\n" for message in messages)
        cached = max((_shared(text, seen) for seen in self._seen), default=0)
        self._seen.append(text)
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {_THOUGHTS[self.kind]: "Hm."},
            *({"content": piece} for piece in ("A ", "ship.")),
        ]
        return Stream([*map(self._chunk, deltas), self._chunk({}, "stop"), self._usage(len(text), cached), DONE])

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> str:
        choice: dict[str, Any] = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
        if self.kind == "vllm":
            choice |= {"stop_reason": None, "token_ids": None}
        if self.kind == "sglang":
            choice |= {"matched_stop": 2 if finish else None}
        return event({**_base(), "choices": [choice]})

    def _usage(self, prompt: int, cached: int) -> str:
        usage = {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        return event(
            {**_base(), "choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}
        )


@contextmanager
def running(servers: Sequence[NodeServer]) -> Iterator[None]:
    """On a thread of their own, for clients in other processes."""
    are_ready, are_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with AsyncExitStack() as until_the_end:
            for server in servers:
                await until_the_end.enter_async_context(server)
            are_ready.set()
            await asyncio.to_thread(are_over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert are_ready.wait(10)
        yield
    finally:
        are_over.set()
        thread.join()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _shared(one: str, other: str) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _base() -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "big"}
