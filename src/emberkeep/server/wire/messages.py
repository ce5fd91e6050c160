"""Messages and tools of a chat, from OpenAI's shape to ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from emberkeep.errors import InvalidField
from emberkeep.server.wire.body import Body
from emberkeep.server.wire.fields import Label, Schema
from emberkeep.types import Json, Message, Role, Tool, ToolCall, ToolChoice

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"


class TextPart(Body):
    type: Literal["text"]
    text: str


def _joined(content: Json) -> Json:
    """Text of a content that is a string, null or a list of text parts; one part per line."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return content


def _part_text(part: Json) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError("only parts of type text, with a text, are supported: leave the other parts out")


class CalledFunction(Body):
    name: Label
    arguments: str


class ToolCallBody(Body):
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class MessageBody(Body):
    role: Role
    content: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart] | None)] = ""
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=256)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None

    def to_message(self) -> Message:
        calls = (ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        return Message(
            role=self.role,
            content=self.content,
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(calls),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=10_000)]


def to_messages(bodies: list[MessageBody]) -> tuple[Message, ...]:
    for index, body in enumerate(bodies):
        if body.role != "assistant" and "content" not in body.model_fields_set:
            raise InvalidField(f"messages[{index}].content", "is required for this role.")
    return tuple(body.to_message() for body in bodies)


class FunctionBody(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: Schema | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def to_tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description or "", function.parameters or {})


Tools = Annotated[list[ToolBody], Field(max_length=256)]


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
