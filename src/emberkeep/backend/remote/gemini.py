"""Google's Gemini, through its own SDK."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from uuid import uuid4

import httpx
from google import genai
from google.genai import errors, types

from emberkeep.backend.remote.asking import CONNECT_S, READ_S, Keepsakes, service_of
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.backend.remote.gemini_wire import Kept, Signed, config_of, contents_of
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
_TIMEOUT = httpx.Timeout(READ_S, connect=CONNECT_S)
_DELAY = re.compile(r'"retryDelay":\s*"(\d+(?:\.\d+)?)s"')

_opened: ContextVar[list[httpx.Response] | None] = ContextVar("emberkeep_gemini_opened", default=None)


def open_gemini(remote: RemoteModel, key: str | None) -> Provider:
    if key is None:
        raise RemoteRefused(f"{remote.name} needs a key: set {remote.api_key_env or 'GEMINI_API_KEY'}.")
    return GeminiProvider(remote, key)


class GeminiProvider:
    def __init__(self, remote: RemoteModel, key: str) -> None:
        self._remote = remote
        self._service = Service(remote.model, service_of(remote, "Google"), remote.api_key_env, key)
        self._http = httpx.AsyncClient(event_hooks={"request": [_limit], "response": [_remember]})
        options = types.HttpOptions(base_url=remote.base_url, httpx_async_client=self._http)
        self._models = genai.Client(api_key=key, vertexai=False, http_options=options).aio.models
        self._kept: Kept = Keepsakes()

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        contents, config = contents_of(request.messages, self._kept), config_of(request, self._remote)
        reading = _Reading(self._service, self._kept, request.parallel_tool_calls)
        with self._translated(reading):
            async with self._stream(contents, config) as stream:
                async for chunk in stream:
                    for event in reading.read(chunk):
                        yield event
        for event in reading.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translated():
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
            yield _chained(first, stream)
        finally:
            for response in opened:
                await response.aclose()

    @contextmanager
    def _translated(self, reading: _Reading | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except errors.APIError as error:
            raise self._failure(error) from None
        except httpx.HTTPError as error:
            if reading is not None and reading.has_begun:
                raise self._service.broke_off() from None
            raise self._service.unreachable(error) from None
        except ValueError as error:
            reason = self._service.quoted(str(error))
            raise RemoteError(f"{self._service} gave an answer that cannot be read{reason}.") from None

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


async def _chained(
    first: types.GenerateContentResponse | None, rest: AsyncIterator[types.GenerateContentResponse]
) -> AsyncIterator[types.GenerateContentResponse]:
    if first is not None:
        yield first
        async for chunk in rest:
            yield chunk


class _Reading:
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
                yield from self._part(part)
            if candidate.finish_reason is not None:
                self._reason = self._meant(candidate.finish_reason)

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where nobody has said that it is the end."""
        if self._reason is None:
            raise self._service.broke_off()
        yield Finished(0, FinishReason.TOOL_CALLS if self._calls else self._reason)
        yield Completed(self._usage, Timings(), LookupRecord())

    def _part(self, part: types.Part) -> Iterator[Event]:
        if part.function_call is not None:
            yield from self._call(part.function_call, part.thought_signature)
        elif part.text and part.thought:
            yield ReasoningDelta(0, part.text)
        elif part.text:
            yield TextDelta(0, part.text)

    def _call(self, call: types.FunctionCall, signature: bytes | None) -> Iterator[Event]:
        # There is no way to ask for one call only.
        if self._calls and not self._parallel:
            return
        call_id = call.id or f"call_{uuid4().hex[:24]}"
        self._kept.keep(call_id, Signed(signature))
        arguments = json.dumps(call.args or {}, ensure_ascii=False)
        yield ToolCallDelta(0, self._calls, call_id, call.name or "", arguments)
        self._calls += 1

    def _meant(self, reason: types.FinishReason) -> FinishReason:
        if reason in _MISHAPS:
            raise RemoteError(f"{self._service} failed to write its answer ({reason.value}): ask again.")
        if reason not in _REASONS:
            raise self._service.declined(str(reason.value))
        return _REASONS[reason]


def _usage(usage: types.GenerateContentResponseUsageMetadata) -> Usage:
    thought = usage.thoughts_token_count or 0
    said = (usage.candidates_token_count or 0) + thought
    return Usage(usage.prompt_token_count or 0, said, usage.cached_content_token_count or 0, thought)
