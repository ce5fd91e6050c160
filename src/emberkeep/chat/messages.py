"""Messages and tools in the shape that chat templates read, and as plain text where a template cannot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberkeep.types import Json, Message, Tool, ToolCall

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

_INSTRUCTION = """\
These functions can be called, one JSON description per line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON between tags, once for every call:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The results come back between <tool_response> tags. When no function is needed, answer in plain text."""


def canonical_tools(tools: Sequence[Tool]) -> list[dict[str, Json]]:
    """OpenAI's tool objects, with the keys of every schema sorted.

    Two clients that send the same tools with their keys in another order get the same prompt, and share its
    state. The order of the tools is kept.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": sorted_keys(tool.parameters),
            },
        }
        for tool in tools
    ]


def sorted_keys(value: Json) -> Json:
    """A copy of `value` whose objects, at every depth, have their keys in order."""
    return json.loads(json.dumps(value, sort_keys=True))


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a template wants of an assistant message that calls tools. Templates differ, so it is probed."""

    empty_content: str | None
    """Stands for the content when there is none."""
    parsed: bool
    """Arguments as an object; otherwise as JSON text."""
    short_ids: bool
    """Ids of nine letters and digits; otherwise as the client sent them."""


CALL_FORMS = tuple(
    CallForm(empty_content, parsed, short_ids)
    for short_ids in (False, True)
    for empty_content in ("", None)
    for parsed in (True, False)
)


def values_for(
    messages: Sequence[Message], tools: Sequence[Tool], form: CallForm, *, has_empty_list: bool
) -> dict[str, Json]:
    """The variables `messages` and `tools`; `has_empty_list`: where there are no tools, instead of none."""
    no_tools: list[Json] | None = [] if has_empty_list else None
    return {
        "messages": [as_dict(message, form) for message in messages],
        "tools": canonical_tools(tools) or no_tools,
    }


def as_dict(message: Message, form: CallForm) -> dict[str, Json]:
    """The object that templates know from Hugging Face: only keys that have something to say."""
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Json] = {"role": role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or form.empty_content
        out["tool_calls"] = [_call_dict(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = _call_id(message.tool_call_id, form)
    if message.name is not None:
        out["name"] = message.name
    return out


def _call_dict(call: ToolCall, form: CallForm) -> dict[str, Json]:
    arguments = _parsed(call.arguments) if form.parsed else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": _call_id(call.id, form), "function": function}


def _call_id(id: str, form: CallForm) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:9] if form.short_ids else id


def _parsed(arguments: str) -> Json:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


# ── for templates that know no tools, or no system message ───────────────────────────────────────


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation with the tools in the system message, and calls and results as text."""
    plain = [_call_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in canonical_tools(tools))
    instruction = _INSTRUCTION.format(tools=lines)
    if plain and plain[0].role in ("system", "developer"):
        system = replace(plain[0], content=f"{plain[0].content}\n\n{instruction}")
        return [system, *plain[1:]]
    return [Message("system", instruction), *plain]


def _call_as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(call_text(call.name, call.arguments) for call in message.tool_calls)
    content = f"{message.content}\n{calls}" if message.content else calls
    return replace(message, content=content, tool_calls=())


def call_text(name: str, arguments: str) -> str:
    body = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return f"{CALL_START}\n{body}\n{CALL_END}"


def system_in_first_user(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with the leading system message put before the first user's text."""
    if not messages or messages[0].role not in ("system", "developer"):
        return list(messages)
    system, rest = messages[0], list(messages[1:])
    if not rest or rest[0].role != "user":
        return [Message("user", system.content), *rest]
    rest[0] = replace(rest[0], content=f"{system.content}\n\n{rest[0].content}")
    return rest
