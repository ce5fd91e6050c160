"""The keywords that generations in Python take, for editors and type checkers.

They are the fields of the HTTP API (docs/apis.md says what each does) under the same names. What is accepted
is read off the models that check them (`library/arguments.py`). None means the same as leaving one out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from emberkeep.types.lineage import Approximation
from emberkeep.types.request import Json

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
