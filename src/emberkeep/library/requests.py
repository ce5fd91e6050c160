"""From what a Python user writes (texts, OpenAI-style dicts, keywords) to a `Request`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict, get_args

from emberkeep.errors import InvalidField
from emberkeep.types import Json, JsonFormat, Message, Request, Role, Sampling, Tool, ToolCall

Messages = str | Sequence[Message | Mapping[str, Json]]
"""A text is one message of the user."""

Tools = Sequence[Tool | Mapping[str, Json]]


_DEFAULTS = Sampling()


class Options(TypedDict, total=False):
    """Keywords that every kind of generation takes; `build_request` holds their defaults."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    json_schema: Mapping[str, Json] | None
    namespace: str
    use_cache: bool


def build_request(
    *,
    prompt: str | None = None,
    messages: Messages = (),
    tools: Tools | None = None,
    max_tokens: int | None = 256,
    temperature: float = _DEFAULTS.temperature,
    top_p: float = _DEFAULTS.top_p,
    top_k: int = _DEFAULTS.top_k,
    min_p: float = _DEFAULTS.min_p,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    json_schema: Mapping[str, Json] | None = None,
    namespace: str = "",
    use_cache: bool = True,
) -> Request:
    """`max_tokens=None` generates until the model ends or the context is full. Raises InvalidField."""
    if max_tokens is not None and max_tokens < 0:
        raise InvalidField("max_tokens", "give 0 or more, or None for no limit.")
    if temperature < 0:
        raise InvalidField("temperature", "give 0 (always the likeliest token) or more.")
    return Request(
        messages=to_messages(messages),
        prompt=prompt,
        tools=tuple(_to_tool(tool, index) for index, tool in enumerate(tools or ())),
        format=None if json_schema is None else JsonFormat(json_schema),
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed),
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        namespace=namespace,
        use_cache=use_cache,
    )


def to_messages(messages: Messages) -> tuple[Message, ...]:
    """Raises InvalidField for a message that is not in OpenAI's shape."""
    if isinstance(messages, str):
        return (Message("user", messages),)
    return tuple(_to_message(message, index) for index, message in enumerate(messages))


def _to_message(message: Message | Mapping[str, Json], index: int) -> Message:
    if isinstance(message, Message):
        return message
    field = f"messages[{index}]"
    role, content = message.get("role"), message.get("content") or ""
    if role is None or role not in get_args(Role):
        raise InvalidField(f"{field}.role", f"give one of {', '.join(get_args(Role))}.")
    if not isinstance(content, str):
        raise InvalidField(f"{field}.content", "give a text.")
    return Message(
        role=role,
        content=content,
        reasoning=message.get("reasoning_content") or "",
        tool_calls=tuple(_to_tool_call(call, field) for call in message.get("tool_calls") or ()),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name"),
    )


def _to_tool_call(call: ToolCall | Mapping[str, Json], field: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    try:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCall(call["id"], call["function"]["name"], text)
    except (KeyError, TypeError) as error:
        raise InvalidField(f"{field}.tool_calls", "give id and function {name, arguments}.") from error


def _to_tool(tool: Tool | Mapping[str, Json], index: int) -> Tool:
    if isinstance(tool, Tool):
        return tool
    try:
        function = tool["function"]
        return Tool(function["name"], function.get("description", ""), function.get("parameters", {}))
    except (KeyError, TypeError) as error:
        raise InvalidField(f"tools[{index}]", "give {type: function, function: {name, ...}}.") from error
