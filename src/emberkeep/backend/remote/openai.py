"""OpenAI, and every server that speaks its chat completions, through OpenAI's SDK.

What differs among them is data: a row of `backend/remote/vendors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any, cast
from urllib.parse import quote

import openai

from emberkeep.api.kinds import call_json
from emberkeep.api.openai_chat import content_json
from emberkeep.backend.remote.base import (
    Keepsakes,
    RemoteAbout,
    Service,
    anonymous_id,
    chosen_sampling,
    client_options,
    json_format,
)
from emberkeep.backend.remote.vendors import VENDORS, Vendor, api_url, vendor_of
from emberkeep.errors import RemoteError
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
from emberkeep.types.models import DEPTH_HEADER, HOPS_HEADER, RemoteModel
from emberkeep.types.request import Json, JsonFormat, Message, Request, Tool, new_call_id
from emberkeep.values import dataclass

_REASONS = {"length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS}
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
_META_FIELDS = ("n_ctx", "n_ctx_train")


class OpenAIProvider:
    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        self._remote = remote
        self._vendor = vendor_of(remote)
        self._service = Service.of(remote, self._vendor.title, key)
        # What the environment says about an account at OpenAI is not for others to know.
        private = {name: cast(str, openai.Omit()) for name in ("OpenAI-Organization", "OpenAI-Project")}
        self._client = openai.AsyncOpenAI(
            api_key=key or "",
            admin_api_key="",
            base_url=api_url(remote),
            default_headers=None if self._vendor is VENDORS["openai"] else private,
            **client_options(openai),
        )
        # The SDK must be told with every request that no key is to be sent.
        self._headers: dict[str, Any] = {} if key else {"Authorization": openai.Omit()}
        self._history = ReplayedHistory(self._vendor.thoughts)
        self._model = remote.model

    async def answer(self, request: Request) -> Events:
        model = await self._model_name()
        body = _request_body(request, self._remote.max_tokens, self._vendor, self._history)
        headers = {**self._headers, **_request_headers(request, self._vendor)}
        is_single = not (request.parallel_tool_calls or self._vendor.has_parallel_calls)
        reader = _AnswerReader(self._service, self._history, is_single=is_single)
        with self._service.translate_errors(openai):
            # Nearly all of it is extra: which fields a server has is not what the SDK believes.
            stream = await self._client.chat.completions.create(
                model=model, messages=[], stream=True, extra_body=body, extra_headers=headers
            )
        with self._service.translate_errors(openai, is_reading=True):
            async with stream:
                async for chunk in stream:
                    for event in reader.read(chunk):
                        yield event
        for event in reader.end():
            yield event

    async def about(self) -> RemoteAbout:
        with self._service.translate_errors(openai):
            models = (await self._client.models.list(extra_headers=self._headers)).data
            cards = {one.id.removeprefix(self._vendor.model_prefix): one.model_extra or {} for one in models}
            used = self._remote.model or next(iter(cards), "")
            is_ollama = self._vendor.has_ollama_api and used
            return RemoteAbout(
                tuple(cards), await self._loaded_context(used) if is_ollama else _context(cards.get(used, {}))
            )

    async def close(self) -> None:
        await self._client.close()

    async def _model_name(self) -> str:
        if not self._model:
            served = (await self.about()).models
            if not served:
                raise RemoteError(f"{self._service} serves no model: load one there.")
            self._model = served[0]
        return self._model

    async def _loaded_context(self, model: str) -> int | None:
        """The context of a model that Ollama has loaded, or that its Modelfile sets. For other models Ollama has a
        default that it does not tell."""
        options: Any = {"headers": self._headers}
        with suppress(openai.NotFoundError):  # a proxy may have OpenAI's endpoints only
            running: Any = await self._client.get(self._beside("/api/ps"), cast_to=object, options=options)
            for loaded in running["models"]:
                if loaded.get("model") in (model, f"{model}:latest") and loaded.get("context_length"):
                    return int(loaded["context_length"])
            url, body = self._beside("/api/show"), {"model": model}
            shown: Any = await self._client.post(url, cast_to=object, body=body, options=options)
            for line in (shown.get("parameters") or "").splitlines():
                if line.split()[:1] == ["num_ctx"]:
                    return int(line.split()[1])
        return None

    def _beside(self, path: str) -> str:
        """The address of an endpoint of the same server that is not OpenAI's."""
        return f"{str(self._client.base_url).rstrip('/').removesuffix('/v1')}{path}"


def _context(card: Mapping[str, Json]) -> int | None:
    """The context that a server tells in its list of models."""
    meta = card.get("meta")
    values = [card.get(name) for name in _CONTEXT_FIELDS]
    values += [meta.get(name) for name in _META_FIELDS] if isinstance(meta, Mapping) else []
    return next((value for value in values if isinstance(value, int) and value > 0), None)


