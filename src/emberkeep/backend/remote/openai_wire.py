"""A request in the form of OpenAI's chat completions, as its own service and as servers like it want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emberkeep.backend.remote.asking import Keepsakes, chosen, told_apart, turn_start
from emberkeep.types import (
    DEPTH_HEADER,
    HOPS_HEADER,
    Json,
    JsonFormat,
    Message,
    RemoteModel,
    Request,
    Tool,
    ToolCall,
    ToolChoice,
)

_STANDARD = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one kind of server takes. Fields that it does not know may make it refuse a request."""

    is_vendor: bool = False
    """OpenAI's own service, with what only that has."""
    limit: str = "max_tokens"
    """How it calls the longest answer."""
    sampling: frozenset[str] = _STANDARD


OPENAI = Dialect(is_vendor=True, limit="max_completion_tokens")
COMPATIBLE = Dialect(sampling=_STANDARD | {"top_k", "min_p", "typical_p", "repetition_penalty"})
TRTLLM = Dialect(sampling=_STANDARD | {"top_k", "min_p", "repetition_penalty"})


@dataclass(slots=True)
class Kept:
    """What servers want back with a tool call: signed or encrypted thoughts."""

    message: dict[str, Json] = field(default_factory=dict)
    call: dict[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """What a server has shown about how it wants the past told."""

    kept: Keepsakes[Kept] = field(default_factory=Keepsakes)
    reasoning_field: str = "reasoning_content"


def written(
    request: Request, remote: RemoteModel, model: str, dialect: Dialect, history: History
) -> dict[str, Any]:
    """The arguments of `chat.completions.create`."""
    sampling = {name: value for name, value in chosen(request.sampling).items() if name in dialect.sampling}
    limit = request.max_tokens if request.max_tokens is not None else remote.max_tokens
    body: dict[str, Any] = {
        "model": model,
        "messages": messages(request.messages, dialect, history),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_tools(request),
        "response_format": _format(request.format),
        "stop": list(request.stop) or None,
        dialect.limit: limit,
        **{name: value for name, value in sampling.items() if name in _STANDARD},
        "extra_body": {name: value for name, value in sampling.items() if name not in _STANDARD},
        "extra_headers": {},
    }
    _address_vendor(body, request) if dialect.is_vendor else _address_server(body, request)
    return {name: value for name, value in body.items() if value is not None and value != {}}


def _address_vendor(body: dict[str, Any], request: Request) -> None:
    body["prompt_cache_key"] = request.conversation_id or request.cache_key
    body["safety_identifier"] = told_apart(request.user)


def _address_server(body: dict[str, Any], request: Request) -> None:
    body["user"] = request.user or None
    if request.template_args:
        body["extra_body"]["chat_template_kwargs"] = dict(request.template_args)
    body["extra_headers"][HOPS_HEADER] = str(request.hops + 1)
    if request.depth:
        body["extra_headers"][DEPTH_HEADER] = str(request.depth)


def messages(sent: Sequence[Message], dialect: Dialect, history: History) -> list[dict[str, Json]]:
    start = turn_start(sent)
    return [_message(message, dialect, history, thinks_on=place >= start) for place, message in enumerate(sent)]


def _message(message: Message, dialect: Dialect, history: History, *, thinks_on: bool) -> dict[str, Json]:
    """`thinks_on`: the model is in the middle of a turn. Thoughts of earlier turns are refused by some servers."""
    known_role = message.role != "developer" or dialect.is_vendor
    written: dict[str, Json] = {"role": message.role if known_role else "system", "content": _content(message)}
    if message.role == "tool":
        return {**written, "tool_call_id": message.tool_call_id or ""}
    if message.name:
        written["name"] = message.name
    if message.reasoning and thinks_on and not dialect.is_vendor:
        written[history.reasoning_field] = message.reasoning
    for call in message.tool_calls:
        kept = history.kept.get(call.id) or Kept()
        written |= kept.message
        written.setdefault("tool_calls", []).append({**kept.call, **_call(call)})
    return written


def _content(message: Message) -> Json:
    if not message.images:
        return message.content
    text = [{"type": "text", "text": message.content}] if message.content else []
    return [*text, *({"type": "image_url", "image_url": {"url": image.url}} for image in message.images)]


def _call(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


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


def _is_strict(schema: Json) -> bool:
    """Whether OpenAI can hold an answer to it: it refuses a strict schema whose objects are not closed."""
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
