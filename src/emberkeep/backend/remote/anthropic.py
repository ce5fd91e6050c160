"""Anthropic's Claude, through its own SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from anthropic import (
    AnthropicError,
    APIConnectionError,
    APIStatusError,
    AsyncAnthropic,
    DefaultAsyncHttpxClient,
)

from emberkeep.backend.remote.anthropic_wire import Block, written
from emberkeep.backend.remote.asking import CONNECT_S, READ_S, Keepsakes, service_of
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.errors import EmberkeepError, RemoteError, RemoteRefused
from emberkeep.types import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    ReasoningDelta,
    RemoteModel,
    Request,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)

_REASONS = {
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
}
# In the middle of a stream the status is 200 already, and only the type says what is wrong.
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def open_anthropic(remote: RemoteModel, key: str | None) -> Provider:
    if key is None:
        raise RemoteRefused(f"{remote.name} needs a key: set {remote.api_key_env or 'ANTHROPIC_API_KEY'}.")
    return AnthropicProvider(remote, key)


class AnthropicProvider:
    def __init__(self, remote: RemoteModel, key: str) -> None:
        self._remote = remote
        self._service = Service(remote.model, service_of(remote, "Anthropic"), remote.api_key_env, key)
        timeout = httpx2.Timeout(READ_S, connect=CONNECT_S)
        self._client = AsyncAnthropic(
            api_key=key,
            base_url=remote.base_url,
            max_retries=0,
            timeout=timeout,
            # A conversation is for whom it was sent to, and not for whom that one points to.
            http_client=DefaultAsyncHttpxClient(timeout=timeout, follow_redirects=False),
        )
        self._kept: Keepsakes[list[Block]] = Keepsakes()

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        body = written(request, self._remote, self._kept)
        reading = _Reading(self._service, self._kept)
        with self._translated(reading):
            async with await self._client.messages.create(**body, stream=True) as stream:
                async for item in stream:
                    for event in reading.read(item):
                        yield event
        if not reading.is_whole:
            raise self._service.broke_off()

    async def about(self) -> RemoteAbout:
        with self._translated():
            models = [model async for model in self._client.models.list(limit=1000)]
        used = next((model for model in models if model.id == self._remote.model), None)
        return RemoteAbout(tuple(model.id for model in models), used.max_input_tokens if used else None)

    async def close(self) -> None:
        await self._client.close()

    @contextmanager
    def _translated(self, reading: _Reading | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except APIStatusError as error:
            raise self._failure(error) from None
        except (APIConnectionError, httpx2.HTTPError) as error:
            if reading is not None and reading.has_begun:
                raise self._service.broke_off() from None
            raise self._service.unreachable(error.__cause__ or error) from None
        except (AnthropicError, ValueError) as error:
            reason = self._service.quoted(str(error))
            raise RemoteError(f"{self._service} gave an answer that cannot be read{reason}.") from None

    def _failure(self, error: APIStatusError) -> EmberkeepError:
        status = error.status_code if error.status_code >= 400 else _STATUSES.get(error.type or "", 500)
        return self._service.failure(status, error.api_message or "", retry_after(error.response.headers))


class _Reading:
    """One answer, from its first event to its last."""

    def __init__(self, service: Service, kept: Keepsakes[list[Block]]) -> None:
        self.has_begun = False
        self.is_whole = False
        self._service = service
        self._kept = kept
        self._thought: list[Block] = []
        self._calls: list[str] = []
        self._has_arguments = False
        self._reason = FinishReason.STOP
        self._counts: dict[str, int] = {}

    def read(self, item: Any) -> Iterator[Event]:
        self.has_begun = True
        match item.type:
            case "message_start":
                self._count(item.message.usage)
            case "content_block_start":
                yield from self._begun(item.content_block)
            case "content_block_delta":
                yield from self._grown(item.delta)
            case "content_block_stop":
                yield from self._ended()
            case "message_delta":
                self._count(item.usage)
                self._stopped(item.delta)
            case "message_stop":
                yield from self._completed()

    def _begun(self, block: Any) -> Iterator[Event]:
        self._has_arguments = True
        match block.type:
            case "tool_use":
                self._has_arguments = False
                self._calls.append(block.id)
                yield ToolCallDelta(0, len(self._calls) - 1, block.id, block.name, "")
            case "thinking":
                self._thought.append({"type": "thinking", "thinking": "", "signature": ""})
            case "redacted_thinking":
                self._thought.append({"type": "redacted_thinking", "data": block.data})

    def _grown(self, delta: Any) -> Iterator[Event]:
        match delta.type:
            case "text_delta":
                yield TextDelta(0, delta.text)
            case "thinking_delta":
                self._thought[-1]["thinking"] += delta.thinking
                yield ReasoningDelta(0, delta.thinking)
            case "signature_delta":
                self._thought[-1]["signature"] += delta.signature
            case "input_json_delta" if delta.partial_json:
                self._has_arguments = True
                yield ToolCallDelta(0, len(self._calls) - 1, None, None, delta.partial_json)

    def _ended(self) -> Iterator[Event]:
        # A tool without parameters is called with no arguments at all.
        if not self._has_arguments:
            yield ToolCallDelta(0, len(self._calls) - 1, None, None, "{}")

    def _stopped(self, delta: Any) -> None:
        if delta.stop_reason == "refusal":
            details = getattr(delta, "stop_details", None)
            raise self._service.declined((details and details.explanation) or "")
        self._reason = _REASONS.get(delta.stop_reason, FinishReason.STOP)

    def _completed(self) -> Iterator[Event]:
        self.is_whole = True
        if self._calls and self._thought:
            self._kept.keep(self._calls[0], self._thought)
        yield Finished(0, self._reason)
        yield Completed(self._usage(), Timings(), LookupRecord())

    def _count(self, usage: Any) -> None:
        """Every count is cumulative; one that is left out has not changed."""
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"):
            if (count := getattr(usage, name, None)) is not None:
                self._counts[name] = count
        if details := getattr(usage, "output_tokens_details", None):
            self._counts["thinking_tokens"] = details.thinking_tokens

    def _usage(self) -> Usage:
        cached = self._counts.get("cache_read_input_tokens", 0)
        fresh = self._counts.get("input_tokens", 0) + self._counts.get("cache_creation_input_tokens", 0)
        said = self._counts.get("output_tokens", 0)
        return Usage(fresh + cached, said, cached, self._counts.get("thinking_tokens", 0))