# ── an answer, from its first chunk to its last ──


class _AnswerReader:
    def __init__(self, service: Service, history: ReplayedHistory, *, is_single: bool) -> None:
        """`is_single`: only the first tool call is passed on."""
        self._service = service
        self._history = history
        self._is_single = is_single
        self._calls = CallPieces()
        self._kept: dict[str, Kept] = {}
        self._thoughts: list[Json] = []
        self._in_thought = False
        self._reason: FinishReason | None = None
        self._usage = Usage()

    def read(self, chunk: Any) -> Iterator[Event]:
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices or ():
            if choice.delta is not None:
                yield from self._read_delta(choice.delta)
            if choice.finish_reason:
                self._reason = self._finish_reason(choice.finish_reason)

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
            if isinstance(thought := extra.get(name), str) and thought:
                self._history.thoughts = self._history.thoughts and name
                yield ReasoningDelta(0, thought)
                break
        self._thoughts += extra.get("reasoning_details") or ()
        thought, text = self._split(delta.content or delta.refusal or "", extra)
        if thought:
            yield ReasoningDelta(0, thought)
        if text:
            yield TextDelta(0, text)
        for call in delta.tool_calls or ():
            yield from self._read_call(call)

    def _split(self, content: str, extra: Mapping[str, Json]) -> tuple[str, str]:
        """Thought and text. Google marks chunks of thought, and writes tags around the whole thought as well."""
        if ((extra.get("extra_content") or {}).get("google") or {}).get("thought"):
            self._in_thought = True
            thought, end, text = content.partition("</thought>")
            self._in_thought = not end
            return thought.removeprefix("<thought>"), text
        was_in_thought, self._in_thought = self._in_thought, False
        return "", content.removeprefix("</thought>") if was_in_thought else content

    def _read_call(self, call: Any) -> Iterator[Event]:
        function = call.function
        name, arguments = (function.name, function.arguments) if function is not None else (None, None)
        delta = self._calls.piece(getattr(call, "index", None), call.id, name, arguments or "")
        if delta is not None and not (self._is_single and delta.call_index):
            yield delta
        if call.model_extra:
            place = delta.call_index if delta is not None else -1
            self._kept.setdefault(self._calls.ids[place], Kept()).call |= call.model_extra

    def _finish_reason(self, reason: str) -> FinishReason:
        if reason.startswith("content_filter"):
            raise self._service.declined(reason)
        if reason.startswith("function_call_filter"):  # Google's, for calls that could not be read
            raise RemoteError(f"{self._service} failed to write its answer ({reason}): ask again.")
        return _REASONS.get(reason, FinishReason.STOP)

    def _keep(self) -> None:
        ids = self._calls.ids
        if ids and self._thoughts:
            self._kept.setdefault(ids[0], Kept()).message = {"reasoning_details": self._thoughts}
        for call_id, kept in self._kept.items():
            self._history.kept[call_id] = kept


def _usage(usage: Any) -> Usage:
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    read, written = usage.prompt_tokens or 0, usage.completion_tokens or 0
    # Some services count the reasoning in the total only.
    hidden = max((getattr(usage, "total_tokens", 0) or 0) - read - written, 0)
    return Usage(
        read,
        written + hidden,
        (prompt and prompt.cached_tokens) or 0,
        (completion and completion.reasoning_tokens) or hidden,
        (completion and completion.accepted_prediction_tokens) or 0,
        (completion and completion.rejected_prediction_tokens) or 0,
    )


class CallPieces:
    """The tool calls of one answer as they are streamed: whole or in pieces, with ids and indices or without."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._places: dict[int, int] = {}
        """Where the call is that has the server's index."""

    def piece(self, index: int | None, id: str | None, name: str | None, arguments: str) -> ToolCallDelta | None:
        """The delta; None if it adds nothing. Without an index, a name begins a new call."""
        place = self._place(index, name)
        # Some servers give every call the same index, and only the ids differ.
        if place is None or (id and id != self.ids[place]):
            place = len(self.ids)
            self.ids.append(id or new_call_id())
            if index is not None:
                self._places[index] = place
            return ToolCallDelta(0, place, self.ids[place], name or "", arguments)
        return ToolCallDelta(0, place, None, None, arguments) if arguments else None

    def _place(self, index: int | None, name: str | None) -> int | None:
        if index is not None:
            return self._places.get(index)
        return len(self.ids) - 1 if self.ids and not name else None


# ── a request in the form of chat completions ──


