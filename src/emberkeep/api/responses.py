"""The bodies of OpenAI's Responses API, and what a response tells about itself.

A response is asked for with items (`api/responses_items.py`) and answered with items (`api/responses_output.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from emberkeep.api.answer_format import FormatFields
from emberkeep.api.custom_tools import CUSTOM_PARAMETERS
from emberkeep.api.errors import TOOL_NAME
from emberkeep.api.field_kinds import NotHere
from emberkeep.api.messages import check_choice
from emberkeep.api.request import (
    RETENTIONS,
    WHOLE,
    Body,
    GenerationFields,
    Label,
    Limit,
    Name,
    OwnerFields,
    RoomFields,
    Schema,
    to_limit,
    ttl_of,
    validate,
)
from emberkeep.api.responses_items import (
    MAX_ITEMS,
    AnyItem,
    Called,
    Item,
    ItemList,
    model_name,
    to_items,
    to_messages,
)
from emberkeep.errors import InvalidField
from emberkeep.types.memory import ApiConversation
from emberkeep.types.request import Json, JsonFormat, Message, Request, Tool, ToolChoice, Ttl
from emberkeep.values import dataclass

ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def new_conversation_id() -> str:
    return f"conv_{uuid.uuid4().hex}"


# ── fields ──

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ReasoningFields(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None

    def template_args(self) -> dict[str, Json]:
        """Templates know one of these, or none."""
        if self.effort is None:
            return {}
        return {"enable_thinking": self.effort != "none", "reasoning_effort": self.effort}


class TextFormatFields(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    def to_format(self) -> JsonFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonFormat(param="text.format")
        if self.schema_ is None:
            raise InvalidField("text.format.schema", "is required when type is json_schema.")
        return JsonFormat(self.schema_, param="text.format")


class TextFields(Body):
    format: TextFormatFields | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationReference(Body):
    id: Name


class CacheOptions(Body):
    ttl: Literal["30m", "12h"] | None = None


_LEAST_TTLS = {"30m": Ttl.LONG, "12h": Ttl.EXTENDED}


# ── tools ──


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: Schema | None = None


class CustomTool(Body):
    type: Literal["custom"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    tools: Annotated[
        list[dict[str, Any]],
        BeforeValidator(lambda tools: tools, json_schema_input_type=list[FunctionTool | CustomTool]),
    ]


@dataclass(frozen=True, slots=True)
class Toolset:
    """What the model may call, and how the client calls it."""

    tools: tuple[Tool, ...] = ()
    called: Mapping[str, Called] | None = None
    """By the model's name."""
    left_out: tuple[str, ...] = ()
    """Types of those that nothing here can run, and that the client does not insist on."""

    def as_called(self, name: str) -> Called:
        return (self.called or {}).get(name) or Called(name)


def read_tools(given: Sequence[Mapping[str, Json]]) -> Toolset:
    """Raises InvalidField; a tool that only OpenAI runs is refused by its name."""
    tools: list[Tool] = []
    called: dict[str, Called] = {}
    left_out: list[str] = []
    for place, tool in enumerate(given):
        path = f"tools[{place}]"
        match tool.get("type"):
            case "function" | "custom":
                _add_tool(tool, path, None, tools, called)
            case "namespace":
                space = _validate_at(NamespaceTool, tool, path)
                for inner_place, inner in enumerate(space.tools):
                    _add_tool(inner, f"{path}.tools[{inner_place}]", space.name, tools, called)
            case "web_search" if "external_web_access" in tool:
                # So Codex writes it, which offers the tool in every request, asked for or not.
                left_out.append("web_search")
            case kind:
                raise InvalidField(f"{path}.type", f"{_shown(kind)} runs at OpenAI only: leave it out.")
    return Toolset(tuple(tools), called, tuple(left_out))


