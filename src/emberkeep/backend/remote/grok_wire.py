"""A request in the form of xAI's SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xai_sdk.chat import image, required_tool, text, tool
from xai_sdk.proto import chat_pb2

from emberkeep.backend.remote.asking import Keepsakes, chosen, told_apart, turn_start
from emberkeep.types import JsonFormat, Message, RemoteModel, Request, Sampling, ToolCall, ToolChoice

_SAMPLED = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_LARGEST_SEED = 2**31 - 1
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}


def written(request: Request, remote: RemoteModel, model: str, kept: Keepsakes[str]) -> dict[str, Any]:
    """The arguments of `chat.create`. `kept`: the encrypted thoughts that belong to earlier tool calls."""
    body: dict[str, Any] = {
        "model": model,
        "messages": _messages(request.messages, kept),
        "max_tokens": request.max_tokens if request.max_tokens is not None else remote.max_tokens,
        "stop": list(request.stop) or None,
        "response_format": _format(request.format),
        "safety_identifier": told_apart(request.user),
        **_sampling(request.sampling),
    }
    if request.tools:
        body["tools"] = [tool(one.name, one.description, _parameters(one.parameters)) for one in request.tools]
        body["tool_choice"] = _tool_choice(request.tool_choice)
        body["parallel_tool_calls"] = None if request.parallel_tool_calls else False
        body["use_encrypted_content"] = True
    return {name: value for name, value in body.items() if value is not None}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    picked = {name: value for name, value in chosen(sampling).items() if name in _SAMPLED}
    if "seed" in picked:
        picked["seed"] &= _LARGEST_SEED
    return picked


def _parameters(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {}, **schema}


def _messages(sent: Sequence[Message], kept: Keepsakes[str]) -> list[chat_pb2.Message]:
    start = turn_start(sent)
    return [_message(message, kept, thinks_on=place >= start) for place, message in enumerate(sent)]


def _message(message: Message, kept: Keepsakes[str], *, thinks_on: bool) -> chat_pb2.Message:
    """`thinks_on`: the model is in the middle of a turn, and gets back what it has thought so far."""
    encrypted = next(filter(None, (kept.get(call.id) for call in message.tool_calls)), "")
    return chat_pb2.Message(
        role=_ROLES[message.role],
        content=[text(message.content), *(image(one.url) for one in message.images)],
        name=message.name or "",
        reasoning_content=message.reasoning if thinks_on and message.reasoning else None,
        encrypted_content=encrypted,
        tool_calls=[_call(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
    )


def _call(call: ToolCall) -> chat_pb2.ToolCall:
    function = chat_pb2.FunctionCall(name=call.name, arguments=call.arguments)
    return chat_pb2.ToolCall(id=call.id, type=chat_pb2.TOOL_CALL_TYPE_CLIENT_SIDE_TOOL, function=function)


def _tool_choice(choice: ToolChoice) -> Any:
    return required_tool(choice.name) if choice.name is not None else choice.mode


def _format(wanted: JsonFormat | None) -> Any:
    if wanted is None or wanted.schema is None:
        return wanted and "json_object"
    return chat_pb2.ResponseFormat(
        format_type=chat_pb2.FORMAT_TYPE_JSON_SCHEMA, schema=json.dumps(dict(wanted.schema))
    )