@dataclass(slots=True)
class Kept:
    """What servers want back with a tool call: signed or encrypted thoughts."""

    message: dict[str, Json] = field(default_factory=dict)
    call: dict[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class ReplayedHistory:
    """How a server wants the history to be sent, learned from its answers."""

    thoughts: str
    """The field for them; empty: the server takes none."""
    kept: Keepsakes[Kept] = field(default_factory=Keepsakes)


def _request_body(
    request: Request, max_tokens: int | None, vendor: Vendor, history: ReplayedHistory
) -> dict[str, Json]:
    conversation = request.conversation_id or request.cache_key
    limit = request.max_tokens if request.max_tokens is not None else max_tokens
    prediction = {"type": "content", "content": request.prediction}
    fields: dict[str, Json] = {
        "messages": _messages(request.messages, vendor, history),
        "stream_options": {"include_usage": True},
        **_tools(request, vendor),
        "response_format": _format(json_format(request)),
        "stop": list(request.stop) or None,
        "prediction": prediction if request.prediction and vendor.has_prediction else None,
        vendor.limit: limit,
        **chosen_sampling(request.sampling, vendor.sampling),
        **_thinking(request, vendor),
    }
    if vendor.conversation:
        fields[vendor.conversation] = conversation
    if vendor.user:
        fields[vendor.user] = (request.user or None) if vendor.is_peer else anonymous_id(request.user)
    return {name: value for name, value in fields.items() if value is not None}


def _request_headers(request: Request, vendor: Vendor) -> dict[str, str]:
    headers: dict[str, str] = {}
    conversation = request.conversation_id or request.cache_key
    if conversation and vendor.conversation_header:
        headers[vendor.conversation_header] = quote(conversation)
    if vendor.is_peer:
        headers[HOPS_HEADER] = str(request.execution.hops + 1)
        if request.execution.depth:
            headers[DEPTH_HEADER] = str(request.execution.depth)
    return headers


def _thinking(request: Request, vendor: Vendor) -> Mapping[str, Json]:
    """What the request says about thinking; if it says nothing, the model's own default."""
    wanted = request.template_args.get("enable_thinking")
    if vendor.thinking:
        return {} if wanted is None else vendor.thinking[bool(wanted)]
    if vendor.is_peer and request.template_args:
        return {"chat_template_kwargs": dict(request.template_args)}
    return {}


def _messages(messages: Sequence[Message], vendor: Vendor, history: ReplayedHistory) -> list[dict[str, Json]]:
    # The current turn begins after the last message of the user.
    start = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    return [_message(one, vendor, history, is_current=place > start) for place, one in enumerate(messages)]


def _message(message: Message, vendor: Vendor, history: ReplayedHistory, *, is_current: bool) -> dict[str, Json]:
    """`is_current`: it belongs to the turn that the model is in. Some servers refuse thoughts of earlier turns."""
    has_role = message.role != "developer" or vendor.has_developer
    written: dict[str, Json] = {"role": message.role if has_role else "system", "content": content_json(message)}
    if message.role == "tool":
        return {**written, "tool_call_id": message.tool_call_id or ""}
    if message.name:
        written["name"] = message.name
    if message.reasoning and is_current and history.thoughts:
        written[history.thoughts] = message.reasoning
    for place, call in enumerate(message.tool_calls):
        # Of several calls at once only the first is signed.
        kept = history.kept.use(call.id) or Kept(call=dict(vendor.unsigned_call) if place == 0 else {})
        written |= kept.message
        written.setdefault("tool_calls", []).append({**kept.call, **call_json(call)})
    return written


def _tools(request: Request, vendor: Vendor) -> dict[str, Json]:
    """Where a server has no choice of tools, those that shall not be called are left out."""
    choice, tools = request.tool_choice, request.tools
    if not vendor.has_tool_choice:
        wanted = {"none": (), "named": (choice.name,)}.get(choice.mode, [tool.name for tool in tools])
        tools = tuple(tool for tool in tools if tool.name in wanted)
    if not tools:
        return {}
    written: dict[str, Json] = {"tools": [{"type": "function", "function": _function(tool)} for tool in tools]}
    if vendor.has_tool_choice:
        named = {"type": "function", "function": {"name": choice.name}}
        # Also where it is the usual one: older TensorRT-LLM servers call nothing unless asked to.
        written["tool_choice"] = named if choice.mode == "named" else choice.mode
    if vendor.has_parallel_calls and not request.parallel_tool_calls:
        written["parallel_tool_calls"] = False
    return written


def _function(tool: Tool) -> dict[str, Json]:
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _format(wanted: JsonFormat | None) -> Json:
    if wanted is None:
        return None
    if wanted.schema is None:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": dict(wanted.schema), "strict": _is_strict(wanted.schema)}
    return {"type": "json_schema", "json_schema": schema}


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
