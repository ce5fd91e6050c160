"""A chat: its messages and tools, from OpenAI's shape to ours and back, and the body of `/v1/chat/completions`.

HTTP and the library share it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from emberkeep.api.custom_tools import CUSTOM_PARAMETERS, custom_arguments
from emberkeep.api.errors import TEMPLATE_NAME, TOOL_NAME
from emberkeep.api.field_kinds import one_of
from emberkeep.api.request import (
    NO_MARKS,
    NO_OTHERS,
    Body,
    CompletionBody,
    GenerationBody,
    Label,
    Limit,
    LogprobFields,
    MarkFields,
    RoomFields,
    Schema,
    TextMarks,
    TextPart,
    text_marks,
    to_limit,
    ttl_of,
    validate,
)
from emberkeep.errors import InvalidField
from emberkeep.types.request import (
    Breakpoint,
    Image,
    Json,
    Message,
    ReasoningFormat,
    Request,
    Tool,
    ToolCall,
    ToolChoice,
)
from emberkeep.values import dataclass


class ImageAddress(Body):
    url: Annotated[str, Field(pattern="^(https?://|data:image/)")]


class MessageTextPart(TextPart, MarkFields):
    pass


class ImagePart(MarkFields):
    type: Literal["image_url"]
    image_url: ImageAddress


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    images: tuple[Image, ...] = ()
    marks: TextMarks = NO_MARKS


def _join_parts(content: Json) -> Content | None:
    """A string, null or a list of parts: texts, one per line, and images."""
    if content is None:
        return None
    if isinstance(content, str):
        return Content(content)
    if not isinstance(content, list):
        raise ValueError("give a text or a list of parts")
    parts = [_part(part) for part in content]
    texts = [part if isinstance(part, str) else None for part in parts]
    return Content(
        "\n".join(text for text in texts if text is not None),
        tuple(part for part in parts if isinstance(part, Image)),
        text_marks(zip(content, texts, strict=True)),
    )


def _part(part: Json) -> str | Image:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
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


def _custom_call(call: Json) -> Json:
    """The call of a custom tool as one of a function."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            return {**call, "function": {"name": name, "arguments": custom_arguments(text)}}
    return call


class ToolCallBody(Body):
    id: Label
    type: Literal["function", "custom"] | None = None
    function: CalledFunction

    _read_custom = model_validator(mode="before")(_custom_call)

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class RefusalPart(MarkFields):
    type: Literal["refusal"]
    refusal: str


MarkedPart = MessageTextPart | ImagePart | RefusalPart


def _says_something(schema: dict[str, Json]) -> None:
    """For the schema of a message, as its `says_something`."""
    of_assistants = one_of("tool_calls", "reasoning_content", "refusal", "function_call")
    schema["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        {"properties": {"role": {"const": "function"}}},
        {"properties": {"role": {"const": "assistant"}}, **of_assistants},
    ]


class MessageBody(MarkFields):
    model_config = ConfigDict(json_schema_extra=_says_something)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Content | None,
        PlainValidator(_join_parts, json_schema_input_type=str | list[MarkedPart] | None),
    ] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=256)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None

    @property
    def says_something(self) -> bool:
        """A model may call tools, or be cut off while it reasons, before it has any text."""
        if self.content is not None or self.role == "function":
            return True
        said = self.tool_calls or self.reasoning_content or self.refusal or self.function_call
        return self.role == "assistant" and bool(said)

    def to_message(self, legacy_id: str) -> Message:
        """`legacy_id`: of a `function_call`, which has none, and of its result."""
        calls = tuple(call.to_call() for call in self.tool_calls or ())
        if self.function_call is not None:
            calls += (ToolCall(legacy_id, self.function_call.name, self.function_call.arguments),)
        return Message(
            role="tool" if self.role == "function" else self.role,
            content=self.content.text if self.content else self.refusal or "",
            reasoning=self.reasoning_content or "",
            tool_calls=calls,
            tool_call_id=legacy_id if self.role == "function" else self.tool_call_id,
            name=self.name,
            images=self.content.images if self.content else (),
        )


