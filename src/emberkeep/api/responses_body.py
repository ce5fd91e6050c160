"""The bodies of OpenAI's Responses API, and what a response tells about itself.

A response is asked for with items (`api/responses_items.py`) and answered with items (`api/responses_answer.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from emberkeep.api.body import BY_KIND, WHOLE, Body, ByKind, Label, Name, not_here
from emberkeep.api.fields import (
    FormatFields,
    GenerationFields,
    Limit,
    OwnerFields,
    RoomFields,
    check_choice,
    to_limit,
    ttl_of,
)
from emberkeep.api.kinds import CustomFields, FunctionFields, Schema, ToolName, TopLogprobs
from emberkeep.api.openai_chat import RETENTIONS
from emberkeep.api.responses_items import Called, Item, ItemList, WholeItemList, model_name, to_items, to_messages
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


class CacheOptions(Body):
    ttl: Literal["30m", "12h"] | None = None


_LEAST_TTLS = {"30m": Ttl.LONG, "12h": Ttl.EXTENDED}


# ── tools ──


class NamedFunctionTool(FunctionFields):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]


class NamedCustomTool(CustomFields):
    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]


class NamespaceTool(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["namespace"]
    name: ToolName
    tools: list[Annotated[NamedFunctionTool | NamedCustomTool, BY_KIND]]


class OfferedSearch(Body):
    """A search as Codex writes it, which offers it in every request: nothing here can run it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search"]
    external_web_access: Any


def _may_be_left_out(tool: Json) -> Json:
    if isinstance(tool, dict) and tool.get("type") == "web_search" and "external_web_access" not in tool:
        raise ValueError("'web_search' runs at OpenAI only: leave it out")
    return tool


OwnTool = NamedFunctionTool | NamedCustomTool
ToolsField = Annotated[
    list[
        Annotated[
            OwnTool | NamespaceTool | OfferedSearch,
            ByKind("{kind} runs at OpenAI only: leave it out"),
            BeforeValidator(_may_be_left_out),
        ]
    ],
    Field(max_length=256),
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


def read_tools(given: Sequence[OwnTool | NamespaceTool | OfferedSearch]) -> Toolset:
    """Raises InvalidField where two have the same name."""
    tools: list[Tool] = []
    called: dict[str, Called] = {}
    left_out: list[str] = []

    def add(given: OwnTool, path: str, namespace: str | None = None) -> None:
        name = model_name(given.name, namespace)
        if name in called:
            raise InvalidField(f"{path}.name", "two tools have this name: rename one.")
        called[name] = Called(given.name, namespace, isinstance(given, NamedCustomTool))
        tools.append(replace(given.to_tool(), name=name))

    for place, tool in enumerate(given):
        if isinstance(tool, OfferedSearch):
            left_out.append(tool.type)
        elif isinstance(tool, NamespaceTool):
            for inner_place, inner in enumerate(tool.tools):
                add(inner, f"tools[{place}].tools[{inner_place}]", tool.name)
        else:
            add(tool, f"tools[{place}]")
    return Toolset(tuple(tools), called, tuple(left_out))


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: Name
    namespace: Label | None = None

    @property
    def model_name(self) -> str:
        return model_name(self.name, self.namespace)


class AllowedNamedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedNamedTools,
    ByKind("{kind} cannot be chosen here: give none, auto, required or the type and name of a function"),
]


def read_choice(choice: ToolChoiceField | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Raises InvalidField for what is not among the tools."""
    match choice:
        case None:
            read = ToolChoice()
        case NamedTool():
            read = ToolChoice("named", choice.model_name)
        case AllowedNamedTools():
            read = ToolChoice(choice.mode, allowed=tuple(tool.model_name for tool in choice.tools))
        case _:
            read = ToolChoice(choice)
    check_choice(read, tools)
    return read


# ── the bodies ──


class ConversationReference(Body):
    id: Name


ConversationField = Annotated[
    Name,
    BeforeValidator(
        lambda value: value["id"] if isinstance(value, dict) and "id" in value else value,
        json_schema_input_type=Name | ConversationReference,
    ),
]


class PromptBody(OwnerFields):
    """What a response continues and is asked, without how it is to be answered."""

    model: str | None = None
    input: Annotated[str | ItemList, BY_KIND] | None = None
    instructions: str | None = None
    conversation: ConversationField | None = None
    previous_response_id: Name | None = None
    tools: ToolsField | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @cached_property
    def toolset(self) -> Toolset:
        """Raises InvalidField."""
        return read_tools(self.tools or [])

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
    top_logprobs: TopLogprobs | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: Label | None = None
    prompt: Annotated[
        None, not_here("OpenAI keeps such prompts, nothing here does: send instructions and input")
    ] = None
    context_management: Annotated[None, not_here('is not supported: use truncation "auto"')] = None
    moderation: Annotated[None, not_here("runs at OpenAI only: leave it out")] = None

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    def check(self) -> None:
        """Raises InvalidField where fields contradict each other."""
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
    items: WholeItemList | None = None
    metadata: Metadata | None = None


class MetadataBody(OwnerFields):
    metadata: Metadata | None


class ItemsBody(OwnerFields):
    items: Annotated[WholeItemList, Field(min_length=1)]


# ── what a response tells about itself ──


_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "truncation", "user"),
)


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
        **{name: getattr(body, name) for name in _ECHOED},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "conversation": {"id": body.conversation} if body.conversation else None,
        **({"prompt_cache_options": cache_options} if cache_options else {}),
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": _text_json(body.text),
        "tool_choice": _plain(body.tool_choice or "auto"),
        "tools": [_tool_json(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "usage": None,
        "metadata": body.metadata or {},
    }


def _plain(value: Json) -> Json:
    return value.model_dump(exclude_unset=True) if isinstance(value, Body) else value


def _tool_json(tool: Body) -> dict[str, Json]:
    absent = {"description": None, "parameters": None, "strict": None}
    return {**(absent if isinstance(tool, NamedFunctionTool) else {}), **tool.model_dump(exclude_unset=True)}


def _text_json(text: TextFields | None) -> dict[str, Json]:
    form = text.format if text else None
    fields: dict[str, Json] = {"type": form.type if form else "text"}
    if form is not None and form.type == "json_schema":
        fields |= {"name": form.name, "schema": form.schema_, "strict": True, "description": None}
    return {"format": fields, "verbosity": text.verbosity if text else None}


def conversation_json(conversation: ApiConversation) -> dict[str, Json]:
    about = {"id": conversation.id, "object": "conversation", "created_at": int(conversation.created)}
    return {**about, "metadata": conversation.metadata}


def items_json(items: Sequence[Item], has_more: bool) -> dict[str, Json]:
    """A page of items."""
    ids = [item["id"] for item in items]
    ends = {"first_id": ids[0] if ids else "", "last_id": ids[-1] if ids else ""}
    return {"object": "list", "data": list(items), **ends, "has_more": has_more}
