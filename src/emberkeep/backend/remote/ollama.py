"""Ollama through its own SDK."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, cast

import httpx
from ollama import AsyncClient, ChatResponse, Image, ResponseError

from emberkeep.backend.remote.base import Provider, RemoteAbout, first_model
from emberkeep.backend.remote.service import CONNECT_S, READ_S, Service, retry_after, ssl_context
from emberkeep.backend.remote.vendor_wire import (
    CallPieces,
    arguments_of,
    chosen_sampling,
    inline_image,
    json_format,
    turn_start,
)
from emberkeep.errors import RequestError
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
from emberkeep.types.request import Image as Picture
from emberkeep.types.request import Json, Message, Request, Tool

_USUAL_URL = "http://127.0.0.1:11434"
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
}
_PROPERTY_FIELDS = frozenset({"type", "items", "description", "enum", "title", "default"})


def open_ollama(remote: RemoteModel, key: str | None) -> Provider:
    """The server may need no key."""
    return OllamaProvider(remote, key)


class OllamaProvider:
    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        self._remote = remote
        self._service = Service.of(remote, "Ollama", key)
        self._client = AsyncClient(
            remote.base_url or _USUAL_URL,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            verify=ssl_context(),
            follow_redirects=False,  # a conversation is only for the host that it was sent to
            auth=_authorization(key),
            event_hooks={"response": [self._check]},
        )
        self._model = remote.model

    async def answer(self, request: Request) -> Events:
        body = _request_body(request, self._remote, await self._model_name(), self._service)
        reader = _AnswerReader(self._service, most_calls=None if request.parallel_tool_calls else 1)
        with self._translate_errors(reader):
            parts = cast(AsyncGenerator[ChatResponse, None], await self._client.chat(**body, stream=True))
            async with aclosing(parts):
                async for part in parts:
                    for event in reader.read(part):
                        yield event
        for event in reader.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translate_errors():
            served = [model.model or "" for model in (await self._client.list()).models]
            used = self._remote.model or next(iter(served), "")
            return RemoteAbout(tuple(served), await self._context(used) if used else None)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # the SDK's method has no hints

    async def _context(self, model: str) -> int | None:
        """The context of the loaded model, or the one it would be loaded with, or the largest possible one."""
        for loaded in (await self._client.ps()).models:
            if loaded.model in (model, f"{model}:latest") and loaded.context_length:
                return loaded.context_length
        shown = await self._client.show(model)
        for line in (shown.parameters or "").splitlines():
            if line.split()[:1] == ["num_ctx"]:
                return int(line.split()[1])
        known = (shown.modelinfo or {}).items()
        return next((size for name, size in known if name.endswith(".context_length")), None)

    async def _model_name(self) -> str:
        self._model = self._model or await first_model(self, f"{self._service} serves no model: pull one there.")
        return self._model

    async def _check(self, response: httpx.Response) -> None:
        """Check the status here, because the SDK's own errors have no headers."""
        if response.is_error:
            await response.aread()
            said, wait_s = ResponseError(response.text).error, retry_after(response.headers)
            raise self._service.failure(response.status_code, said if isinstance(said, str) else "", wait_s)

    @contextmanager
    def _translate_errors(self, reader: _AnswerReader | None = None) -> Iterator[None]:
        try:
            yield
        except ResponseError as error:
            raise self._service.failure(500, str(error.error)) from None
        except ConnectionError:  # the SDK's, with a whole paragraph
            raise self._service.unreachable(ConnectionError("is it running?")) from None
        except httpx.HTTPError as error:
            has_begun = reader is not None and reader.has_begun
            raise self._service.disconnected(error, has_begun=has_begun) from None
        except (ValueError, AttributeError) as error:
            raise self._service.unreadable(error) from None


def _authorization(key: str | None) -> Callable[[httpx.Request], httpx.Request]:
    """Without a key none is sent, whatever the SDK finds in the environment: it may be for another server."""

    def authorize(request: httpx.Request) -> httpx.Request:
        request.headers.pop("authorization", None)
        if key:
            request.headers["authorization"] = f"Bearer {key}"
        return request

    return authorize


class _AnswerReader:
    """One answer, from its first part to its last."""

    def __init__(self, service: Service, most_calls: int | None) -> None:
        self.has_begun = False
        self._service = service
        self._most_calls = most_calls
        self._calls = CallPieces()
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


# ── a request in the form of Ollama's SDK ──


def _request_body(request: Request, remote: RemoteModel, model: str, service: Service) -> dict[str, Any]:
    """The arguments of `chat`. It has no choice of tools: those that shall not be called are left out.

    Raises RequestError for images that are elsewhere.
    """
    wanted, choice = json_format(request), request.tool_choice
    tools = [tool for tool in request.tools if choice.mode != "named" or tool.name == choice.name]
    return {
        "model": model,
        "messages": _messages(request.messages, service),
        "tools": [] if choice.mode == "none" else [_tool(tool) for tool in tools],
        "think": request.template_args.get("enable_thinking"),
        "format": (wanted.schema or "json") if wanted else None,
        "options": _options(request, remote) or None,
    }


def _options(request: Request, remote: RemoteModel) -> dict[str, Json]:
    limit = request.max_tokens if request.max_tokens is not None else remote.max_tokens
    named = {_OPTIONS[name]: value for name, value in chosen_sampling(request.sampling, _OPTIONS).items()}
    options = {"num_ctx": remote.ctx, "num_predict": limit, "stop": list(request.stop) or None, **named}
    return {name: value for name, value in options.items() if value is not None}


def _messages(sent: Sequence[Message], service: Service) -> list[dict[str, Any]]:
    start, names = turn_start(sent), {call.id: call.name for message in sent for call in message.tool_calls}
    return [
        {"role": "tool", "content": message.content, "tool_name": names.get(message.tool_call_id or "")}
        if message.role == "tool"
        else _message(message, service, thinks_on=place >= start)
        for place, message in enumerate(sent)
    ]


def _message(message: Message, service: Service, *, thinks_on: bool) -> dict[str, Any]:
    """`thinks_on`: the model is in the middle of a turn, and gets its thoughts of this turn back."""
    calls = [
        {"function": {"name": call.name, "arguments": arguments_of(call.arguments)}} for call in message.tool_calls
    ]
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
        "thinking": message.reasoning if thinks_on else None,
        "images": [_image(image, service) for image in message.images],
        "tool_calls": calls,
    }


def _image(image: Picture, service: Service) -> Image:
    """Raises RequestError, also for an address: Ollama fetches nothing, and we do not do it for strangers."""
    found = inline_image(image)
    if found is None:
        raise RequestError(f"{service} takes no addresses of images: send a data: URL.", "messages")
    try:
        # As bytes: what looks like a path would be read from our disk.
        return Image(value=b64decode(found.base64))
    except ValueError:
        raise RequestError("An image is no base64: send a whole data: URL.", "messages") from None


def _tool(tool: Tool) -> dict[str, Json]:
    properties = {name: _property(schema) for name, schema in tool.parameters.get("properties", {}).items()}
    parameters = {"type": "object", **tool.parameters, "properties": properties}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _property(schema: Json) -> Json:
    """A property for the SDK. What the SDK has no field for is put into the description."""
    if not isinstance(schema, Mapping) or schema.keys() <= _PROPERTY_FIELDS:
        return schema
    rest = {name: value for name, value in schema.items() if name != "description"}
    told = f"{schema.get('description', '')} JSON schema: {json.dumps(rest)}".strip()
    return {**schema, "description": told}