def _add_tool(
    given: Mapping[str, Json], path: str, namespace: str | None, tools: list[Tool], called: dict[str, Called]
) -> None:
    is_custom = given.get("type") == "custom"
    if is_custom:
        custom = _validate_at(CustomTool, given, path)
        if custom.format is not None and custom.format.get("type") != "text":
            raise InvalidField(f"{path}.format", "a custom tool takes any text here: leave the grammar out.")
        tool = Tool(custom.name, custom.description or "", CUSTOM_PARAMETERS)
    else:
        function = _validate_at(FunctionTool, given, path)
        tool = Tool(function.name, function.description or "", function.parameters or {})
    name = model_name(tool.name, namespace)
    if name in called:
        raise InvalidField(f"{path}.name", "two tools have this name: rename one.")
    called[name] = Called(tool.name, namespace, is_custom)
    tools.append(replace(tool, name=name))


def _validate_at(model: type[FunctionTool | CustomTool | NamespaceTool], given: Json, path: str) -> Any:
    try:
        return validate(model, given)
    except InvalidField as error:
        raise InvalidField(f"{path}.{error.param}", str(error).removeprefix(f"{error.param}: ")) from None


def _shown(kind: Json) -> str:
    return repr(str(kind)[:64])


def read_choice(choice: Json, tools: tuple[Tool, ...]) -> ToolChoice:
    """Raises InvalidField for what is not among the tools."""
    match choice:
        case None:
            read = ToolChoice()
        case "none" | "auto" | "required":
            read = ToolChoice(choice)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            read = ToolChoice(mode, allowed=tuple(_chosen_name(tool) for tool in allowed))
        case _:
            read = ToolChoice("named", _chosen_name(choice))
    check_choice(read, tools)
    return read


def _chosen_name(choice: Json) -> str:
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            return model_name(name, choice.get("namespace"))
        case {"type": str(kind)}:
            raise InvalidField("tool_choice", f"{_shown(kind)} cannot be chosen here: name a function.")
    raise InvalidField("tool_choice", "give none, auto, required or the type and name of a tool.")


# ── the bodies ──


def _text_or_items(value: Json) -> Json:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("give a text or a list of items")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"give {MAX_ITEMS} or fewer items")
    return value


def _named(value: Json) -> str | None:
    match value:
        case None:
            return None
        case str(name) | {"id": str(name)} if 0 < len(name) <= 512:
            return name
    raise ValueError('give the id of a conversation, or {"id": ...}')


InputField = Annotated[
    str | list[dict[str, Any]], PlainValidator(_text_or_items, json_schema_input_type=str | list[AnyItem])
]
ConversationField = Annotated[
    str | None, PlainValidator(_named, json_schema_input_type=Name | ConversationReference | None)
]
_MAX_TOOLS = 256


