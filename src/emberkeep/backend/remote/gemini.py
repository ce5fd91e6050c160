"""Google's Gemini, through its own SDK."""

from __future__ import annotations

import base64
import json
import logging
import mimetypes
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import httpx
from google import genai
from google.genai import errors, types

from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.service import CONNECT_S, READ_S, Service, required_key, retry_after
from emberkeep.backend.remote.vendor_wire import (
    Keepsakes,
    arguments_of,
    chosen_sampling,
    inline_image,
    json_format,
    split_system,
    text_of,
)
from emberkeep.errors import EmberkeepError, InvalidField, RemoteError
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
    ToolCallDelta,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, Message, Request, Tool, ToolCall, ToolChoice, new_call_id
from emberkeep.values import dataclass

_REASONS = {types.FinishReason.STOP: FinishReason.STOP, types.FinishReason.MAX_TOKENS: FinishReason.LENGTH}
_MISHAPS = frozenset(
    {
        types.FinishReason.MALFORMED_FUNCTION_CALL,
        types.FinishReason.MALFORMED_RESPONSE,
        types.FinishReason.UNEXPECTED_TOOL_CALL,
        types.FinishReason.TOO_MANY_TOOL_CALLS,
        types.FinishReason.OTHER,
    }
)
# The SDK says which of two variables it would take, also where it is given the key.
logging.getLogger("google_genai._api_client").addFilter(
    lambda record: not record.getMessage().startswith("Both GOOGLE_API_KEY and GEMINI_API_KEY are set")
)
_TIMEOUT = httpx.Timeout(READ_S, connect=CONNECT_S)
_DELAY = re.compile(r'"retryDelay":\s*"(\d+(?:\.\d+)?)s"')

_opened: ContextVar[list[httpx.Response] | None] = ContextVar("emberkeep_gemini_opened", default=None)
_SAMPLED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
_MODES = {
    "none": types.FunctionCallingConfigMode.NONE,
    "auto": types.FunctionCallingConfigMode.AUTO,
    "required": types.FunctionCallingConfigMode.ANY,
    "named": types.FunctionCallingConfigMode.ANY,
}


def open_gemini(remote: RemoteModel, key: str | None) -> Provider:
    return GeminiProvider(remote, required_key(remote, key, "GEMINI_API_KEY"))