MAX_MESSAGES = 100_000

MessageList = Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
BeginningList = Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES)]
"""The messages of a prefix; there may be none, because tools alone are a prefix too."""


def to_messages(bodies: list[MessageBody]) -> tuple[Message, ...]:
    for index, body in enumerate(bodies):
        if not body.says_something:
            reason = "is required: only an assistant message with tool calls may leave it out."
            raise InvalidField(f"messages[{index}].content", reason)
    messages = []
    legacy_id = ""
    for index, body in enumerate(bodies):
        if body.function_call is not None:
            legacy_id = f"call_{index:024x}"  # the same in every turn
        messages.append(body.to_message(legacy_id))
    return tuple(messages)


def to_breakpoints(bodies: list[MessageBody]) -> tuple[Breakpoint, ...]:
    """Where the beginnings end that a client marks in its messages."""
    found: list[Breakpoint] = []
    for count, body in enumerate(bodies, 1):
        found += body.content.marks.breakpoints(count) if body.content else ()
        if (ttl := body.to_mark()) is not None:
            found.append(Breakpoint(count, ttl=ttl))
    return tuple(found)


def message_json(message: Message) -> dict[str, Json]:
    """In OpenAI's shape; what is not set is left out."""
    told: dict[str, Json] = {"role": message.role, "content": content_json(message)}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [call_json(call) for call in message.tool_calls]
    return told | {
        key: value
        for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name))
        if value is not None
    }


def content_json(message: Message) -> Json:
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

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


def _custom_tool(tool: Json) -> Json:
    """A custom tool as a function. Raises ValueError."""
    match tool:
        case {"type": "custom", "custom": {"format": {"type": "grammar"}}}:
            raise ValueError("a custom tool takes any text here: leave the grammar of its input out")
        case {"type": "custom", "custom": {"name": name, **more}}:
            function = {"name": name, "description": more.get("description"), "parameters": CUSTOM_PARAMETERS}
            return {**tool, "function": function}
    return tool


class ToolBody(Body):
    type: Literal["function", "custom"] | None = None
    function: FunctionBody

    _read_custom = model_validator(mode="before")(_custom_tool)

    def to_tool(self) -> Tool:
        return self.function.to_tool()


ToolList = Annotated[list[ToolBody], Field(max_length=256)]


def prefix_of_chats(base: Request, messages: list[MessageBody], tools: list[ToolBody]) -> Request:
    """A request for the user of `base`, with a prefix to have ready for chats. Raises InvalidField."""
    if not (messages or tools):
        raise InvalidField("messages", "give messages, tools or a text.")
    known = tuple(tool.to_tool() for tool in tools)
    return replace(base, messages=to_messages(messages), tools=known).decided(is_prefix=True)


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomChoice(Body):
    type: Literal["custom"]
    custom: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice | NamedCustomChoice]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _to_choice(value: Any) -> ToolChoice:
    match value:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return ToolChoice(mode, allowed=tuple(_to_choice(tool).name or "" for tool in tools))
    raise ValueError('give none, auto, required or {"type": "function", "function": {"name": ...}}')


ChoiceField = Annotated[
    ToolChoice,
    PlainValidator(
        _to_choice,
        json_schema_input_type=Literal["none", "auto", "required"]
        | NamedChoice
        | NamedCustomChoice
        | AllowedChoice
        | None,
    ),
]


def _to_legacy_choice(value: Any) -> ToolChoice:
    match value:
        case None:
            return ToolChoice()
        case "none" | "auto":
            return ToolChoice(value)
        case {"name": str(name)}:
            return ToolChoice("named", name)
    raise ValueError('give none, auto or {"name": ...}')


LegacyChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_to_legacy_choice, json_schema_input_type=Literal["none", "auto"] | NamedFunction | None),
]


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    if choice.mode == "required" and not (tools and choice.allowed != ()):
        raise InvalidField("tool_choice", "required needs at least one tool: give tools.")
    named = {choice.name} if choice.mode == "named" else set(choice.allowed or ())
    if not named <= {tool.name for tool in tools}:
        raise InvalidField("tool_choice", "names a function that is not among the tools.")


# ── the body ──

TemplateName = Annotated[str, Field(pattern=TEMPLATE_NAME)]


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > 4096):
        raise ValueError("give a short string, a number, true, false or null")
    return value


Scalar = Annotated[Any, PlainValidator(_plain, json_schema_input_type=bool | float | str | None)]
TemplateArgs = Annotated[dict[TemplateName, Scalar], Field(max_length=64, json_schema_extra=NO_OTHERS)]


_FORMATS = {
    "none": ReasoningFormat.INLINE,  # llama.cpp's words
    "auto": ReasoningFormat.SEPARATE,
    "deepseek": ReasoningFormat.SEPARATE,
    "hidden": ReasoningFormat.STRIP,  # other servers'
    **{str(one): one for one in ReasoningFormat},
}


class TemplateFields(Body):
    """What the chat template is told, and what becomes of the reasoning."""

    chat_template_kwargs: TemplateArgs | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "hidden", "separate", "strip", "inline"] | None = None

    def to_reasoning(self) -> ReasoningFormat | None:
        return _FORMATS.get(self.reasoning_format or "")


class ChatBody(GenerationBody, RoomFields, LogprobFields, TemplateFields):
    messages: MessageList
    tools: ToolList | None = None
    tool_choice: ChoiceField = ToolChoice()
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionBody], Field(max_length=256)] | None = None
    function_call: LegacyChoiceField = ToolChoice()
    max_completion_tokens: Limit | None = None
    ask_permission: bool | None = None

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other."""
        tools, choice = self._tools()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        base, breakpoints = self.to_base(), to_breakpoints(self.messages)
        return replace(
            base,
            messages=to_messages(self.messages),
            breakpoints=breakpoints,
            ttl=base.ttl or ttl_of(breakpoints),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.functions,
            max_tokens=to_limit(limit),
            top_logprobs=self.to_top_logprobs(),
            template_args=self.chat_template_kwargs or {},
            reasoning=self.to_reasoning(),
            evict=self.evict,
            recall=self.to_recall(),
            asks_permission=bool(self.ask_permission),
        )

    @property
    def custom_names(self) -> frozenset[str]:
        """Of the tools that take a text."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

    def _tools(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        if not self.functions:
            tools = tuple(tool.to_tool() for tool in self.tools or ())
            check_choice(self.tool_choice, tools)
            return tools, self.tool_choice
        if self.tools:
            raise InvalidField("functions", "goes without tools: leave one of them out.")
        tools = tuple(function.to_tool() for function in self.functions)
        if self.function_call.name not in {None, *(tool.name for tool in tools)}:
            raise InvalidField("function_call", "names a function that is not among the functions.")
        return tools, self.function_call


C = TypeVar("C", bound=ChatBody)
P = TypeVar("P", bound=CompletionBody)


def read_chat_or_completion(value: Mapping[str, Json], chat: type[C], completion: type[P]) -> C | P:
    """The body of a chat or of a text completion, of these kinds. Raises InvalidField."""
    if value.get("prompt") is None:
        return validate(chat, value)
    if value.get("messages") is not None:
        raise InvalidField("prompt", "goes without messages: leave one of them out.")
    return validate(completion, value)


def to_one_request(body: ChatBody | CompletionBody) -> Request:
    """Raises InvalidField."""
    if isinstance(body, ChatBody):
        return body.to_request()
    requests = body.to_requests()
    if len(requests) > 1:
        raise InvalidField("prompt", "give one prompt: each is explained on its own.")
    return requests[0]
