"""From what a Python user writes (texts, OpenAI-style dicts, keywords) to a `Request`.

The fields and their bounds are those of the HTTP API (`emberkeep.api`): both refuse the same, with the same
words. `Options` and its kind name the keywords for editors and type checkers, as docs/apis.md does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Literal, TypedDict

from emberkeep.api.body import HALF_A_CHARACTER, Body, Label, validate
from emberkeep.api.fields import (
    FormatFields,
    GenerationFields,
    LogprobFields,
    RoomFields,
    check_choice,
    to_limit,
    ttl_of,
)
from emberkeep.api.kinds import ChoiceCount, call_json
from emberkeep.api.llama_server import LineFields
from emberkeep.api.openai_chat import (
    BeginningList,
    ChoiceField,
    MessageList,
    TemplateFields,
    ToolList,
    message_json,
    prefix_of_chats,
    to_breakpoints,
    to_choice,
    to_messages,
)
from emberkeep.api.openai_completions import CompletionFields
from emberkeep.errors import InvalidField, RequestError
from emberkeep.text import did_you_mean
from emberkeep.types.lineage import Approximation, private_namespace
from emberkeep.types.request import Json, Message, Request, Tool, ToolCall, Ttl

Approximate = str | bool | Approximation | Mapping[str, Json] | None

HTTP_NAMES: Mapping[str, str] = {
    "cache_prompt": "use_cache",
    "cache_salt": "namespace",
    "function_call": "tool_choice",
    "functions": "tools",
    "llama_user_id": "user",
    "max_completion_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "n_probs": "top_logprobs",
    "prompt_cache_retention": "ttl",
    "safety_identifier": "user",
    "user_id": "user",
}
"""Fields of HTTP that Python has under one name, because HTTP has several or another type for it."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    repetition_penalty: float | None
    """On the tokens of the answer; `repeat_penalty` is llama.cpp's, on the latest `repeat_last_n`."""
    frequency_penalty: float | None
    presence_penalty: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    top_n_sigma: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    adaptive_target: float | None
    """Less than 0, which stands for off: there is no adaptive-p here."""
    samplers: str | Sequence[str] | None
    """Which of these are used, and in which order."""
    min_keep: int | None
    ignore_eos: bool | None
    logit_bias: Mapping[int | str, float] | Sequence[Sequence[object]] | None
    """By the ids of tokens; or pairs of an id or a text, and a number or False, which bans it."""


class FormatOptions(TypedDict, total=False):
    """What the answer must look like: at most one of these."""

    json_schema: Mapping[str, Json] | str | None
    response_format: Mapping[str, Json] | None
    grammar: str | None
    guided_json: Mapping[str, Json] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    structured_outputs: Mapping[str, Json] | None


class Options(SamplingOptions, FormatOptions, total=False):
    """What every kind of generation takes."""

    max_tokens: int | None
    """256 unless given; None or -1: until the model ends or the context is full."""
    stop: str | Sequence[str] | None
    n: int | None
    """So many answers, each drawn anew: `choices` of the result."""
    logprobs: bool | None
    """The result has the log probability of every token of its text."""
    top_logprobs: int | None
    """And those of so many others in each token's place."""
    post_sampling_probs: bool | None
    """They are those that tokens were drawn with, and not the model's."""
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
    prefill_chunk_size: int | None
    """Most tokens of the prompt in one step, from 32 on, where that is fewer than configured (`prefill_slice`)."""
    evict: bool | None
    """Whether old messages may leave a conversation that is too long. None: as configured."""
    recall: str | None
    """How they come back: `off`, `tool` or `auto`. None: as configured."""
    conversation_id: str | None
    prompt_cache_key: str | None
    prefix_hash: str | None
    ttl: str | None
    """`short`, `long` or `extended`."""
    speculation: bool | None
    """False: nothing is drafted. None: as configured."""
    prediction: str | Mapping[str, Json] | None
    """What the answer will be like, as a text or in OpenAI's shape: where it is right, the answer comes faster."""
    id_slot: int | None
    return_progress: bool | None
    """A stream has `Progress` among its events while the prompt is evaluated."""


class PromptOptions(Options, total=False):
    """What goes with a raw text only."""

    echo: bool | None
    suffix: str | None
    """What follows the text that is asked for."""
    best_of: int | None
    """So many answers are drawn, and the `n` likeliest of them given, the best first."""
    t_max_predict_ms: int | None
    n_indent: int | None


class PrefixOptions(Options, total=False):
    """What goes with the beginning of a conversation."""

    chat_template_kwargs: Mapping[str, Json] | None
    reasoning_format: str | None


class ChatOptions(PrefixOptions, total=False):
    """What goes with a conversation only."""

    tool_choice: str | Mapping[str, Json] | None
    """`auto`, `none`, `required`, or in OpenAI's shape the one function that has to be called."""
    parallel_tool_calls: bool | None


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
        base, args = super().to_base(), self.chat_template_kwargs or {}
        return replace(base, template_args=args, reasoning=self.to_reasoning())


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
