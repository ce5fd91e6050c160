"""The bodies of `/v1/chat/completions` and `/v1/completions`, as a `Request`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator

from emberkeep.api.body import INT32_MAX, NO_OTHERS, Body, Count, validate, whole
from emberkeep.api.errors import TEMPLATE_NAME
from emberkeep.api.fields import ChoiceCount, FormatFields, LogprobFields, OwnerFields, RoomFields, ttl_of
from emberkeep.api.openai.messages import (
    ChoiceField,
    CustomTool,
    LegacyChoiceField,
    MessageList,
    ToolList,
    to_breakpoints,
    to_choice,
    to_messages,
)
from emberkeep.api.sampling import GenerationFields, Limit, TopLogprobs, to_limit
from emberkeep.api.tools import FunctionFields, check_choice
from emberkeep.errors import InvalidField
from emberkeep.types.request import (
    Infill,
    Json,
    ReasoningFormat,
    Request,
    Tool,
    ToolChoice,
    Ttl,
)

USUAL_COMPLETION = 256
"""Tokens of a raw completion, unless it says: a model that was trained on texts only never ends one."""


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


MAX_PROMPTS = 32

Prompt = str | tuple[int, ...]


def to_prompts(value: Any, most: int = MAX_PROMPTS) -> tuple[Prompt, ...]:
    """Raises ValueError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("give a string, a list of strings, a list of token ids or a list of such lists")
    if isinstance(value[0], (int, float)):
        return (_to_tokens(value),)
    if len(value) > most:
        raise ValueError(f"give at most {most} of them in one request")
    return tuple(item if isinstance(item, str) else _to_tokens(item) for item in value)


def _to_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("each of them is a string or a list of token ids that is not empty")
    if not all(type(token) is int for token in value):
        value = [whole(token) for token in value]
    if not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise ValueError("a token id is a whole number that is not negative")
    return tuple(value)


_Tokens = Annotated[list[Count], Field(min_length=1)]
_Several = Annotated[list[str | _Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    tuple[Prompt, ...], PlainValidator(to_prompts, json_schema_input_type=str | _Tokens | _Several)
]


class CompletionFields(Body):
    """What only the completion of a raw text has."""

    n: ChoiceCount | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: ChoiceCount | None = None

    @property
    def tried(self) -> int:
        """How many choices are generated for each prompt."""
        return self.best_of or self.n or 1

    @property
    def chooses_best(self) -> bool:
        """Only the likeliest of the choices that are generated are told."""
        return self.tried != (self.n or 1)

    def apply_to_completion(self, request: Request) -> Request:
        """`request`, with the log probabilities that it is asked for, and what these fields say. Raises
        InvalidField for what cannot be done."""
        request = replace(request, echo=bool(self.echo), infill=self._infill())
        if not self.chooses_best:
            return request
        if self.tried < (self.n or 1):
            raise InvalidField("best_of", "give n or more.")
        if request.scores_prompt:
            raise InvalidField("best_of", "goes without the log probabilities of an echoed prompt.")
        return replace(request, n=self.tried, top_logprobs=request.top_logprobs or 0)

    def _infill(self) -> Infill | None:
        if not self.suffix:
            return None
        if self.echo:
            raise InvalidField("echo", "goes without suffix: leave one of them out.")
        return Infill(self.suffix)


class CompletionBody(CompletionFields, GenerationBody):
    prompt: Prompts
    logprobs: TopLogprobs | None = None

    def to_requests(self) -> list[Request]:
        """One per prompt. Raises InvalidField for what cannot be done."""
        if self.chooses_best and self.stream:
            raise InvalidField("best_of", "goes without stream: which is best is known at the end.")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidField("suffix", "goes with prompts that are texts, and not with token ids.")
        limit = USUAL_COMPLETION if self.max_tokens is None else to_limit(self.max_tokens)
        base = replace(self.to_base(), top_logprobs=self.logprobs, max_tokens=limit)
        base = self.apply_to_completion(base)
        return [replace(base, prompt=prompt) for prompt in self.prompt]


# ── chats ──

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
