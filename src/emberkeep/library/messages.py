"""Messages and tools of a chat, from OpenAI's shape to ours, and messages back. HTTP and the library share it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from emberkeep.errors import InvalidField
from emberkeep.library.checking import TOOL_NAME, Body
from emberkeep.library.fields import Label, Schema
from emberkeep.types import Image, Json, Message, Request, Role, Tool, ToolCall, ToolChoice


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageAddress(Body):
    url: str


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageAddress


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    images: tuple[Image, ...] = ()


def _joined(content: Json) -> Content | None:
    """A string, null or a list of parts: texts, one per line, and images."""
    if content is None:
        return None
    if isinstance(content, str):
        return Content(content)
    if not isinstance(content, list):
        raise ValueError("give a text or a list of parts")
    parts = [_part(part) for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return Content("\n".join(texts), tuple(part for part in parts if isinstance(part, Image)))


def _part(part: Json) -> str | Image:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if _IMAGE_URL.match(url):
            return Image(url)
        case {"type": "image_url"}:
            raise ValueError("give the url of an image as https: or data:image/")
    raise ValueError("only parts of type text and image_url are supported: leave the other parts out")


_IMAGE_URL = re.compile(r"https?://|data:image/", re.IGNORECASE)


def _as_text(arguments: Json) -> Json:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class CalledFunction(Body):
    name: Label
    arguments: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]


class ToolCallBody(Body):
    id: Label
    type: Literal["function"] | None = None
    function: CalledFunction

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class MessageBody(Body):
    role: Role
    content: Annotated[
        Content | None, PlainValidator(_joined, json_schema_input_type=str | list[TextPart | ImagePart] | None)
    ] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=256)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None

    @property
    def says_something(self) -> bool:
        """A model may call tools, or be cut off while it reasons, before it has any text."""
        if self.content is not None:
            return True
        return self.role == "assistant" and bool(self.tool_calls or self.reasoning_content)

    def to_message(self) -> Message:
        return Message(
            role=self.role,
            content=self.content.text if self.content else "",
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
            name=self.name,
            images=self.content.images if self.content else (),
        )


MAX_MESSAGES = 100_000

MessageList = Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
BeginningList = Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES)]
"""Of a prefix, which may be tools alone."""


def to_messages(bodies: list[MessageBody]) -> tuple[Message, ...]:
    for index, body in enumerate(bodies):
        if not body.says_something:
            reason = "is required: only an assistant message with tool calls may leave it out."
            raise InvalidField(f"messages[{index}].content", reason)
    return tuple(body.to_message() for body in bodies)


def message_json(message: Message) -> dict[str, Json]:
    """In OpenAI's shape; what is not set is left out."""
    told: dict[str, Json] = {"role": message.role, "content": _content_json(message)}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [call_json(call) for call in message.tool_calls]
    return told | {
        key: value
        for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name))
        if value is not None
    }


def _content_json(message: Message) -> Json:
    if not message.images:
        return message.content
    images = [{"type": "image_url", "image_url": {"url": image.url}} for image in message.images]
    return [{"type": "text", "text": message.content}, *images] if message.content else images


def call_json(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class FunctionBody(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: Schema | None = None


class ToolBody(Body):
    type: Literal["function"] | None = None
    function: FunctionBody

    def to_tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description or "", function.parameters or {})


ToolList = Annotated[list[ToolBody], Field(max_length=256)]


def prefix_of_chats(base: Request, messages: list[MessageBody], tools: list[ToolBody]) -> Request:
    """What `base` says about whom it is for, with something to have ready for chats. Raises InvalidField."""
    if not (messages or tools):
        raise InvalidField("messages", "give messages, tools or a text.")
    return replace(
        base,
        messages=to_messages(messages),
        tools=tuple(tool.to_tool() for tool in tools),
        is_prefix=True,
    )


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


def _to_choice(value: Any) -> ToolChoice:
    match value:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
    raise ValueError('give none, auto, required or {"type": "function", "function": {"name": ...}}')


ChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_to_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice | None),
]


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    if choice.mode == "required" and not tools:
        raise InvalidField("tool_choice", "required needs at least one tool: give tools.")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidField("tool_choice", "names a function that is not among the tools.")
