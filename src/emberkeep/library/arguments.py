"""From what a Python user writes (texts, OpenAI-style dicts, keywords) to a `Request`.

The fields and their bounds are those of the HTTP API (`emberkeep.api`): both refuse the same, with the same
words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Literal

from emberkeep.api.body import Body, Label, validate
from emberkeep.api.errors import HALF_A_CHARACTER
from emberkeep.api.fields import ChoiceCount, FormatFields, LogprobFields, RoomFields, ttl_of
from emberkeep.api.llama_server import LineFields
from emberkeep.api.openai.body import CompletionFields, TemplateFields
from emberkeep.api.openai.messages import (
    BeginningList,
    ChoiceField,
    MessageList,
    ToolList,
    message_json,
    prefix_of_chats,
    to_breakpoints,
    to_choice,
    to_messages,
)
from emberkeep.api.sampling import GenerationFields, to_limit
from emberkeep.api.tools import call_json, check_choice
from emberkeep.errors import InvalidField, RequestError
from emberkeep.library.options import HTTP_NAMES, Approximate, Options, PrefixOptions
from emberkeep.text import did_you_mean
from emberkeep.types.lineage import Approximation, private_namespace
from emberkeep.types.request import Json, Message, Request, Tool, ToolCall, Ttl

Messages = str | Sequence[Message | Mapping[str, Json]]
"""A text is one message of the user."""

Tools = Sequence[Tool | Mapping[str, Json] | Callable[..., Any]]
"""Definitions, whose calls the caller executes, and functions, which run here."""

MAX_TOKENS = 256
_GIVEN_BY_PLACE = ("prompt", "messages", "tools")


class _GenerationCall(GenerationFields, FormatFields, RoomFields, LogprobFields):
    n: ChoiceCount | None = None
    post_sampling_probs: bool | None = None
    return_progress: bool | None = None
    user: Label | None = None
    namespace: Label | None = None
    use_cache: bool | None = None
    conversation_id: Label | None = None
    prompt_cache_key: Label | None = None
    prefix_hash: Label | None = None
    ttl: Literal["short", "long", "extended"] | None = None

    def to_base(self) -> Request:
        """The request of this call, without its prompt. Raises InvalidField where arguments contradict each
        other."""
        return replace(
            self.apply_to(Request()),
            format=self.to_format(),
            max_tokens=to_limit(self.max_tokens),
            n=self.n or 1,
            top_logprobs=self.to_top_logprobs(),
            logprobs_as_drawn=bool(self.post_sampling_probs),
            want_progress=bool(self.return_progress),
            user=self.user or "",
            namespace=private_namespace(self.user or "", self.namespace or ""),
            use_cache=self.use_cache is not False,
            evict=self.evict,
            recall=self.to_recall(),
            conversation_id=self.conversation_id or None,
            cache_key=self.prompt_cache_key or None,
            prefix_hash=self.prefix_hash or None,
            ttl=Ttl(self.ttl) if self.ttl else None,
        )


class _PromptCall(CompletionFields, LineFields, _GenerationCall):
    prompt: str

    def to_request(self) -> Request:
        """Raises InvalidField where arguments contradict each other."""
        return replace(self.apply_to_completion(self.apply_to_lines(self.to_base())), prompt=self.prompt)


class _PrefixCall(_GenerationCall, TemplateFields):
    messages: BeginningList
    tools: ToolList | None = None

    def to_base(self) -> Request:
        base, told = super().to_base(), self.chat_template_kwargs or {}
        return replace(base, template_args=told, reasoning=self.to_reasoning())


class _ChatCall(_PrefixCall):
    messages: MessageList
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool | None = None


def prefix_request(prompt_or_messages: Messages, tools: Tools | None, options: PrefixOptions) -> Request:
    """Something to have ready: a text is a raw prompt, and tools may come without messages.

    Raises RequestError, or InvalidField with the argument's name.
    """
    options = {**options, "max_tokens": 0}
    if isinstance(prompt_or_messages, str):
        return prompt_request(prompt_or_messages, options).decided(is_prefix=True)
    given = {"messages": _plain(list(prompt_or_messages)), "tools": _plain(tools)}
    call = validate(_PrefixCall, {**_settle(_PrefixCall, options), **given})
    return prefix_of_chats(call.to_base(), call.messages, call.tools or [])


def prompt_request(prompt: str, options: Mapping[str, object]) -> Request:
    """Raises RequestError, or InvalidField with the argument's name."""
    return validate(_PromptCall, {**_settle(_PromptCall, options), "prompt": _plain(prompt)}).to_request()


