"""OpenAI through its own SDK, and every server that speaks like it: vLLM, SGLang, llama-server, Emberkeep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
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

from emberkeep.api.messages import call_json, content_json
from emberkeep.backend.remote.base import Provider, RemoteAbout, first_model
from emberkeep.backend.remote.service import CONNECT_S, READ_S, Service, required_key, retry_after, ssl_context
from emberkeep.backend.remote.vendor_wire import (
    CallPieces,
    Keepsakes,
    anonymous_id,
    chosen_sampling,
    json_format,
    turn_start,
)
from emberkeep.errors import EmberkeepError
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
from emberkeep.types.models import DEPTH_HEADER, HOPS_HEADER, RemoteModel
from emberkeep.types.request import Json, JsonFormat, Message, Request, Tool, ToolChoice
from emberkeep.values import dataclass

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
_STANDARD = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias"})


def open_openai(remote: RemoteModel, key: str | None) -> Provider:
    """Servers elsewhere may need no key."""
    if _is_vendor(remote):
        return OpenAIProvider(remote, required_key(remote, key, "OPENAI_API_KEY"), OPENAI)
    return OpenAIProvider(remote, key, COMPATIBLE)


def _is_vendor(remote: RemoteModel) -> bool:
    host = urlsplit(remote.base_url or _VENDOR_URL).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")


def api_url(base_url: str) -> str:
    """An address without a path is that of a server, whose API is where OpenAI's is."""
    return base_url if urlsplit(base_url).path.strip("/") else f"{base_url.rstrip('/')}/v1"


class OpenAIProvider:
    def __init__(self, remote: RemoteModel, key: str | None, dialect: ServerDialect) -> None:
        self._remote = remote
        self._dialect = dialect
        self._service = Service.of(remote, "OpenAI", key)
        self._client = _client(remote, key, dialect)
        # The SDK must be told with every request that none is to be sent.
        self._headers: dict[str, Any] = {} if key else {"Authorization": Omit()}
        self._history = ReplayedHistory()
        self._model = remote.model

    async def answer(self, request: Request) -> Events:
        body = _request_body(request, self._remote, await self._model_name(), self._dialect, self._history)
        body["extra_headers"] = {**self._headers, **body.get("extra_headers", {})}
        reader = _AnswerReader(self._service, self._history)
        with self._translate_errors(reader):
            async with await self._client.chat.completions.create(**body) as stream:
                async for chunk in stream:
                    for event in reader.read(chunk):
                        yield event
        for event in reader.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._translate_errors():
            models = (await self._client.models.list(extra_headers=self._headers)).data
            used = next((model for model in models if self._remote.model in ("", model.id)), None)
            context = _context(used.model_extra or {}) if used else None
            return RemoteAbout(tuple(model.id for model in models), context)

    async def close(self) -> None:
        await self._client.close()

    async def _model_name(self) -> str:
        self._model = self._model or await first_model(self, f"{self._service} serves no model: load one there.")
        return self._model

    @contextmanager
    def _translate_errors(self, reader: _AnswerReader | None = None) -> Iterator[None]:
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except APIStatusError as error:
            raise self._failure(error, error.status_code, retry_after(error.response.headers)) from None
        except (APIConnectionError, httpx2.HTTPError) as error:
            has_begun = reader is not None and reader.has_begun
            raise self._service.disconnected(error.__cause__ or error, has_begun=has_begun) from None
        except APIError as error:
            raise self._failure(error, _status_in_stream(error)) from None
        except (OpenAIError, ValueError, TypeError, AttributeError) as error:  # the SDK checks nothing it reads
            raise self._service.unreadable(error) from None

    def _failure(self, error: APIError, status: int, wait_s: float | None = None) -> EmberkeepError:
        said = error.body.get("message") if isinstance(error.body, Mapping) else error.body
        is_full = error.code in _FULL_CODES or error.type in _FULL_CODES
        return self._service.failure(413 if is_full else status, said if isinstance(said, str) else "", wait_s)


def _client(remote: RemoteModel, key: str | None, dialect: ServerDialect) -> AsyncOpenAI:
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
        # A conversation is only for the host that it was sent to, not for one that this host redirects to.
        http_client=DefaultAsyncHttpxClient(verify=ssl_context(), timeout=timeout, follow_redirects=False),
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


class _AnswerReader:
    """One answer, from its first chunk to its last."""

    def __init__(self, service: Service, history: ReplayedHistory) -> None:
        self.has_begun = False
        self._service = service
        self._history = history
        self._calls = CallPieces()
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
                yield from self._read_delta(choice.delta)
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

    def _read_delta(self, delta: Any) -> Iterator[Event]:
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
            yield from self._read_call(call)

    def _read_call(self, call: Any) -> Iterator[Event]:
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
        (completion and completion.accepted_prediction_tokens) or 0,
        (completion and completion.rejected_prediction_tokens) or 0,
    )


