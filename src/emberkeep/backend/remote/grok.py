"""xAI's Grok through its own SDK, which speaks gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote, urlsplit

from grpc import StatusCode
from grpc.aio import AioRpcError
from xai_sdk import AsyncClient
from xai_sdk.proto import chat_pb2, sample_pb2

from emberkeep.backend.remote.asking import CONNECT_S, Keepsakes, service_of
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.calls import Calls
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.backend.remote.grok_wire import written
from emberkeep.errors import ConfigError, EmberkeepError, RemoteError, RemoteRefused, RequestError
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
    Usage,
)

_VENDOR_HOST = "api.x.ai"
_CONVERSATION_HEADER = "x-grok-conv-id"
_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.service_config", "{}"),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1e3)),  # also the longest that one connection may take
]
_STATUSES = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.UNIMPLEMENTED: 404,
    StatusCode.ABORTED: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_REASONS = {
    sample_pb2.REASON_STOP: FinishReason.STOP,
    sample_pb2.REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    sample_pb2.REASON_MAX_LEN: FinishReason.LENGTH,
    sample_pb2.REASON_MAX_CONTEXT: FinishReason.LENGTH,
    sample_pb2.REASON_TIME_LIMIT: FinishReason.LENGTH,
}
_OWN_CALLS = (chat_pb2.TOOL_CALL_TYPE_INVALID, chat_pb2.TOOL_CALL_TYPE_CLIENT_SIDE_TOOL)
"""The others are made and answered at xAI."""


def open_grok(remote: RemoteModel, key: str | None) -> Provider:
    if key is None:
        raise RemoteRefused(f"{remote.name} needs a key: set {remote.api_key_env or 'XAI_API_KEY'}.")
    return GrokProvider(remote, key)


class GrokProvider:
    def __init__(self, remote: RemoteModel, key: str) -> None:
        self._remote = remote
        self._service = Service(remote.model, service_of(remote, "xAI"), remote.api_key_env, key)
        host, is_plain = _host(remote)
        self._connect = partial(
            AsyncClient,
            api_key=key,
            api_host=host,
            channel_options=list(_OPTIONS),
            use_insecure_channel=is_plain,
        )
        self._kept: Keepsakes[str] = Keepsakes()
        self._model = remote.model

    @cached_property
    def _client(self) -> Any:
        """Not before it is used: a channel of gRPC belongs to the event loop that it was made in."""
        return self._connect()

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        chat = self._chat(request, await self._served())
        # Not `chat.stream()`: for its telemetry that reads every call's arguments, and fails on what is no JSON.
        call = chat._stub.GetCompletionChunk(chat.proto, metadata=_sticky(request))
        reading = _Reading(self._service, self._kept)
        try:
            with self._translated(reading):
                async for chunk in call:
                    for event in reading.read(chunk):
                        yield event
        finally:
            call.cancel()
        for event in reading.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translated():
            models = await self._client.models.list_language_models()
        used = next((model for model in models if self._remote.model in ("", model.name, *model.aliases)), None)
        return RemoteAbout(tuple(model.name for model in models), (used and used.max_prompt_length) or None)

    async def close(self) -> None:
        if "_client" in vars(self):
            await self._client.close()

    def _chat(self, request: Request, model: str) -> Any:
        try:
            return self._client.chat.create(**written(request, self._remote, model, self._kept))
        except (ValueError, TypeError) as error:  # a number that does not fit into its field
            raise RequestError(
                f"{self._service} cannot be asked this{self._service.quoted(str(error))}."
            ) from None

    async def _served(self) -> str:
        if not self._model:
            served = (await self.about()).models
            if not served:
                raise RemoteError(f"{self._service} serves no model to this key: look at its console.")
            self._model = served[0]
        return self._model

    @contextmanager
    def _translated(self, reading: _Reading | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except AioRpcError as error:
            raise self._failure(error, has_begun=reading is not None and reading.has_begun) from None

    def _failure(self, error: AioRpcError, *, has_begun: bool) -> EmberkeepError:
        said = error.details() or ""
        if error.code() is StatusCode.UNAVAILABLE and has_begun:
            return self._service.broke_off()
        if error.code() is StatusCode.UNAVAILABLE and "failed to connect" in said:
            return self._service.unreachable(OSError(said))
        status = _STATUSES.get(error.code(), 500)
        return self._service.failure(status, said, retry_after(_headers(error)))


def _host(remote: RemoteModel) -> tuple[str, bool]:
    """The address that gRPC wants, and whether it is spoken to in the clear."""
    if remote.base_url is None:
        return _VENDOR_HOST, False
    parts = urlsplit(remote.base_url if "//" in remote.base_url else f"//{remote.base_url}")
    if not parts.netloc:
        raise ConfigError(
            f"{remote.name}: {remote.base_url} is no address: write https://HOST or http://HOST:PORT."
        )
    return parts.netloc, parts.scheme == "http"


def _sticky(request: Request) -> tuple[tuple[str, str], ...]:
    """Prompts are cached per server: a conversation shall come to the same one again."""
    conversation = request.conversation_id or request.cache_key
    return ((_CONVERSATION_HEADER, quote(conversation)),) if conversation else ()


def _headers(error: AioRpcError) -> Mapping[str, str]:
    pairs = error.trailing_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}


class _Reading:
    """One answer, from its first chunk to its last."""

    def __init__(self, service: Service, kept: Keepsakes[str]) -> None:
        self.has_begun = False
        self._service = service
        self._kept = kept
        self._calls = Calls()
        self._encrypted = ""
        self._reason: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: Any) -> Iterator[Event]:
        self.has_begun = True
        if chunk.usage.prompt_tokens:
            self._usage = _usage(chunk.usage)
        for output in chunk.outputs:
            if output.delta.role in (chat_pb2.INVALID_ROLE, chat_pb2.ROLE_ASSISTANT):
                yield from self._grown(output.delta)
            self._reason = _REASONS.get(output.finish_reason, self._reason)

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where the model had not come to an end."""
        if self._reason is None:
            raise self._service.broke_off()
        for call_id in self._calls.ids[:1]:
            self._kept.keep(call_id, self._encrypted)
        yield Finished(0, FinishReason.TOOL_CALLS if self._calls.ids else self._reason)
        yield Completed(self._usage, Timings(), LookupRecord())

    def _grown(self, delta: Any) -> Iterator[Event]:
        self._encrypted += delta.encrypted_content
        if delta.reasoning_content:
            yield ReasoningDelta(0, delta.reasoning_content)
        if delta.content:
            yield TextDelta(0, delta.content)
        for call in delta.tool_calls:
            if call.type in _OWN_CALLS:
                yield from self._calls.piece(None, call.id, call.function.name, call.function.arguments or "{}")


def _usage(said: Any) -> Usage:
    """xAI's completion tokens are without the reasoning."""
    return Usage(
        said.prompt_tokens,
        said.completion_tokens + said.reasoning_tokens,
        said.cached_prompt_text_tokens,
        said.reasoning_tokens,
    )