def chat_request(
    messages: Messages, tools: Tools | None, options: Mapping[str, object], *, functions: Sequence[str] = ()
) -> Request:
    """`functions`: names of those that run here. Raises RequestError, or InvalidField with the argument's name."""
    listed = [Message("user", messages)] if isinstance(messages, str) else messages
    given = {"messages": _plain(listed), "tools": _plain(tools)}
    call = validate(_ChatCall, {**_settle(_ChatCall, options), **given})
    listed_tools = tuple(tool.to_tool() for tool in call.tools or ())
    choice = to_choice(call.tool_choice)
    check_choice(choice, (*listed_tools, *map(Tool, functions)))
    base, breakpoints = call.to_base(), to_breakpoints(call.messages)
    return replace(
        base,
        messages=to_messages(call.messages),
        breakpoints=breakpoints,
        ttl=base.ttl or ttl_of(breakpoints),
        tools=listed_tools,
        tool_choice=choice,
        parallel_tool_calls=call.parallel_tool_calls is not False,
    )


def _settle(call: type[Body], options: Mapping[str, object]) -> dict[str, Json]:
    """Raises InvalidField for a name that `call` does not have."""
    known = option_names(call)
    for name in options:
        if name not in known:
            raise InvalidField(name, f"is not an argument here: {_what_is(name, call)}")
    given = {name: _plain(value) for name, value in options.items()}
    if isinstance(prediction := given.get("prediction"), str):
        given["prediction"] = {"type": "content", "content": prediction}
    return {"max_tokens": MAX_TOKENS, **given}


def prompt_or_chat_request(prompt_or_messages: Messages, options: Mapping[str, object]) -> Request:
    """A text is a raw prompt. Raises RequestError, or InvalidField with the argument's name."""
    if isinstance(prompt_or_messages, str):
        return prompt_request(prompt_or_messages, options)
    return chat_request(prompt_or_messages, None, options)


def verify_options(max_tokens: int, approximate: Approximate, kv_bits: int | None) -> Options:
    """The options of a greedy answer that is to be compared with another one."""
    return {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "approximate": approximate if approximate is not None else False,
        "kv_bits": kv_bits,
        "speculation": False,  # steps of another shape round differently
    }


def batch_requests(prompts: Sequence[Messages], options: Mapping[str, object]) -> list[Request]:
    """Raises RequestError, or InvalidField with the argument's name or the prompt's number."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        raise InvalidField("prompts", "give a list of prompts.")
    return [_numbered(number, prompt, options) for number, prompt in enumerate(prompts)]


def _numbered(number: int, prompt: Messages, options: Mapping[str, object]) -> Request:
    if not isinstance(prompt, (str, list, tuple)):
        raise InvalidField(f"prompts[{number}]", "give a text, or messages.")
    try:
        return prompt_or_chat_request(prompt, options)
    except RequestError as error:
        if error.param is None or error.param.split("[")[0] not in _GIVEN_BY_PLACE:
            raise
        raise InvalidField(f"prompts[{number}]", f"cannot be used: {error}") from error


@cache
def option_names(call: type[Body]) -> list[str]:
    """The keywords of a call."""
    names = dict.fromkeys(info.alias or name for name, info in call.model_fields.items())
    return [name for name in names if name not in (*_GIVEN_BY_PLACE, *HTTP_NAMES)]


def _what_is(name: str, call: type[Body]) -> str:
    if name in HTTP_NAMES:
        return f"use {HTTP_NAMES[name]}."
    known = option_names(call)
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
            return {str(key) if type(key) is int else key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _check_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"The request cannot be used: {HALF_A_CHARACTER}") from None
    return text
