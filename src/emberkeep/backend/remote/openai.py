"""OpenAI through its own SDK, and every server that speaks like it: vLLM, SGLang, llama-server, Emberkeep."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    Omit,
    OpenAIError,
)

from emberkeep.backend.remote.asking import CONNECT_S, READ_S, service_of
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.calls import Calls
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.backend.remote.openai_wire import COMPATIBLE, OPENAI, Dialect, History, Kept, written
from emberkeep.backend.remote.tls import trusted
from emberkeep.errors import EmberkeepError, RemoteError, RemoteRefused
from emberkeep.types import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Json,
    LookupRecord,
    ReasoningDelta,
    RemoteModel,
    Request,
    TextDelta,
    Timings,
    Usage,
)

_VENDOR_URL = "https://api.openai.com/v1"
_REASONS = {"length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS}
# In the middle of a stream the status is 200 already, and only the type says what is wrong.
_STATUSES = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 413,
    "authentication_error": 401,
    "rate_limit_error": 429,
    "overloaded": 503,
    "deadline": 504,
}
_FULL_CODES = ("context_length_exceeded", "prompt_too_large", "exceed_context_size_error")
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
_META_FIELDS = ("n_ctx", "n_ctx_train")


def open_openai(remote: RemoteModel, key: str | None) -> Provider:
    """Servers elsewhere may need no key."""
    if _is_vendor(remote):
        if key is None:
            raise RemoteRefused(f"{remote.name} needs a key: set {remote.api_key_env or 'OPENAI_API_KEY'}.")
        return OpenAIProvider(remote, key, OPENAI)
    return OpenAIProvider(remote, key, COMPATIBLE)


def _is_vendor(remote: RemoteModel) -> bool:
    host = urlsplit(remote.base_url or _VENDOR_URL).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")


def api_url(base_url: str) -> str:
    """An address without a path is that of a server, whose API is where OpenAI's is."""
    return base_url if urlsplit(base_url).path.strip("/") else f"{base_url.rstrip('/')}/v1"