def _objects(value: Json) -> Json:
    """They are checked one by one later, so that errors name the place."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("give a list of objects")
    if len(value) > _MAX_TOOLS:
        raise ValueError(f"give {_MAX_TOOLS} or fewer")
    return value


ToolsField = Annotated[
    list[dict[str, Any]],
    PlainValidator(_objects, json_schema_input_type=list[FunctionTool | CustomTool | NamespaceTool]),
]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: Name
    namespace: Label | None = None


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ToolChoiceField = Annotated[
    Any,
    BeforeValidator(
        lambda choice: choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
    ),
]


class PromptBody(OwnerFields):
    """What a response continues and is asked, without how it is to be answered."""

    model: str | None = None
    input: InputField | None = None
    instructions: str | None = None
    conversation: ConversationField = None
    previous_response_id: Name | None = None
    tools: ToolsField | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @cached_property
    def toolset(self) -> Toolset:
        """Raises InvalidField."""
        return read_tools(self.tools or ())

    def to_items(self) -> list[Item]:
        """What is asked now. Raises InvalidField."""
        if self.conversation and self.previous_response_id:
            raise InvalidField("previous_response_id", "goes without conversation: leave one of them out.")
        return to_items(self.input or [])

    def to_prompt(self, items: Sequence[Item]) -> Request:
        """With all items that the model shall see. Raises InvalidField."""
        messages, breakpoints = to_messages(items)
        if not messages:
            raise InvalidField("input", "is required: give a text or items.")
        if self.instructions:
            messages = (Message("system", self.instructions), *messages)
            breakpoints = tuple(replace(one, messages=one.messages + 1) for one in breakpoints)
        return replace(
            self.to_owned(),
            messages=messages,
            breakpoints=breakpoints,
            tools=self.toolset.tools,
            tool_choice=read_choice(self.tool_choice, self.toolset.tools),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_args=self.reasoning.template_args() if self.reasoning else {},
            format=self.text.format.to_format() if self.text and self.text.format else None,
            evict=None if self.truncation is None else self.truncation == "auto",
        )


class ResponseBody(PromptBody, GenerationFields, FormatFields, RoomFields):
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    include: Annotated[list[Label], Field(max_length=64)] | None = None
    metadata: Metadata | None = None
    max_output_tokens: Limit | None = None
    max_tool_calls: Annotated[int, Field(ge=0), WHOLE] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: Label | None = None
    prompt: NotHere = None
    context_management: NotHere = None
    moderation: NotHere = None

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    def check(self) -> None:
        """Raises InvalidField for what cannot be done, or contradicts itself."""
        if self.prompt is not None:
            raise InvalidField(
                "prompt", "OpenAI keeps such prompts, nothing here does: send instructions and input."
            )
        if self.context_management:
            raise InvalidField("context_management", 'is not supported: use truncation "auto".')
        if self.moderation is not None:
            raise InvalidField("moderation", "runs at OpenAI only: leave it out.")
        if self.background and self.stream:
            raise InvalidField("stream", "goes without background: leave one of them out.")
        if self.background and self.store is False:
            raise InvalidField("store", "must be true for a response in the background, which is fetched later.")

    def to_request(self, items: Sequence[Item]) -> Request:
        """`items`: what came before and what is asked now. Raises InvalidField."""
        limit = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        prompt = self.apply_to(self.to_prompt(items))
        return replace(
            prompt,
            format=self.to_format(prompt.format),
            max_tokens=to_limit(limit),
            top_logprobs=self._top_logprobs(),
            ttl=self._ttl() or ttl_of(prompt.breakpoints),
            evict=self.evict if prompt.evict is None else prompt.evict,
            recall=self.to_recall(),
        )

    def _top_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.top_logprobs or _LOGPROBS in (self.include or ()) else None

    def _ttl(self) -> Ttl | None:
        if self.prompt_cache_retention is not None:
            return RETENTIONS[self.prompt_cache_retention]
        options = self.prompt_cache_options
        return _LEAST_TTLS[options.ttl] if options is not None and options.ttl is not None else None


class ConversationBody(OwnerFields):
    items: ItemList | None = None
    metadata: Metadata | None = None


class MetadataBody(OwnerFields):
    metadata: Metadata | None


class ItemsBody(OwnerFields):
    items: Annotated[ItemList, Field(min_length=1)]


# ── what a response tells about itself ──


def response_head(
    body: ResponseBody, response_id: str, created: int, model: str, is_stored: bool
) -> dict[str, Json]:
    """The response before anything of it is written: every field but those that the answer decides."""
    sampling = body.to_sampling()
    cache_options = (
        {"mode": "implicit", "ttl": body.prompt_cache_options.ttl} if body.prompt_cache_options else None
    )
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation} if body.conversation else None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        **({"prompt_cache_options": cache_options} if cache_options else {}),
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": _text_json(body.text),
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [_tool_json(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _tool_json(tool: Mapping[str, Json]) -> dict[str, Json]:
    if tool["type"] != "function":
        return dict(tool)
    return {"description": None, "parameters": None, "strict": None, **tool}


def _text_json(text: TextFields | None) -> dict[str, Json]:
    wanted = text.format if text else None
    told: dict[str, Json] = {"type": wanted.type if wanted else "text"}
    if wanted is not None and wanted.type == "json_schema":
        told |= {"name": wanted.name, "schema": wanted.schema_, "strict": True, "description": None}
    return {"format": told, "verbosity": text.verbosity if text else None}


def conversation_json(conversation: ApiConversation) -> dict[str, Json]:
    created = int(conversation.created)
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": created,
        "metadata": conversation.metadata,
    }


def items_json(items: Sequence[Item], has_more: bool) -> dict[str, Json]:
    """A page of items."""
    ids = [item["id"] for item in items]
    ends = {"first_id": ids[0] if ids else "", "last_id": ids[-1] if ids else ""}
    return {"object": "list", "data": list(items), **ends, "has_more": has_more}
