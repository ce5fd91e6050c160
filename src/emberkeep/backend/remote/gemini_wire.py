"""A request in the form of Google's Gemini API."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from google.genai import types

from emberkeep.backend.remote.asking import Keepsakes, arguments_of, chosen, inline, split_system, text_of
from emberkeep.errors import InvalidField
from emberkeep.types import Image, Message, RemoteModel, Request, Tool, ToolCall, ToolChoice

_SAMPLED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
_MODES = {
    "none": types.FunctionCallingConfigMode.NONE,
    "auto": types.FunctionCallingConfigMode.AUTO,
    "required": types.FunctionCallingConfigMode.ANY,
    "named": types.FunctionCallingConfigMode.ANY,
}


@dataclass(frozen=True, slots=True)
class Signed:
    """A call that Gemini made here."""

    signature: bytes | None
    """None: it made several at once, and signed the first."""


Kept = Keepsakes[Signed]


def config_of(request: Request, remote: RemoteModel) -> types.GenerateContentConfig:
    made: dict[str, Any] = {
        "system_instruction": _system(request.messages),
        "max_output_tokens": request.max_tokens or remote.max_tokens,
        "stop_sequences": list(request.stop) or None,
        "thinking_config": _thinking(request),
        # Whose calls are answered, and how often a service is asked, is decided above.
        "automatic_function_calling": types.AutomaticFunctionCallingConfig(disable=True),
        "automatic_continuation": False,
        **{name: value for name, value in chosen(request.sampling).items() if name in _SAMPLED},
    }
    if request.tools:
        made["tools"] = [types.Tool(function_declarations=[_declared(tool) for tool in request.tools])]
        made["tool_config"] = types.ToolConfig(function_calling_config=_calling(request.tool_choice))
    if request.format is not None:
        made |= {"response_mime_type": "application/json", "response_json_schema": request.format.schema}
    return types.GenerateContentConfig(**made)


def contents_of(messages: Sequence[Message], kept: Kept) -> list[types.Content]:
    """User and model by turns: neighbours of one role become one. Raises InvalidField."""
    calls = {call.id: call for message in messages for call in message.tool_calls}
    contents: list[types.Content] = []
    for message in split_system(messages)[1]:
        role = "model" if message.role == "assistant" else "user"
        parts = _parts(message, calls, kept)
        if contents and contents[-1].role == role:
            contents[-1].parts = [*(contents[-1].parts or ()), *parts]
        elif parts:
            contents.append(types.Content(role=role, parts=parts))
    return contents


def _system(messages: Sequence[Message]) -> str | None:
    return "\n\n".join(message.content for message in split_system(messages)[0]) or None


def _parts(message: Message, calls: Mapping[str, ToolCall], kept: Kept) -> list[types.Part]:
    images = [_image(image) for image in message.images]
    if message.role == "tool":
        return [_result(message, calls, kept), *images]
    said = [types.Part(text=text)] if (text := text_of(message)) else []
    return [*said, *images, *(_call(call, kept) for call in message.tool_calls)]


def _call(call: ToolCall, kept: Kept) -> types.Part:
    signed = kept.get(call.id)
    if signed is None:
        # Calls of another model, or of an earlier run: without their signature newer models refuse them as calls.
        return types.Part(text=f"[{call.name} was called with {call.arguments or '{}'}]")
    made = types.FunctionCall(id=call.id, name=call.name, args=dict(arguments_of(call.arguments)))
    return types.Part(function_call=made, thought_signature=signed.signature)


def _result(message: Message, calls: Mapping[str, ToolCall], kept: Kept) -> types.Part:
    call = calls.get(message.tool_call_id or "")
    if call is None or kept.get(call.id) is None:
        name = message.name or (call.name if call else "a tool")
        return types.Part(text=f"[{name} gave {json.dumps(message.content, ensure_ascii=False)}]")
    answer = types.FunctionResponse(id=call.id, name=call.name, response={"output": message.content})
    return types.Part(function_response=answer)


def _image(image: Image) -> types.Part:
    found = inline(image)
    if found is None:
        kind = mimetypes.guess_type(urlsplit(image.url).path)[0] or "image/jpeg"
        return types.Part(file_data=types.FileData(file_uri=image.url, mime_type=kind))
    try:
        data = base64.b64decode(found.base64, validate=True)
    except ValueError as error:
        raise InvalidField("image_url", "its data is not base64: send it again.") from error
    return types.Part(inline_data=types.Blob(data=data, mime_type=found.media_type))


def _declared(tool: Tool) -> types.FunctionDeclaration:
    schema = dict(tool.parameters) or None
    return types.FunctionDeclaration(name=tool.name, description=tool.description, parameters_json_schema=schema)


def _calling(choice: ToolChoice) -> types.FunctionCallingConfig:
    names = None if choice.name is None else [choice.name]
    return types.FunctionCallingConfig(mode=_MODES[choice.mode], allowed_function_names=names)


def _thinking(request: Request) -> types.ThinkingConfig | None:
    """As the model does it, unless the request says."""
    wanted = request.template_args.get("enable_thinking")
    if wanted is None:
        return None
    return types.ThinkingConfig(include_thoughts=True) if wanted else types.ThinkingConfig(thinking_budget=0)
