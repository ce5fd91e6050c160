"""Ollama through its own SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import cast

import httpx
from ollama import AsyncClient, ChatResponse, ResponseError

from emberkeep.backend.remote.asking import CONNECT_S, READ_S, service_of
from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.calls import Calls
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.backend.remote.ollama_wire import written
from emberkeep.backend.remote.tls import trusted
from emberkeep.errors import RemoteError
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

_USUAL_URL = "http://127.0.0.1:11434"


def open_ollama(remote: RemoteModel, key: str | None) -> Provider:
    """A server of one's own needs no key."""
    return OllamaProvider(remote, key)


class OllamaProvider:
    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        self._remote = remote
        self._service = Service(remote.model, service_of(remote, "Ollama"), remote.api_key_env, key)
        self._client = AsyncClient(
            remote.base_url or _USUAL_URL,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            verify=trusted(),
            follow_redirects=False,  # a conversation is for whom it was sent to
            auth=_authorized(key),
            event_hooks={"response": [self._check]},
        )
        self._model = remote.model

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        body = written(request, self._remote, await self._served(), self._service)
        reading = _Reading(self._service, most_calls=None if request.parallel_tool_calls else 1)
        with self._translated(reading):
            parts = cast(AsyncGenerator[ChatResponse, None], await self._client.chat(**body, stream=True))
            async with aclosing(parts):
                async for part in parts:
                    for event in reading.read(part):
                        yield event
        for event in reading.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translated():
            served = [model.model or "" for model in (await self._client.list()).models]
            used = self._remote.model or next(iter(served), "")
            return RemoteAbout(tuple(served), await self._context(used) if used else None)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # the SDK's method has no hints

    async def _context(self, model: str) -> int | None:
        """What a loaded model has, or else would be loaded with, or else could have."""
        for loaded in (await self._client.ps()).models:
            if loaded.model in (model, f"{model}:latest") and loaded.context_length:
                return loaded.context_length
        shown = await self._client.show(model)
        for line in (shown.parameters or "").splitlines():
            if line.split()[:1] == ["num_ctx"]:
                return int(line.split()[1])
        known = (shown.modelinfo or {}).items()
        return next((size for name, size in known if name.endswith(".context_length")), None)

    async def _served(self) -> str:
        if not self._model:
            served = (await self.about()).models
            if not served:
                raise RemoteError(f"{self._service} serves no model: pull one there.")
            self._model = served[0]
        return self._model

    async def _check(self, response: httpx.Response) -> None:
        """Here because the SDK's own errors know no headers."""
        if response.is_error:
            await response.aread()
            said, wait_s = ResponseError(response.text).error, retry_after(response.headers)
            raise self._service.failure(response.status_code, said if isinstance(said, str) else "", wait_s)

    @contextmanager
    def _translated(self, reading: _Reading | None = None) -> Iterator[None]:
        try:
            yield
        except ResponseError as error:
            raise self._service.failure(500, str(error.error)) from None
        except ConnectionError:  # the SDK's, with a whole paragraph
            raise self._service.unreachable(ConnectionError("is it running?")) from None
        except httpx.HTTPError as error:
            if reading is not None and reading.has_begun:
                raise self._service.broke_off() from None
            raise self._service.unreachable(error) from None
        except (ValueError, AttributeError) as error:
            reason = self._service.quoted(str(error))
            raise RemoteError(f"{self._service} gave an answer that cannot be read{reason}.") from None


def _authorized(key: str | None) -> Callable[[httpx.Request], httpx.Request]:
    """Without a key none is sent, whatever the SDK finds in the environment: it may be for another server."""

    def authorize(request: httpx.Request) -> httpx.Request:
        request.headers.pop("authorization", None)
        if key:
            request.headers["authorization"] = f"Bearer {key}"
        return request

    return authorize


class _Reading:
    """One answer, from its first part to its last."""

    def __init__(self, service: Service, most_calls: int | None) -> None:
        self.has_begun = False
        self._service = service
        self._most_calls = most_calls
        self._calls = Calls()
        self._last: ChatResponse | None = None

    def read(self, part: ChatResponse) -> Iterator[Event]:
        self.has_begun = True
        if part.message.thinking:
            yield ReasoningDelta(0, part.message.thinking)
        if part.message.content:
            yield TextDelta(0, part.message.content)
        for call in part.message.tool_calls or ():
            if len(self._calls.ids) != self._most_calls:
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                yield from self._calls.piece(None, None, call.function.name, arguments)
        if part.done:
            self._last = part

    def end(self) -> Iterator[Event]:
        """Raises RemoteDown where the model had not come to an end."""
        if self._last is None:
            raise self._service.broke_off()
        reason = FinishReason.LENGTH if self._last.done_reason == "length" else FinishReason.STOP
        yield Finished(0, FinishReason.TOOL_CALLS if self._calls.ids else reason)
        usage = Usage(self._last.prompt_eval_count or 0, self._last.eval_count or 0)
        yield Completed(usage, Timings(), LookupRecord())
