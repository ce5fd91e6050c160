"""The body of `/v1/chat/completions`: its messages and tools, from OpenAI's shape to ours and back.

HTTP and the library share it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator

from emberkeep.api.body import BY_KIND, NO_OTHERS, TEMPLATE_NAME, Body, ByKind, Label, one_of
from emberkeep.api.fields import (
    FormatFields,
    GenerationFields,
    Limit,
    LogprobFields,
    MarkFields,
    OwnerFields,
    RoomFields,
    breakpoints_in_text,
    check_choice,
    to_limit,
    ttl_of,
)
from emberkeep.api.kinds import ChoiceCount, CustomFields, FunctionFields, TextPart, call_json, custom_arguments
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
    Ttl,
)

# ── what chats and completions share ──


class StreamOptions(Body):
    include_usage: bool | None = None


RETENTIONS = {"in_memory": Ttl.SHORT, "in-memory": Ttl.SHORT, "24h": Ttl.EXTENDED}


class GenerationBody(GenerationFields, FormatFields, OwnerFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: ChoiceCount | None = None

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        return replace(
            self.apply_to(self.to_owned()),
            format=self.to_format(),
            max_tokens=to_limit(self.max_tokens),
            n=self.n or 1,
            ttl=RETENTIONS[self.prompt_cache_retention] if self.prompt_cache_retention else None,
            want_progress=bool(self.stream and self.return_progress),
        )


# ── parts of a message ──


_IMAGE_URL = re.compile(r"https?://|data:image/", re.IGNORECASE)


def _checked_url(url: str) -> str:
    if not _IMAGE_URL.match(url):
        raise ValueError("give the url of an image as https: or data:image/")
    return url


ImageUrl = Annotated[
    str, Field(json_schema_extra={"pattern": "^(https?://|data:image/)"}), AfterValidator(_checked_url)
]


class ImageAddress(Body):
    url: ImageUrl


class MessageTextPart(TextPart, MarkFields):
    pass


class RefusalPart(MarkFields):
    type: Literal["refusal"]
    refusal: str


class ImagePart(MarkFields):
    type: Literal["image_url"]
    image_url: Annotated[ImageAddress | ImageUrl, BY_KIND]


Part = Annotated[
    MessageTextPart | RefusalPart | ImagePart,
    ByKind("only parts of type text and image_url are supported: leave the other parts out"),
]


def _text_of(part: MessageTextPart | RefusalPart | ImagePart) -> str | None:
    """None: it is an image."""
    if isinstance(part, ImagePart):
        return None
    return part.text if isinstance(part, MessageTextPart) else part.refusal


def _image_of(part: ImagePart) -> Image:
    return Image(part.image_url if isinstance(part.image_url, str) else part.image_url.url)


# ── calls ──


class CalledFunction(Body):
    name: Label
    arguments: Annotated[
        str,
        BeforeValidator(
            lambda arguments: json.dumps(arguments) if isinstance(arguments, dict) else arguments,
            json_schema_input_type=str | dict[str, Any],
        ),
    ]


class CalledCustomTool(Body):
    name: Label
    input: str


class FunctionCall(Body):
    id: Label
    type: Literal["function"] | None = None
    function: CalledFunction

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class CustomCall(Body):
    id: Label
    type: Literal["custom"]
    custom: CalledCustomTool

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.custom.name, custom_arguments(self.custom.input))


AnyCall = Annotated[FunctionCall | CustomCall, BY_KIND]

# ── messages ──


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
    content: Annotated[str | list[Part], BY_KIND] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[AnyCall], Field(max_length=256)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None

    @property
    def says_something(self) -> bool:
        """A model may call tools, or be cut off while it reasons, before it has any text."""
        if self.content is not None or self.role == "function":
            return True
        instead = self.tool_calls or self.reasoning_content or self.refusal or self.function_call
        return self.role == "assistant" and bool(instead)

    def to_message(self, legacy_id: str) -> Message:
        """Each part's text is a line. `legacy_id`: of a `function_call`, which has none, and of its result."""
        calls = tuple(call.to_call() for call in self.tool_calls or ())
        if self.function_call is not None:
            calls += (ToolCall(legacy_id, self.function_call.name, self.function_call.arguments),)
        content, images = self.content, tuple[Image, ...]()
        if isinstance(content, list):
            images = tuple(_image_of(part) for part in content if isinstance(part, ImagePart))
            content = "\n".join(text for part in content if (text := _text_of(part)) is not None)
        return Message(
            role="tool" if self.role == "function" else self.role,
            content=(self.refusal or "") if content is None else content,
            reasoning=self.reasoning_content or "",
            tool_calls=calls,
            tool_call_id=legacy_id if self.role == "function" else self.tool_call_id,
            name=self.name,
            images=images,
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
        if isinstance(body.content, list):
            found += breakpoints_in_text(((part.to_mark(), _text_of(part)) for part in body.content), count)
        if (ttl := body.to_mark()) is not None:
            found.append(Breakpoint(count, ttl=ttl))
    return tuple(found)


def message_json(message: Message) -> dict[str, Json]:
    """In OpenAI's shape; what is not set is left out."""
    fields = {
        "reasoning_content": message.reasoning or None,
        "tool_calls": [call_json(call) for call in message.tool_calls] or None,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"role": message.role, "content": content_json(message), **given}


def content_json(message: Message) -> Json:
    if not message.images:
        return message.content
    images = [{"type": "image_url", "image_url": {"url": image.url}} for image in message.images]
    return [{"type": "text", "text": message.content}, *images] if message.content else images


# ── tools ──


class FunctionTool(Body):
    type: Literal["function"] | None = None
    function: FunctionFields

    def to_tool(self) -> Tool:
        return self.function.to_tool()


class CustomTool(Body):
    type: Literal["custom"]
    custom: CustomFields

    def to_tool(self) -> Tool:
        return self.custom.to_tool()


ToolList = Annotated[list[Annotated[FunctionTool | CustomTool, BY_KIND]], Field(max_length=256)]


def prefix_of_chats(base: Request, messages: list[MessageBody], tools: list[FunctionTool | CustomTool]) -> Request:
    """A request for the user of `base`, with a prefix to have ready for chats. Raises InvalidField."""
    if not (messages or tools):
        raise InvalidField("messages", "give messages, tools or a text.")
    known = tuple(tool.to_tool() for tool in tools)
    return replace(base, messages=to_messages(messages), tools=known).decided(is_prefix=True)


class NamedFunction(Body):
    name: str


class FunctionChoice(Body):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class CustomChoice(Body):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[Annotated[FunctionChoice | CustomChoice, BY_KIND]]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChoiceField = (
    Annotated[Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice, BY_KIND] | None
)
LegacyChoiceField = Annotated[Literal["none", "auto"] | NamedFunction, BY_KIND] | None


def to_choice(choice: ChoiceField | LegacyChoiceField) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case str():
            return ToolChoice(choice)
        case AllowedChoice():
            allowed = choice.allowed_tools
            return ToolChoice(allowed.mode, allowed=tuple(tool.name for tool in allowed.tools))
    return ToolChoice("named", choice.name)


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
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionFields], Field(max_length=256)] | None = None
    function_call: LegacyChoiceField = None
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
        """The tools that take a text."""
        return frozenset(tool.custom.name for tool in self.tools or () if isinstance(tool, CustomTool))

    def _tools(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        if not self.functions:
            tools = tuple(tool.to_tool() for tool in self.tools or ())
            choice = to_choice(self.tool_choice)
            check_choice(choice, tools)
            return tools, choice
        if self.tools:
            raise InvalidField("functions", "goes without tools: leave one of them out.")
        tools = tuple(function.to_tool() for function in self.functions)
        choice = to_choice(self.function_call)
        if choice.name not in {None, *(tool.name for tool in tools)}:
            raise InvalidField("function_call", "names a function that is not among the functions.")
        return tools, choice
