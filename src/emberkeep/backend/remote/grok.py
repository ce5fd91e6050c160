"""xAI's Grok through its own SDK, which speaks gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote, urlsplit

from grpc import StatusCode
from grpc.aio import AioRpcError
from xai_sdk import AsyncClient
from xai_sdk.chat import image, required_tool, text, tool
from xai_sdk.proto import chat_pb2, sample_pb2

from emberkeep.backend.remote.base import Provider, RemoteAbout, first_model
from emberkeep.backend.remote.service import CONNECT_S, Service, required_key, retry_after
from emberkeep.backend.remote.vendor_wire import (
    CallPieces,
    Keepsakes,
    anonymous_id,
    chosen_sampling,
    json_format,
    turn_start,
)
from emberkeep.errors import ConfigError, EmberkeepError, RequestError
from emberkeep.types.events import (
    Completed,
    Event,
    Events,
    Finished,
    FinishReason,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import JsonFormat, Message, Request, Sampling, ToolCall, ToolChoice

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
"""Kinds of calls that the client answers. xAI makes and answers the others itself."""
_SAMPLED = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_LARGEST_SEED = 2**31 - 1
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}


def open_grok(remote: RemoteModel, key: str | None) -> Provider:
    return GrokProvider(remote, required_key(remote, key, "XAI_API_KEY"))


class GrokProvider:
    def __init__(self, remote: RemoteModel, key: str) -> None:
        self._remote = remote
        self._service = Service.of(remote, "xAI", key)
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
        """Made at its first use, because a gRPC channel belongs to the event loop that it was made in."""
        return self._connect()

    async def answer(self, request: Request) -> Events:
        chat = self._chat(request, await self._model_name())
        # Not `chat.stream()`: for its telemetry that reads every call's arguments, and fails on what is no JSON.
        call = chat._stub.GetCompletionChunk(chat.proto, metadata=_conversation_header(request))
        reader = _AnswerReader(self._service, self._kept)
        try:
            with self._translate_errors(reader):
                async for chunk in call:
                    for event in reader.read(chunk):
                        yield event
        finally:
            call.cancel()
        for event in reader.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translate_errors():
            models = await self._client.models.list_language_models()
        used = next((model for model in models if self._remote.model in ("", model.name, *model.aliases)), None)
        return RemoteAbout(tuple(model.name for model in models), (used and used.max_prompt_length) or None)

    async def close(self) -> None:
        if "_client" in vars(self):
            await self._client.close()

    def _chat(self, request: Request, model: str) -> Any:
        try:
            return self._client.chat.create(**_request_body(request, self._remote, model, self._kept))
        except (ValueError, TypeError) as error:  # a number that does not fit into its field
            raise RequestError(
                f"{self._service} cannot be asked this{self._service.quoted(str(error))}."
            ) from None

    async def _model_name(self) -> str:
        none_served = f"{self._service} serves no model to this key: look at its console."
        self._model = self._model or await first_model(self, none_served)
        return self._model

    @contextmanager
    def _translate_errors(self, reader: _AnswerReader | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except AioRpcError as error:
            raise self._failure(error, has_begun=reader is not None and reader.has_begun) from None

    def _failure(self, error: AioRpcError, *, has_begun: bool) -> EmberkeepError:
        said = error.details() or ""
        if error.code() is StatusCode.UNAVAILABLE and has_begun:
            return self._service.broke_off()
        if error.code() is StatusCode.UNAVAILABLE and "failed to connect" in said:
            return self._service.unreachable(OSError(said))
        status = _STATUSES.get(error.code(), 500)
        return self._service.failure(status, said, retry_after(_headers(error)))


def _host(remote: RemoteModel) -> tuple[str, bool]:
    """The address for gRPC, and whether the connection is unencrypted."""
    if remote.base_url is None:
        return _VENDOR_HOST, False
    parts = urlsplit(remote.base_url if "//" in remote.base_url else f"//{remote.base_url}")
    if not parts.netloc:
        raise ConfigError(
            f"{remote.name}: {remote.base_url} is no address: write https://HOST or http://HOST:PORT."
        )
    return parts.netloc, parts.scheme == "http"


def _conversation_header(request: Request) -> tuple[tuple[str, str], ...]:
    """xAI caches prompts per server: this header sends a conversation to the same server again."""
    conversation = request.conversation_id or request.cache_key
    return ((_CONVERSATION_HEADER, quote(conversation)),) if conversation else ()


def _headers(error: AioRpcError) -> Mapping[str, str]:
    pairs = error.trailing_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}


class _AnswerReader:
    """One answer, from its first chunk to its last."""

    def __init__(self, service: Service, kept: Keepsakes[str]) -> None:
        self.has_begun = False
        self._service = service
        self._kept = kept
        self._calls = CallPieces()
        self._encrypted = ""
        self._reason: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: Any) -> Iterator[Event]:
        self.has_begun = True
        if chunk.usage.prompt_tokens:
            self._usage = _usage(chunk.usage)
        for output in chunk.outputs:
            if output.delta.role in (chat_pb2.INVALID_ROLE, chat_pb2.ROLE_ASSISTANT):
                yield from self._read_delta(output.delta)
            self._reason = _REASONS.get(output.finish_reason, self._reason)

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where the model had not come to an end."""
        if self._reason is None:
            raise self._service.broke_off()
        for call_id in self._calls.ids[:1]:
            self._kept.keep(call_id, self._encrypted)
        yield Finished(0, FinishReason.TOOL_CALLS if self._calls.ids else self._reason)
        yield Completed(self._usage, Timings(), LookupRecord())

    def _read_delta(self, delta: Any) -> Iterator[Event]:
        self._encrypted += delta.encrypted_content
        if delta.reasoning_content:
            yield ReasoningDelta(0, delta.reasoning_content)
        if delta.content:
            yield TextDelta(0, delta.content)
        for call in delta.tool_calls:
            if call.type in _OWN_CALLS:
                yield from self._calls.piece(None, call.id, call.function.name, call.function.arguments or "{}")