class GeminiProvider:
    def __init__(self, remote: RemoteModel, key: str) -> None:
        self._remote = remote
        self._service = Service.of(remote, "Google", key)
        self._http = httpx.AsyncClient(event_hooks={"request": [_limit], "response": [_remember]})
        options = types.HttpOptions(base_url=remote.base_url, httpx_async_client=self._http)
        self._models = genai.Client(api_key=key, vertexai=False, http_options=options).aio.models
        self._kept: Kept = Keepsakes()

    async def answer(self, request: Request) -> Events:
        contents, config = _request_contents(request.messages, self._kept), _request_config(request, self._remote)
        reader = _AnswerReader(self._service, self._kept, request.parallel_tool_calls)
        with self._translate_errors(reader):
            async with self._stream(contents, config) as stream:
                async for chunk in stream:
                    for event in reader.read(chunk):
                        yield event
        for event in reader.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translate_errors():
            pager = await self._models.list(config={"page_size": 1000})
            models = [model async for model in pager]
        limits = {(model.name or "").removeprefix("models/"): model.input_token_limit for model in models}
        return RemoteAbout(tuple(limits), limits.get(self._remote.model.removeprefix("models/")))

    async def close(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def _stream(
        self, contents: list[types.Content], config: types.GenerateContentConfig
    ) -> AsyncIterator[AsyncIterator[types.GenerateContentResponse]]:
        """Closes the connection at the end: the SDK leaves that to the garbage collector."""
        opened: list[httpx.Response] = []
        token = _opened.set(opened)
        try:
            stream = await self._models.generate_content_stream(
                model=self._remote.model, contents=list(contents), config=config
            )
            first = await anext(stream, None)
        finally:
            _opened.reset(token)
        try:
            yield _chain(first, stream)
        finally:
            for response in opened:
                await response.aclose()

    @contextmanager
    def _translate_errors(self, reader: _AnswerReader | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except errors.APIError as error:
            raise self._failure(error) from None
        except httpx.HTTPError as error:
            has_begun = reader is not None and reader.has_begun
            raise self._service.disconnected(error, has_begun=has_begun) from None
        except ValueError as error:
            raise self._service.unreadable(error) from None

    def _failure(self, error: errors.APIError) -> EmberkeepError:
        details = json.dumps(error.details, default=str)
        # A wrong key is a bad request here.
        status = 401 if "API_KEY_INVALID" in details else error.code or 500
        delay = _DELAY.search(details)
        headers = getattr(error.response, "headers", None) or {}
        after = float(delay[1]) if delay else retry_after(headers)
        return self._service.failure(status, error.message or "", after)


async def _limit(request: httpx.Request) -> None:
    # The SDK sets one limit for everything, or none.
    request.extensions["timeout"] = _TIMEOUT.as_dict()


async def _remember(response: httpx.Response) -> None:
    if (opened := _opened.get()) is not None:
        opened.append(response)


async def _chain(
    first: types.GenerateContentResponse | None, rest: AsyncIterator[types.GenerateContentResponse]
) -> AsyncIterator[types.GenerateContentResponse]:
    if first is not None:
        yield first
        async for chunk in rest:
            yield chunk


class _AnswerReader:
    """One answer, from its first chunk to its last."""

    def __init__(self, service: Service, kept: Kept, parallel: bool) -> None:
        self.has_begun = False
        self._service = service
        self._kept = kept
        self._parallel = parallel
        self._calls = 0
        self._reason: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: types.GenerateContentResponse) -> Iterator[Event]:
        self.has_begun = True
        if chunk.usage_metadata is not None:
            self._usage = _usage(chunk.usage_metadata)
        if chunk.prompt_feedback is not None and chunk.prompt_feedback.block_reason is not None:
            raise self._service.declined(str(chunk.prompt_feedback.block_reason.value))
        for candidate in (chunk.candidates or ())[:1]:
            for part in (candidate.content and candidate.content.parts) or ():
                yield from self._read_part(part)
            if candidate.finish_reason is not None:
                self._reason = self._finish_reason(candidate.finish_reason)

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where the model had not come to an end."""
        if self._reason is None:
            raise self._service.broke_off()
        yield Finished(0, FinishReason.TOOL_CALLS if self._calls else self._reason)
        yield Completed(self._usage, Timings(), LookupRecord())

    def _read_part(self, part: types.Part) -> Iterator[Event]:
        if part.function_call is not None:
            yield from self._read_call(part.function_call, part.thought_signature)
        elif part.text and part.thought:
            yield ReasoningDelta(0, part.text)
        elif part.text:
            yield TextDelta(0, part.text)

    def _read_call(self, call: types.FunctionCall, signature: bytes | None) -> Iterator[Event]:
        # There is no way to ask for one call only.
        if self._calls and not self._parallel:
            return
        call_id = call.id or new_call_id()
        self._kept.keep(call_id, Signed(signature))
        arguments = json.dumps(call.args or {}, ensure_ascii=False)
        yield ToolCallDelta(0, self._calls, call_id, call.name or "", arguments)
        self._calls += 1

    def _finish_reason(self, reason: types.FinishReason) -> FinishReason:
        if reason in _MISHAPS:
            raise RemoteError(f"{self._service} failed to write its answer ({reason.value}): ask again.")
        if reason not in _REASONS:
            raise self._service.declined(str(reason.value))
        return _REASONS[reason]


def _usage(usage: types.GenerateContentResponseUsageMetadata) -> Usage:
    thought = usage.thoughts_token_count or 0
    said = (usage.candidates_token_count or 0) + thought
    return Usage(usage.prompt_token_count or 0, said, usage.cached_content_token_count or 0, thought)


# ── a request in the form of Google's Gemini API ──


@dataclass(frozen=True, slots=True)
class Signed:
    """A call that Gemini made here."""

    signature: bytes | None
    """None: it made several at once, and signed the first."""


Kept = Keepsakes[Signed]


def _request_config(request: Request, remote: RemoteModel) -> types.GenerateContentConfig:
    made: dict[str, Any] = {
        "system_instruction": _system(request.messages),
        "max_output_tokens": request.max_tokens or remote.max_tokens,
        "stop_sequences": list(request.stop) or None,
        "thinking_config": _thinking(request),
        # Which calls are answered, and how often a service is asked, is decided above.
        "automatic_function_calling": types.AutomaticFunctionCallingConfig(disable=True),
        "automatic_continuation": False,
        **chosen_sampling(request.sampling, _SAMPLED),
    }
    if request.tools:
        made["tools"] = [types.Tool(function_declarations=[_declaration(tool) for tool in request.tools])]
        made["tool_config"] = types.ToolConfig(function_calling_config=_calling_config(request.tool_choice))
    wanted = json_format(request)
    if wanted is not None:
        made |= {"response_mime_type": "application/json", "response_json_schema": wanted.schema}
    return types.GenerateContentConfig(**made)


def _request_contents(messages: Sequence[Message], kept: Kept) -> list[types.Content]:
    """User and model by turns: neighbours of one role become one. Raises InvalidField."""
    calls = {call.id: call for message in messages for call in message.tool_calls}
    contents: list[types.Content] = []
    for message in split_system(messages)[1]:
        role = "model" if message.role == "assistant" else "user"
        parts = _parts(message, calls, kept)
        if contents and contents[-1].role == role:
            contents[-1].parts = [*(contents[-1].parts or ()), *parts]
        elif parts:
            contents.append(types.Content(role=role, parts=parts))
    return contents


def _system(messages: Sequence[Message]) -> str | None:
    return "\n\n".join(message.content for message in split_system(messages)[0]) or None


def _parts(message: Message, calls: Mapping[str, ToolCall], kept: Kept) -> list[types.Part]:
    images = [_image(image) for image in message.images]
    if message.role == "tool":
        return [_result(message, calls, kept), *images]
    said = [types.Part(text=text)] if (text := text_of(message)) else []
    return [*said, *images, *(_call(call, kept) for call in message.tool_calls)]


def _call(call: ToolCall, kept: Kept) -> types.Part:
    signed = kept.get(call.id)
    if signed is None:
        # Calls of another model, or of an earlier run: without their signature newer models refuse them as calls.
        return types.Part(text=f"[{call.name} was called with {call.arguments or '{}'}]")
    made = types.FunctionCall(id=call.id, name=call.name, args=dict(arguments_of(call.arguments)))
    return types.Part(function_call=made, thought_signature=signed.signature)


def _result(message: Message, calls: Mapping[str, ToolCall], kept: Kept) -> types.Part:
    call = calls.get(message.tool_call_id or "")
    if call is None or kept.get(call.id) is None:
        name = message.name or (call.name if call else "a tool")
        return types.Part(text=f"[{name} gave {json.dumps(message.content, ensure_ascii=False)}]")
    answer = types.FunctionResponse(id=call.id, name=call.name, response={"output": message.content})
    return types.Part(function_response=answer)


def _image(image: Image) -> types.Part:
    found = inline_image(image)
    if found is None:
        kind = mimetypes.guess_type(urlsplit(image.url).path)[0] or "image/jpeg"
        return types.Part(file_data=types.FileData(file_uri=image.url, mime_type=kind))
    try:
        data = base64.b64decode(found.base64, validate=True)
    except ValueError as error:
        raise InvalidField("image_url", "its data is not base64: send it again.") from error
    return types.Part(inline_data=types.Blob(data=data, mime_type=found.media_type))


def _declaration(tool: Tool) -> types.FunctionDeclaration:
    schema = dict(tool.parameters) or None
    return types.FunctionDeclaration(name=tool.name, description=tool.description, parameters_json_schema=schema)


def _calling_config(choice: ToolChoice) -> types.FunctionCallingConfig:
    names = None if choice.name is None else [choice.name]
    return types.FunctionCallingConfig(mode=_MODES[choice.mode], allowed_function_names=names)


def _thinking(request: Request) -> types.ThinkingConfig | None:
    """What the request says about thinking; if it says nothing, the model's own default."""
    wanted = request.template_args.get("enable_thinking")
    if wanted is None:
        return None
    return types.ThinkingConfig(include_thoughts=True) if wanted else types.ThinkingConfig(thinking_budget=0)
