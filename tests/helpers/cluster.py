"""For clusters: models of replicas as slow as a test wants, a trace in its own time, servers of whole nodes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.trace_file import Visit
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from helpers.scripted_backend import fake_backend
from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream
from helpers.vendors.openai_server import DONE, event


def slow_models(seconds_per_step: float, seconds_per_token: float = 0.0) -> Callable[[Config], Models]:
    def pause(batch: Sequence[Rows]) -> None:
        time.sleep(seconds_per_step + seconds_per_token * sum(len(rows.tokens) for rows in batch))

    def open_slow(config: Config) -> Models:
        engine = FakeEngine(sequences=2 * config.parallel, cells=16_384, on_evaluate=pause)
        return Models(fake_backend(config, engine))

    return open_slow


BLOCK_IDS = 128
"""A block of a trace stands for 512 tokens; here it is one chunk of a store, so that shares are the same."""


@dataclass(slots=True)
class Replayed:
    prompt: int = 0
    cached: int = 0
    remote: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def own_share(self) -> float:
        return (self.cached - self.remote) / self.prompt

    @property
    def remote_share(self) -> float:
        return self.remote / self.prompt


def prompt_of(visit: Visit) -> list[int]:
    """Printable ids, the same for the same block."""
    parts = [np.random.default_rng(block).integers(32, 127, BLOCK_IDS) for block in visit.blocks]
    return [int(token) for part in parts for token in part]


def replay(url: str, visits: Sequence[Visit], clients: int = 32) -> Replayed:
    """Each request when its time has come. Blocks until all are answered."""
    replayed, begin = Replayed(), time.monotonic()

    def ask(visit: Visit) -> None:
        time.sleep(max(begin + visit.at - time.monotonic(), 0.0))
        with httpx.Client(timeout=120, verify=False) as http:
            body = {"prompt": prompt_of(visit), "max_tokens": 1, "temperature": 0}
            answer = http.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        with replayed.lock:
            replayed.prompt += told["usage"]["prompt_tokens"]
            replayed.cached += told["usage"]["prompt_tokens_details"]["cached_tokens"]
            replayed.remote += told["emberkeep"]["reused"]["remote"]

    with ThreadPoolExecutor(clients) as threads:
        for done in [threads.submit(ask, visit) for visit in sorted(visits, key=lambda one: one.at)]:
            done.result()
    return replayed


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