def _usage(said: Any) -> Usage:
    """Usage with the reasoning tokens added: xAI's completion tokens do not include them."""
    return Usage(
        said.prompt_tokens,
        said.completion_tokens + said.reasoning_tokens,
        said.cached_prompt_text_tokens,
        said.reasoning_tokens,
    )


# ── a request in the form of xAI's SDK ──


def _request_body(request: Request, remote: RemoteModel, model: str, kept: Keepsakes[str]) -> dict[str, Any]:
    """The arguments of `chat.create`. `kept`: the encrypted thoughts that belong to earlier tool calls."""
    body: dict[str, Any] = {
        "model": model,
        "messages": _messages(request.messages, kept),
        "max_tokens": request.max_tokens if request.max_tokens is not None else remote.max_tokens,
        "stop": list(request.stop) or None,
        "response_format": _format(json_format(request)),
        "safety_identifier": anonymous_id(request.user),
        **_sampling(request.sampling),
    }
    if request.tools:
        body["tools"] = [tool(one.name, one.description, _parameters(one.parameters)) for one in request.tools]
        body["tool_choice"] = _tool_choice(request.tool_choice)
        body["parallel_tool_calls"] = None if request.parallel_tool_calls else False
        body["use_encrypted_content"] = True
    return {name: value for name, value in body.items() if value is not None}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    picked = chosen_sampling(sampling, _SAMPLED)
    if "seed" in picked:
        picked["seed"] &= _LARGEST_SEED
    return picked


def _parameters(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {}, **schema}


def _messages(sent: Sequence[Message], kept: Keepsakes[str]) -> list[chat_pb2.Message]:
    start = turn_start(sent)
    return [_message(message, kept, thinks_on=place >= start) for place, message in enumerate(sent)]


def _message(message: Message, kept: Keepsakes[str], *, thinks_on: bool) -> chat_pb2.Message:
    """`thinks_on`: the model is in the middle of a turn, and gets its thoughts of this turn back."""
    encrypted = next(filter(None, (kept.get(call.id) for call in message.tool_calls)), "")
    return chat_pb2.Message(
        role=_ROLES[message.role],
        content=[text(message.content), *(image(one.url) for one in message.images)],
        name=message.name or "",
        reasoning_content=message.reasoning if thinks_on and message.reasoning else None,
        encrypted_content=encrypted,
        tool_calls=[_call(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
    )


def _call(call: ToolCall) -> chat_pb2.ToolCall:
    function = chat_pb2.FunctionCall(name=call.name, arguments=call.arguments)
    return chat_pb2.ToolCall(id=call.id, type=chat_pb2.TOOL_CALL_TYPE_CLIENT_SIDE_TOOL, function=function)


def _tool_choice(choice: ToolChoice) -> Any:
    return required_tool(choice.name) if choice.name is not None else choice.mode


def _format(wanted: JsonFormat | None) -> Any:
    if wanted is None or wanted.schema is None:
        return wanted and "json_object"
    return chat_pb2.ResponseFormat(
        format_type=chat_pb2.FORMAT_TYPE_JSON_SCHEMA, schema=json.dumps(dict(wanted.schema))
    )