# ── a request in the form of chat completions ──


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """Which fields one kind of server accepts. It may refuse a request with unknown fields."""

    is_vendor: bool = False
    """OpenAI's own service, with what only that has."""
    limit: str = "max_tokens"
    """Its name for the limit of an answer."""
    sampling: frozenset[str] = _STANDARD
    takes_prediction: bool = True


OPENAI = ServerDialect(is_vendor=True, limit="max_completion_tokens")
COMPATIBLE = ServerDialect(sampling=_STANDARD | {"top_k", "min_p", "typical_p", "repetition_penalty"})
TRTLLM = ServerDialect(sampling=_STANDARD | {"top_k", "min_p", "repetition_penalty"}, takes_prediction=False)


@dataclass(slots=True)
class Kept:
    """What servers want back with a tool call: signed or encrypted thoughts."""

    message: dict[str, Json] = field(default_factory=dict)
    call: dict[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class ReplayedHistory:
    """How a server wants the history to be sent, learned from its answers."""

    kept: Keepsakes[Kept] = field(default_factory=Keepsakes)
    reasoning_field: str = "reasoning_content"


def _request_body(
    request: Request, remote: RemoteModel, model: str, dialect: ServerDialect, history: ReplayedHistory
) -> dict[str, Any]:
    """The arguments of `chat.completions.create`."""
    sampling = chosen_sampling(request.sampling, dialect.sampling)
    limit = request.max_tokens if request.max_tokens is not None else remote.max_tokens
    body: dict[str, Any] = {
        "model": model,
        "messages": _messages(request.messages, dialect, history),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_tools(request),
        "response_format": _format(json_format(request)),
        "stop": list(request.stop) or None,
        "prediction": _prediction(request.prediction) if dialect.takes_prediction else None,
        dialect.limit: limit,
        **{name: value for name, value in sampling.items() if name in _STANDARD},
        "extra_body": {name: value for name, value in sampling.items() if name not in _STANDARD},
        "extra_headers": {},
    }
    _address_vendor(body, request) if dialect.is_vendor else _address_server(body, request)
    return {name: value for name, value in body.items() if value is not None and value != {}}


def _address_vendor(body: dict[str, Any], request: Request) -> None:
    body["prompt_cache_key"] = request.conversation_id or request.cache_key
    body["safety_identifier"] = anonymous_id(request.user)


def _address_server(body: dict[str, Any], request: Request) -> None:
    body["user"] = request.user or None
    if request.template_args:
        body["extra_body"]["chat_template_kwargs"] = dict(request.template_args)
    body["extra_headers"][HOPS_HEADER] = str(request.execution.hops + 1)
    if request.execution.depth:
        body["extra_headers"][DEPTH_HEADER] = str(request.execution.depth)


def _messages(sent: Sequence[Message], dialect: ServerDialect, history: ReplayedHistory) -> list[dict[str, Json]]:
    start = turn_start(sent)
    return [_message(message, dialect, history, thinks_on=place >= start) for place, message in enumerate(sent)]


def _message(
    message: Message, dialect: ServerDialect, history: ReplayedHistory, *, thinks_on: bool
) -> dict[str, Json]:
    """`thinks_on`: the model is in the middle of a turn. Thoughts of earlier turns are refused by some servers."""
    known_role = message.role != "developer" or dialect.is_vendor
    written: dict[str, Json] = {"role": message.role if known_role else "system", "content": content_json(message)}
    if message.role == "tool":
        return {**written, "tool_call_id": message.tool_call_id or ""}
    if message.name:
        written["name"] = message.name
    if message.reasoning and thinks_on and not dialect.is_vendor:
        written[history.reasoning_field] = message.reasoning
    for call in message.tool_calls:
        kept = history.kept.get(call.id) or Kept()
        written |= kept.message
        written.setdefault("tool_calls", []).append({**kept.call, **call_json(call)})
    return written


def _tools(request: Request) -> dict[str, Json]:
    if not request.tools:
        return {}
    written: dict[str, Json] = {
        "tools": [{"type": "function", "function": _function(tool)} for tool in request.tools],
        # Also where it is the usual one: older TensorRT-LLM servers call nothing unless asked to.
        "tool_choice": _tool_choice(request.tool_choice),
    }
    return written if request.parallel_tool_calls else {**written, "parallel_tool_calls": False}


def _function(tool: Tool) -> dict[str, Json]:
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _tool_choice(choice: ToolChoice) -> Json:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode


def _format(wanted: JsonFormat | None) -> Json:
    if wanted is None:
        return None
    if wanted.schema is None:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": dict(wanted.schema), "strict": _is_strict(wanted.schema)}
    return {"type": "json_schema", "json_schema": schema}


def _prediction(expected: str) -> Json:
    return {"type": "content", "content": expected} if expected else None


def _is_strict(schema: Json) -> bool:
    """Whether OpenAI accepts it as strict: all objects of a strict schema must be closed."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, Mapping):
        required = schema.get("required") or ()
        if schema.get("additionalProperties") is not False or set(properties or ()) != set(required):
            return False
    return all(map(_is_strict, schema.values()))
