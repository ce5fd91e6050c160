"""A request in the form of Anthropic's Messages API."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from anthropic import transform_schema

from emberkeep.backend.remote.asking import Keepsakes, arguments_of, chosen, inline, split_system, text_of
from emberkeep.errors import InvalidField
from emberkeep.types import Image, Message, RemoteModel, Request, Tool, ToolChoice, Ttl

Block = dict[str, Any]

_MAX_TOKENS = 4096
_CACHED_TURNS = 2
_SAMPLED = ("temperature", "top_p", "top_k")
_JSON_ONLY = "Answer with one JSON value and nothing else."
_LEFT_OUT = "(Earlier messages are left out.)"


def written(request: Request, remote: RemoteModel, kept: Keepsakes[list[Block]]) -> dict[str, Any]:
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
        "metadata": _metadata(request.user),
        # The SDK has no arguments for them any more; models that still take them are served.
        "extra_body": {name: value for name, value in chosen(request.sampling).items() if name in _SAMPLED},
    }
    return {name: value for name, value in body.items() if value}


def _system(request: Request) -> list[Block]:
    first = [message.content for message in split_system(request.messages)[0]]
    if request.format is not None and request.format.schema is None:
        first.append(_JSON_ONLY)
    return [block for text in first for block in _text(text)]


def _turns(messages: Sequence[Message], kept: Keepsakes[list[Block]]) -> list[Block]:
    """User and assistant by turns, the user first: neighbours of one role become one."""
    turns: list[Block] = []
    for message in split_system(messages)[1]:
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
    if message.role == "tool":
        return [_result(message)]
    thought = kept.get(message.tool_calls[0].id) if message.tool_calls else None
    calls = [
        {"type": "tool_use", "id": _id(call.id), "name": call.name, "input": arguments_of(call.arguments)}
        for call in message.tool_calls
    ]
    return [*(thought or ()), *_text(text_of(message)), *map(_image, message.images), *calls]


def _result(message: Message) -> Block:
    content = [*_text(message.content), *map(_image, message.images)]
    result = {"type": "tool_result", "tool_use_id": _id(message.tool_call_id or "")}
    return {**result, "content": content} if content else result


def _text(text: str) -> list[Block]:
    """A text that is empty is refused."""
    return [{"type": "text", "text": text}] if text.strip() else []


def _image(image: Image) -> Block:
    found = inline(image)
    if found is None:
        return {"type": "image", "source": {"type": "url", "url": image.url}}
    return {"type": "image", "source": {"type": "base64", "media_type": found.media_type, "data": found.base64}}


def _id(call_id: str) -> str:
    """Other backends' ids may have characters that are refused here."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", call_id) or "call"


def _tool(tool: Tool) -> Block:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "input_schema": schema}


def _tool_choice(choice: ToolChoice, parallel: bool) -> Block:
    if choice.mode == "none":
        return {"type": "none"}
    kinds = {"auto": "auto", "required": "any", "named": "tool"}
    made: Block = {"type": kinds[choice.mode]}
    if choice.name is not None:
        made["name"] = choice.name
    return made if parallel else {**made, "disable_parallel_tool_use": True}


def _output(request: Request) -> Block | None:
    """Raises InvalidField."""
    if request.format is None or request.format.schema is None:
        return None
    try:
        schema = transform_schema(dict(request.format.schema))
    except ValueError as error:
        raise InvalidField("response_format", f"Anthropic cannot follow this schema ({error}).") from error
    return {"format": {"type": "json_schema", "schema": schema}}


def _thinking(request: Request) -> Block | None:
    """As the model does it, unless the request says."""
    wanted = request.template_args.get("enable_thinking")
    if wanted is None:
        return None
    return {"type": "adaptive", "display": "summarized"} if wanted else {"type": "disabled"}


def _metadata(user: str) -> Block | None:
    """Users are told apart, and not named: that is what the vendor asks for."""
    return {"user_id": hashlib.sha256(user.encode()).hexdigest()[:32]} if user else None


def _mark_cached(system: list[Block], tools: list[Block], turns: list[Block], ttl: Ttl | None) -> None:
    """Where a prefix may be found again; four marks are allowed."""
    mark = {"type": "ephemeral"} if ttl in (None, Ttl.SHORT) else {"type": "ephemeral", "ttl": "1h"}
    said = [turn["content"] for turn in turns if turn["role"] == "user"]
    for block in _last_of([tools, system, *said[-_CACHED_TURNS:]]):
        block["cache_control"] = mark


def _last_of(lists: Iterable[list[Block]]) -> Iterable[Block]:
    return (blocks[-1] for blocks in lists if blocks)