class OpenAIProvider:
    def __init__(self, remote: RemoteModel, key: str | None, dialect: Dialect) -> None:
        self._remote = remote
        self._dialect = dialect
        self._service = Service(remote.model, service_of(remote, "OpenAI"), remote.api_key_env, key)
        self._client = _client(remote, key, dialect)
        # The SDK wants to hear with every request that none is to be sent.
        self._headers: dict[str, Any] = {} if key else {"Authorization": Omit()}
        self._history = History()
        self._model = remote.model

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        body = written(request, self._remote, await self._served(), self._dialect, self._history)
        body["extra_headers"] = {**self._headers, **body.get("extra_headers", {})}
        reading = _Reading(self._service, self._history)
        with self._translated(reading):
            async with await self._client.chat.completions.create(**body) as stream:
                async for chunk in stream:
                    for event in reading.read(chunk):
                        yield event
        for event in reading.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translated():
            models = (await self._client.models.list(extra_headers=self._headers)).data
            used = next((model for model in models if self._remote.model in ("", model.id)), None)
            context = _context(used.model_extra or {}) if used else None
            return RemoteAbout(tuple(model.id for model in models), context)

    async def close(self) -> None:
        await self._client.close()

    async def _served(self) -> str:
        if not self._model:
            served = (await self.about()).models
            if not served:
                raise RemoteError(f"{self._service} serves no model: load one there.")
            self._model = served[0]
        return self._model

    @contextmanager
    def _translated(self, reading: _Reading | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except APIStatusError as error:
            raise self._failure(error, error.status_code, retry_after(error.response.headers)) from None
        except (APIConnectionError, httpx2.HTTPError) as error:
            if reading is not None and reading.has_begun:
                raise self._service.broke_off() from None
            raise self._service.unreachable(error.__cause__ or error) from None
        except APIError as error:
            raise self._failure(error, _status_in_stream(error)) from None
        except (OpenAIError, ValueError, TypeError, AttributeError) as error:  # the SDK checks nothing it reads
            reason = self._service.quoted(str(error))
            raise RemoteError(f"{self._service} gave an answer that cannot be read{reason}.") from None

    def _failure(self, error: APIError, status: int, wait_s: float | None = None) -> EmberkeepError:
        said = error.body.get("message") if isinstance(error.body, Mapping) else error.body
        is_full = error.code in _FULL_CODES or error.type in _FULL_CODES
        return self._service.failure(413 if is_full else status, said if isinstance(said, str) else "", wait_s)


def _client(remote: RemoteModel, key: str | None, dialect: Dialect) -> AsyncOpenAI:
    # What the environment says about an account at OpenAI is not for others to know.
    private: Any = {name: Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
    timeout = httpx2.Timeout(READ_S, connect=CONNECT_S)
    return AsyncOpenAI(
        api_key=key or "",
        admin_api_key="",
        base_url=api_url(remote.base_url or _VENDOR_URL),
        max_retries=0,
        timeout=timeout,
        default_headers=None if dialect.is_vendor else private,
        # A conversation is for whom it was sent to, and not for whom that one points to.
        http_client=DefaultAsyncHttpxClient(verify=trusted(), timeout=timeout, follow_redirects=False),
    )


def _status_in_stream(error: APIError) -> int:
    """Some servers write the status where OpenAI writes a code."""
    if error.code is not None and error.code.isdecimal():
        return int(error.code)
    return _STATUSES.get(error.type or "", 500)


def _context(fields: Mapping[str, Json]) -> int | None:
    meta = fields.get("meta")
    said = [fields.get(name) for name in _CONTEXT_FIELDS]
    said += [meta.get(name) for name in _META_FIELDS] if isinstance(meta, Mapping) else []
    return next((number for number in said if isinstance(number, int) and number > 0), None)


class _Reading:
    """One answer, from its first chunk to its last."""

    def __init__(self, service: Service, history: History) -> None:
        self.has_begun = False
        self._service = service
        self._history = history
        self._calls = Calls()
        self._kept: dict[str, Kept] = {}
        self._thoughts: list[Json] = []
        self._reason: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: Any) -> Iterator[Event]:
        self.has_begun = True
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices or ():
            if choice.delta is not None:
                yield from self._grown(choice.delta)
            if choice.finish_reason:
                self._reason = _REASONS.get(choice.finish_reason, FinishReason.STOP)

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where the model had not come to an end."""
        if self._reason is None:
            raise self._service.broke_off()
        self._keep()
        # Some servers say `stop` whatever the model did.
        is_calling = self._calls.ids and self._reason is FinishReason.STOP
        yield Finished(0, FinishReason.TOOL_CALLS if is_calling else self._reason)
        yield Completed(self._usage, Timings(), LookupRecord())

    def _grown(self, delta: Any) -> Iterator[Event]:
        extra = delta.model_extra or {}
        for name in ("reasoning_content", "reasoning"):
            if isinstance(text := extra.get(name), str) and text:
                self._history.reasoning_field = name
                yield ReasoningDelta(0, text)
                break
        self._thoughts += extra.get("reasoning_details") or ()
        if text := delta.content or delta.refusal:
            yield TextDelta(0, text)
        for call in delta.tool_calls or ():
            yield from self._called(call)

    def _called(self, call: Any) -> Iterator[Event]:
        function, index = call.function, getattr(call, "index", None)
        name, arguments = (function.name, function.arguments) if function is not None else (None, None)
        yield from self._calls.piece(index, call.id, name, arguments or "")
        if call.model_extra:
            self._kept.setdefault(self._calls.id_of(index), Kept()).call |= call.model_extra

    def _keep(self) -> None:
        ids = self._calls.ids
        if ids and self._thoughts:
            self._kept.setdefault(ids[0], Kept()).message = {"reasoning_details": self._thoughts}
        for call_id, kept in self._kept.items():
            self._history.kept.keep(call_id, kept)


def _usage(said: Any) -> Usage:
    prompt, completion = said.prompt_tokens_details, said.completion_tokens_details
    return Usage(
        said.prompt_tokens or 0,
        said.completion_tokens or 0,
        (prompt and prompt.cached_tokens) or 0,
        (completion and completion.reasoning_tokens) or 0,
    )
