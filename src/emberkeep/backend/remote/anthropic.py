"""Anthropic's Claude, through its own SDK."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import anthropic

from emberkeep.backend.remote.base import (
    Keepsakes,
    RemoteAbout,
    Service,
    anonymous_id,
    chosen_sampling,
    client_options,
    json_format,
)
from emberkeep.chat.messages import marked_system
from emberkeep.errors import InvalidField
from emberkeep.types.events import (
    Completed,
    Event,
    Events,
    Finished,
    FinishReason,
    LookupRecord,
    Marked,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, Json, Message, Request, Tool, ToolChoice, Ttl

Block = dict[str, Any]

_REASONS = {
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
}
_MAX_TOKENS = 4096
_CACHED_TURNS = 2
_SAMPLED = ("temperature", "top_p", "top_k")
_JSON_ONLY = "Answer with one JSON value and nothing else."
_LEFT_OUT = "(Earlier messages are left out.)"
_LONG = "ephemeral_1h_input_tokens"
_SYSTEM_ROLES = ("system", "developer")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL)


class AnthropicProvider:
    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        self._remote = remote
        self._service = Service.of(remote, "Anthropic", key)
        self._client = anthropic.AsyncAnthropic(api_key=key, base_url=remote.base_url, **client_options(anthropic))
        self._kept: Keepsakes[list[Block]] = Keepsakes()

    async def answer(self, request: Request) -> Events:
        body = _request_body(request, self._remote, self._kept)
        reader = _AnswerReader(self._service, self._kept)
        with self._service.translate_errors(anthropic):
            stream = await self._client.messages.create(**body, stream=True)
        with self._service.translate_errors(anthropic, is_reading=True):
            async with stream:
                async for item in stream:
                    for event in reader.read(item):
                        yield event
        if not reader.is_whole:
            raise self._service.broke_off()

    async def about(self) -> RemoteAbout:
        with self._service.translate_errors(anthropic):
            models = [model async for model in self._client.models.list(limit=1000)]
        used = next((model for model in models if model.id == self._remote.model), None)
        return RemoteAbout(tuple(model.id for model in models), used.max_input_tokens if used else None)

    async def close(self) -> None:
        await self._client.close()


class _AnswerReader:
    """One answer, from its first event to its last."""

    def __init__(self, service: Service, kept: Keepsakes[list[Block]]) -> None:
        self.is_whole = False
        self._service = service
        self._kept = kept
        self._thought: list[Block] = []
        self._calls: list[str] = []
        self._has_arguments = False
        self._reason = FinishReason.STOP
        self._stop: str | None = None
        self._counts: Counter[str] = Counter()

    def read(self, item: Any) -> Iterator[Event]:
        match item.type:
            case "message_start":
                self._count(item.message.usage)
            case "content_block_start":
                yield from self._start_block(item.content_block)
            case "content_block_delta":
                yield from self._read_delta(item.delta)
            case "content_block_stop":
                yield from self._end_block()
            case "message_delta":
                self._count(item.usage)
                self._read_stop(item.delta)
            case "message_stop":
                yield from self._complete()

    def _start_block(self, block: Any) -> Iterator[Event]:
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

    def _read_delta(self, delta: Any) -> Iterator[Event]:
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

    def _end_block(self) -> Iterator[Event]:
        # A tool without parameters is called with no arguments at all.
        if not self._has_arguments:
            yield ToolCallDelta(0, len(self._calls) - 1, None, None, "{}")

    def _read_stop(self, delta: Any) -> None:
        if delta.stop_reason == "refusal":
            details = getattr(delta, "stop_details", None)
            raise self._service.declined((details and details.explanation) or "")
        self._reason = _REASONS.get(delta.stop_reason, FinishReason.STOP)
        self._stop = delta.stop_sequence

    def _complete(self) -> Iterator[Event]:
        self.is_whole = True
        if self._calls and self._thought:
            self._kept[self._calls[0]] = self._thought
        yield Finished(0, self._reason, self._stop)
        yield Completed(self._usage(), Timings(), LookupRecord())

    def _count(self, usage: Any) -> None:
        """Every count is cumulative; one that is left out has not changed."""
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"):
            if (count := getattr(usage, name, None)) is not None:
                self._counts[name] = count
        if details := getattr(usage, "output_tokens_details", None):
            self._counts["thinking_tokens"] = details.thinking_tokens
        if created := getattr(usage, "cache_creation", None):
            # In the last event the client's library does not know it, and leaves it as it came.
            long = created.get(_LONG) if isinstance(created, dict) else getattr(created, _LONG)
            self._counts["long_tokens"] = long or 0

    def _usage(self) -> Usage:
        counts = self._counts
        cached, created = counts["cache_read_input_tokens"], counts["cache_creation_input_tokens"]
        long = counts["long_tokens"]
        return Usage(
            prompt_tokens=counts["input_tokens"] + created + cached,
            completion_tokens=counts["output_tokens"],
            cached_tokens=cached,
            reasoning_tokens=counts["thinking_tokens"],
            marked=Marked(cached + created if created else 0, cached + long if long else 0),
        )


# ── a request in the form of Anthropic's Messages API ──


def _request_body(request: Request, remote: RemoteModel, kept: Keepsakes[list[Block]]) -> dict[str, Any]:
    """The arguments of `messages.create`. `kept`: the thinking that belongs to earlier tool calls."""
    system, turns = _system(request), _turns(request.messages, kept)
    tools = [_tool(tool) for tool in request.tools]
    if request.use_cache:
        _mark_cached(system, tools, turns, request.ttl)
    body: dict[str, Any] = {
        "model": remote.model,
        "max_tokens": request.max_tokens or remote.max_tokens or _MAX_TOKENS,
        "messages": turns,
        "system": system,
        "tools": tools,
        "tool_choice": _tool_choice(request.tool_choice, request.parallel_tool_calls) if tools else None,
        "stop_sequences": list(request.stop),
        "output_config": _output(request),
        "thinking": _thinking(request),
        "metadata": {"user_id": anonymous_id(request.user)} if request.user else None,
        # The SDK has no arguments for them any more; models that still take them are served.
        "extra_body": chosen_sampling(request.sampling, _SAMPLED),
    }
    return {name: value for name, value in body.items() if value}


def _system(request: Request) -> list[Block]:
    texts = [message.content for message in request.messages[: _system_end(request.messages)]]
    wanted = json_format(request)
    if wanted is not None and wanted.schema is None:
        texts.append(_JSON_ONLY)
    return [block for text in texts for block in _text(text)]


def _system_end(messages: Sequence[Message]) -> int:
    """How many system messages the conversation begins with."""
    others = (place for place, message in enumerate(messages) if message.role not in _SYSTEM_ROLES)
    return next(others, len(messages))


def _turns(messages: Sequence[Message], kept: Keepsakes[list[Block]]) -> list[Block]:
    """User and assistant by turns, the user first: neighbours of one role become one."""
    turns: list[Block] = []
    for message in messages[_system_end(messages) :]:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message, kept)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    if turns and turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": _text(_LEFT_OUT)})
    for turn in turns:
        # Results have to stand before whatever else the user says.
        turn["content"].sort(key=lambda block: turn["role"] == "user" and block["type"] != "tool_result")
    return turns


def _blocks(message: Message, kept: Keepsakes[list[Block]]) -> list[Block]:
    images = [_image(image) for image in message.images]
    if message.role == "tool":
        content = [*_text(message.content), *images]
        result = {"type": "tool_result", "tool_use_id": _id(message.tool_call_id or "")}
        return [{**result, "content": content} if content else result]
    thought = kept.use(message.tool_calls[0].id) if message.tool_calls else None
    calls = [
        {"type": "tool_use", "id": _id(call.id), "name": call.name, "input": _arguments(call.arguments)}
        for call in message.tool_calls
    ]
    # What the system says later, only the user can say.
    text = marked_system(message.content) if message.role in _SYSTEM_ROLES else message.content
    return [*(thought or ()), *_text(text), *images, *calls]


def _text(text: str) -> list[Block]:
    """Content with `text`, or none: the API refuses empty texts."""
    return [{"type": "text", "text": text}] if text.strip() else []


def _image(image: Image) -> Block:
    match = _DATA_URL.fullmatch(image.url)
    if match is None:
        return {"type": "image", "source": {"type": "url", "url": image.url}}
    media_type, _, is_base64, data = match.groups()
    if not is_base64:
        data = b64encode(unquote_to_bytes(data)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type or "image/png", "data": data}}


def _arguments(text: str) -> Mapping[str, Json]:
    """The arguments that a model wrote; what is no object is put into one."""
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _id(call_id: str) -> str:
    """Ids of other backends may have characters that this API refuses."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", call_id) or "call"


