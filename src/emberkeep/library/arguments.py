"""From what a Python user writes (texts, OpenAI-style dicts, keywords) to a `Request`.

The fields and their bounds are those of the HTTP API (`emberkeep.api`): both refuse the same, with the same
words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, TypedDict

from emberkeep.api.errors import HALF_A_CHARACTER
from emberkeep.api.messages import (
    BeginningList,
    ChoiceField,
    MessageList,
    ToolList,
    call_json,
    check_choice,
    message_json,
    prefix_of_chats,
    to_breakpoints,
    to_messages,
)
from emberkeep.api.request import GenerationFields, Label, RoomFields, Schema, to_limit, validate
from emberkeep.config import Config, WarmPrefix
from emberkeep.errors import ConfigError, InvalidField, RequestError
from emberkeep.text import did_you_mean
from emberkeep.types import (
    SHARED,
    Approximation,
    Json,
    JsonFormat,
    Message,
    Request,
    Tool,
    ToolCall,
    ToolChoice,
    Ttl,
    private_namespace,
)

Messages = str | Sequence[Message | Mapping[str, Json]]
"""A text is one message of the user."""

Tools = Sequence[Tool | Mapping[str, Json] | Callable[..., Any]]
"""Definitions, whose calls the caller executes, and functions, which run here."""

Approximate = str | bool | Approximation | Mapping[str, Json] | None

MAX_TOKENS = 256


class Options(TypedDict, total=False):
    """Keywords that every kind of generation takes; None means the same as leaving one out."""

    max_tokens: int | None
    """256 unless given; None or -1: until the model ends or the context is full."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    json_schema: Mapping[str, Json] | None
    user: str | None
    """The user: stored state is shared only between calls for the same user."""
    namespace: str | None
    """Separates state further within a user: HTTP's `cache_salt`."""
    use_cache: bool | None
    approximate: Approximate
    """`cacheblend`, `selective`, `none`, or an `Approximation`: stored state may be reused at other places. False:
    it may not. None: as configured."""
    kv_bits: int | None
    """16, 8 or 4: in how many bits the state is stored. Fewer than 16 are not exact. None: as configured."""
    evict: bool | None
    """Whether old messages may leave a conversation that is too long. None: as configured."""
    recall: str | None
    """How they come back: `off`, `tool` or `auto`. None: as configured."""
    tool_choice: str | Mapping[str, Json] | None
    """`auto`, `none`, `required`, or in OpenAI's shape the one function that has to be called."""
    conversation_id: str | None
    ttl: str | None
    """`short`, `long` or `extended`."""
    speculation: bool | None
    """False: nothing is drafted. None: as configured."""
    prediction: str | Mapping[str, Json] | None
    """What the answer will be like, as a text or in OpenAI's shape: where it is right, the answer comes faster."""


class _GenerationCall(GenerationFields, RoomFields):
    json_schema: Schema | None = None
    user: Label | None = None
    namespace: Label | None = None
    use_cache: bool | None = None
    conversation_id: Label | None = None
    ttl: Literal["short", "long", "extended"] | None = None

    def to_base(self) -> Request:
        """The request of this call, without its prompt."""
        return replace(
            self.apply_to(Request()),
            format=None if self.json_schema is None else JsonFormat(self.json_schema),
            max_tokens=to_limit(self.max_tokens),
            user=self.user or "",
            namespace=private_namespace(self.user or "", self.namespace or ""),
            use_cache=self.use_cache is not False,
            evict=self.evict,
            recall=self.to_recall(),
            conversation_id=self.conversation_id or None,
            ttl=Ttl(self.ttl) if self.ttl else None,
        )


class _PromptCall(_GenerationCall):
    prompt: str


class _ChatCall(_GenerationCall):
    messages: MessageList
    tools: ToolList | None = None
    tool_choice: ChoiceField = ToolChoice()


class _PrefixCall(_GenerationCall):
    messages: BeginningList
    tools: ToolList | None = None


def prefix_request(prompt_or_messages: Messages, tools: Tools | None, options: Options) -> Request:
    """Something to have ready: a text is a raw prompt, and tools may come without messages.

    Raises RequestError, or InvalidField with the argument's name.
    """
    options = {**options, "max_tokens": 0}
    if isinstance(prompt_or_messages, str):
        return replace(prompt_request(prompt_or_messages, options), is_prefix=True)
    given = {**_settle(options), "messages": _plain(list(prompt_or_messages)), "tools": _plain(tools)}
    call = validate(_PrefixCall, given)
    return prefix_of_chats(call.to_base(), call.messages, call.tools or [])


def declared_prefixes(config: Config) -> list[Request]:
    """Those that the operator declares, as requests whose state every user may reuse. Raises ConfigError."""
    return [_declared_prefix(number, prefix) for number, prefix in enumerate(config.warm, 1)]


def _declared_prefix(number: int, prefix: WarmPrefix) -> Request:
    try:
        request = _prompt_or_chat(prefix)
    except RequestError as error:
        raise ConfigError(f"The prefix to warm number {number} cannot be used: {error}") from error
    return replace(request, user=SHARED, namespace=SHARED, ttl=prefix.ttl)


def _prompt_or_chat(prefix: WarmPrefix) -> Request:
    if prefix.prompt is not None:
        return prefix_request(prefix.prompt, None, {})
    messages = [Message("system", prefix.system)] if prefix.system is not None else list(prefix.messages)
    return prefix_request(messages, list(prefix.tools), {})


def prompt_request(prompt: str, options: Options) -> Request:
    """Raises RequestError, or InvalidField with the argument's name."""
    call = validate(_PromptCall, {**_settle(options), "prompt": _plain(prompt)})
    return replace(call.to_base(), prompt=call.prompt)


def chat_request(
    messages: Messages, tools: Tools | None, options: Options, *, functions: Sequence[str] = ()
) -> Request:
    """`functions`: names of those that run here. Raises RequestError, or InvalidField with the argument's name."""
    listed = [Message("user", messages)] if isinstance(messages, str) else messages
    given = {**_settle(options), "messages": _plain(listed), "tools": _plain(tools)}
    call = validate(_ChatCall, given)
    listed_tools = tuple(tool.to_tool() for tool in call.tools or ())
    check_choice(call.tool_choice, (*listed_tools, *map(Tool, functions)))
    return replace(
        call.to_base(),
        messages=to_messages(call.messages),
        breakpoints=to_breakpoints(call.messages),
        tools=listed_tools,
        tool_choice=call.tool_choice,
    )


def _settle(options: Options) -> dict[str, Json]:
    for name in options:
        if name not in Options.__annotations__:
            raise InvalidField(name, f"is not an argument here: {_what_is(name)}")
    given = {name: _plain(value) for name, value in options.items()}
    if isinstance(prediction := given.get("prediction"), str):
        given["prediction"] = {"type": "content", "content": prediction}
    return {"max_tokens": MAX_TOKENS, **given}


def _what_is(name: str) -> str:
    known = list(Options.__annotations__)
    return did_you_mean(name, known, f"there are {', '.join(known)}.")


def _plain(value: object) -> Json:
    """The value as JSON would have it."""
    match value:
        case str():
            return _check_characters(value)
        case Message():
            return _plain(message_json(value))
        case ToolCall():
            return _plain(call_json(value))
        case Approximation():
            return _plain(asdict(value))
        case Tool():
            return _plain({"function": asdict(value)})
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _check_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"The request cannot be used: {HALF_A_CHARACTER}") from None
    return text
