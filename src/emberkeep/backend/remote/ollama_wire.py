"""A request in the form of Ollama's SDK."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from ollama import Image

from emberkeep.backend.remote.asking import arguments_of, chosen, inline, turn_start
from emberkeep.backend.remote.failing import Service
from emberkeep.errors import RequestError
from emberkeep.types import Image as Picture
from emberkeep.types import Json, Message, RemoteModel, Request, Tool

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


def written(request: Request, remote: RemoteModel, model: str, service: Service) -> dict[str, Any]:
    """The arguments of `chat`. It has no choice of tools: those that shall not be called are left out.

    Raises RequestError for images that are elsewhere.
    """
    wanted, choice = request.format, request.tool_choice
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
    sampling = chosen(request.sampling).items()
    named = {_OPTIONS[name]: value for name, value in sampling if name in _OPTIONS}
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
    """`thinks_on`: the model is in the middle of a turn, and gets back what it has thought so far."""
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
    found = inline(image)
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
    """The SDK leaves out what it has no field for, so that is told in words."""
    if not isinstance(schema, Mapping) or schema.keys() <= _PROPERTY_FIELDS:
        return schema
    rest = {name: value for name, value in schema.items() if name != "description"}
    told = f"{schema.get('description', '')} JSON schema: {json.dumps(rest)}".strip()
    return {**schema, "description": told}