def _tool(tool: Tool) -> Block:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "input_schema": schema}


def _tool_choice(choice: ToolChoice, parallel: bool) -> Block:
    if choice.mode == "none":
        return {"type": "none"}
    block: Block = {"type": {"auto": "auto", "required": "any", "named": "tool"}[choice.mode]}
    if choice.name is not None:
        block["name"] = choice.name
    return block if parallel else {**block, "disable_parallel_tool_use": True}


def _output(request: Request) -> Block | None:
    """Raises InvalidField."""
    wanted = json_format(request)
    if wanted is None or wanted.schema is None:
        return None
    try:
        schema = anthropic.transform_schema(dict(wanted.schema))
    except ValueError as error:
        raise InvalidField(wanted.param, f"Anthropic cannot follow this schema ({error}).") from error
    return {"format": {"type": "json_schema", "schema": schema}}


def _thinking(request: Request) -> Block | None:
    """What the request says about thinking; if it says nothing, the model's own default."""
    wanted = request.template_args.get("enable_thinking")
    if wanted is None:
        return None
    return {"type": "adaptive", "display": "summarized"} if wanted else {"type": "disabled"}


def _mark_cached(system: list[Block], tools: list[Block], turns: list[Block], ttl: Ttl | None) -> None:
    """Mark where cached prefixes end. The API allows four marks."""
    mark = {"type": "ephemeral"} if ttl in (None, Ttl.SHORT) else {"type": "ephemeral", "ttl": "1h"}
    users = [turn["content"] for turn in turns if turn["role"] == "user"]
    for blocks in (tools, system, *users[-_CACHED_TURNS:]):
        if blocks:
            blocks[-1]["cache_control"] = mark
