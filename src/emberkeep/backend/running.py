"""A model that a server on this machine has loaded: a chat asks it over HTTP, and loads nothing a second time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from emberkeep.api.openai_chat import message_json
from emberkeep.api.stored import lookup_from_json
from emberkeep.backend.base import Extras, ModelCard
from emberkeep.errors import EmberkeepError, RequestError
from emberkeep.kv.forgetting import Holders
from emberkeep.memory.memory import Memory
from emberkeep.types.cache import Warmed
from emberkeep.types.events import (
    Completed,
    Event,
    Events,
    Eviction,
    Finished,
    FinishReason,
    Fit,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import Json, Request, Tool

_CONNECT_S = 3.0
_SILENCE_S = 60.0
"""A server says every few seconds that an answer is still to come."""


class RunningModel(Extras):
    """A Backend that carries what a chat in a terminal asks: messages, tools, temperature, length, eviction.

    The server keeps the conversation and its state. Owns `memory`, which is the server's file.
    """

    def __init__(self, card: ModelCard, connection: Mapping[str, Any], memory: Memory | None) -> None:
        """`connection`: arguments of httpx's clients, with the address and the key."""
        self.card = card
        self.memory = memory
        self.holders = Holders()
        self.warmer = self
        self._connection = connection
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(**{**connection, "timeout": timeout})

    @property
    def url(self) -> str:
        return str(self._http.base_url).rstrip("/")

    async def generate(self, request: Request) -> Events:
        reader = _AnswerReader()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=self._body(request)) as response:
                if not response.is_success:
                    raise _refusal(json.loads(await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        for event in reader.read(json.loads(line.removeprefix("data: "))):
                            yield event
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:  # or it speaks in another way
            raise self._gone() from error
        if reader.completed is None:
            raise self._gone()
        yield reader.completed

    def _body(self, request: Request) -> dict[str, Json]:
        body: dict[str, Json] = {
            "model": self.card.id,
            "messages": [message_json(message) for message in request.messages],
            "temperature": request.sampling.temperature,
            "max_tokens": request.max_tokens,
            "evict": request.evict,
            "conversation_id": request.conversation_id,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"tools": [_tool_json(tool) for tool in request.tools]} if request.tools else body

    def _gone(self) -> EmberkeepError:
        return EmberkeepError(
            f"The server at {self.url} broke off: ask again, or load the model in this chat with --own."
        )

    # ── a Warmer ──

    async def warm(self, request: Request) -> Warmed:
        return await asyncio.to_thread(self._warm, request)

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        """In the background. What goes wrong is told by the first answer."""
        for prefix in prefixes:
            threading.Thread(target=self._warm, args=(prefix,), daemon=True).start()

    def _warm(self, prefix: Request) -> Warmed:
        """Blocks."""
        wanted: dict[str, Json] = {
            "model": self.card.id,
            "messages": [message_json(message) for message in prefix.messages],
            "tools": [_tool_json(tool) for tool in prefix.tools],
        }
        try:
            with httpx.Client(**self._connection) as http:
                warmed = http.post("/v1/warm", json={key: value for key, value in wanted.items() if value}).json()
            return Warmed(warmed["tokens"], warmed["cached_tokens"], warmed["seconds"], warmed["entry_id"])
        except (httpx.HTTPError, ValueError, KeyError):
            return Warmed(0, 0, 0.0, "", error=str(self._gone()))

    # ── what there is to know about it ──

    def stats(self) -> dict[str, Json]:
        try:
            with httpx.Client(**self._connection) as http:
                stats: dict[str, Json] = http.get("/v1/stats", params={"model": self.card.id}).json()
                return stats
        except (httpx.HTTPError, ValueError) as error:
            raise self._gone() from error

    def health(self) -> dict[str, Json]:
        return {"backend": f"the server at {self.url}", "model": self.card.id}

    async def close(self) -> None:
        await self._http.aclose()
        if self.memory is not None:
            self.memory.close()


def _refusal(answer: Any) -> EmberkeepError:
    error = answer["error"]
    kind = RequestError if error.get("type") == "invalid_request_error" else EmberkeepError
    return kind(error["message"])


def _tool_json(tool: Tool) -> Json:
    return {"type": "function", "function": asdict(tool)}


class _AnswerReader:
    """One answer, from its first chunk to its last."""

    def __init__(self) -> None:
        self.completed: Completed | None = None
        """There when the last chunk has come, which tells what the answer cost."""
        self._detail: Mapping[str, Any] = {}

    def read(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Raises EmberkeepError for the chunk that says what went wrong."""
        if "error" in chunk:
            raise _refusal(chunk)
        for choice in chunk["choices"]:
            yield from _delta_events(choice["delta"])
            if choice["finish_reason"]:
                yield Finished(0, FinishReason(choice["finish_reason"]))
        self._detail = chunk.get("emberkeep") or self._detail
        if usage := chunk.get("usage"):
            self.completed = _completed(usage, chunk["timings"], self._detail)


def _delta_events(delta: Mapping[str, Any]) -> Iterator[Event]:
    if text := delta.get("reasoning_content"):
        yield ReasoningDelta(0, text)
    if text := delta.get("content"):
        yield TextDelta(0, text)
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        yield ToolCallDelta(
            0, call["index"], call.get("id"), function.get("name"), function.get("arguments") or ""
        )


def _completed(usage: Any, timings: Any, detail: Mapping[str, Any]) -> Completed:
    return Completed(
        Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]),
        Timings(
            cache_n=timings["cache_n"],
            prompt_n=timings["prompt_n"],
            prompt_ms=timings["prompt_ms"],
            predicted_n=timings["predicted_n"],
            predicted_ms=timings["predicted_ms"],
            ttft_ms=detail["ttft_ms"],
            queue_ms=detail["queue_ms"],
            draft_n=timings.get("draft_n", 0),
            draft_n_accepted=timings.get("draft_n_accepted", 0),
        ),
        lookup_from_json({**detail, "prompt_tokens": usage["prompt_tokens"]}),
        Fit(
            truncated_messages=detail["truncated_messages"],
            evictions=tuple(Eviction(**eviction) for eviction in detail.get("evictions", ())),
            recalled=detail.get("recalled", 0),
        ),
    )
