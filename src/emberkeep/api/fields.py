"""Fields that every API has: whose request it is, how and what is generated, what is sent again.

HTTP and the library refuse the same, with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from emberkeep.api.body import BY_KIND, INT32_MAX, WHOLE, Body, Count, Label, Name, not_here
from emberkeep.api.kinds import (
    LEAST_SLICE,
    Approximate,
    BiasByToken,
    BiasPairs,
    Choices,
    FormatText,
    KvBits,
    LastN,
    Penalty,
    PredictionBody,
    Repetition,
    ResponseFormat,
    Samplers,
    SchemaOrText,
    Share,
    Stops,
    TopLogprobs,
    UpTo100,
    UserId,
)
from emberkeep.errors import InvalidField
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import (
    AnswerFormat,
    Breakpoint,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    Recall,
    RegexFormat,
    Request,
    Sampling,
    Tool,
    ToolChoice,
    Ttl,
)

# ── whose it is ──


class UserFields(Body):
    """The fields that say whose request it is."""

    user_id: UserId | None = None
    llama_user_id: UserId | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    cache_salt: Name | None = None

    def to_user(self) -> str:
        """OpenAI's `user` counts too, and `safety_identifier` that replaces it: a user who is named must not share
        state with those who are not.

        Raises InvalidField where fields contradict each other.
        """
        if self.user_id and self.llama_user_id and self.user_id != self.llama_user_id:
            raise InvalidField("llama_user_id", "must equal user_id when both are given.")
        return self.user_id or self.llama_user_id or self.user or self.safety_identifier or ""

    def to_namespace(self) -> str:
        """Raises InvalidField where fields contradict each other."""
        return private_namespace(self.to_user(), self.cache_salt or "")


class OwnerFields(UserFields):
    """Whose state it is, and what the owner calls it."""

    conversation_id: Label | None = None
    prompt_cache_key: Label | None = None
    prefix_hash: Label | None = None

    def to_owned(self) -> Request:
        """A request with these fields and nothing else. Raises InvalidField where fields contradict each other."""
        return Request(
            user=self.to_user(),
            namespace=self.to_namespace(),
            conversation_id=self.conversation_id or None,
            cache_key=self.prompt_cache_key or None,
            prefix_hash=self.prefix_hash or None,
        )


# ── how an answer is generated: the fields of OpenAI and llama-server, and ours ──


NO_LIMIT = -1
ANY_SLOT = -1
USUAL_LAST_N = 64
"""Tokens that penalties look at where a client speaks llama-server's language and does not say."""


def _no_less_than_no_limit(limit: int) -> int:
    if limit < NO_LIMIT:
        raise ValueError(f"give 0 or more, or {NO_LIMIT} for no limit")
    return limit


Limit = Annotated[
    int,
    Field(le=INT32_MAX, json_schema_extra={"minimum": NO_LIMIT}),
    WHOLE,
    AfterValidator(_no_less_than_no_limit),
]


class GenerationFields(Body):
    """Every field may be null, which means the same as leaving it out."""

    max_tokens: Limit | None = None
    stop: Stops | None = None

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Repetition | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    logit_bias: Annotated[BiasByToken | BiasPairs, BY_KIND] | None = None

    repeat_penalty: Repetition | None = None
    repeat_last_n: LastN | None = None
    dry_multiplier: UpTo100 | None = None
    dry_base: Annotated[float, Field(le=100)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: LastN | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=64)] | None
    ) = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    mirostat: Annotated[int, Field(ge=0, le=2), WHOLE] | None = None
    mirostat_tau: UpTo100 | None = None
    mirostat_eta: UpTo100 | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=5)] | None = None
    dynatemp_exponent: UpTo100 | None = None
    adaptive_target: Annotated[float, Field(lt=0)] | None = None
    samplers: Samplers | None = None
    min_keep: Count | None = None
    ignore_eos: bool | None = None

    kv_bits: KvBits | None = None
    prefill_chunk_size: Annotated[int, Field(ge=LEAST_SLICE, le=65_536), WHOLE] | None = None
    approximate: Approximate | None = None
    speculation: bool | None = None
    prediction: PredictionBody | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Field(ge=ANY_SLOT, le=INT32_MAX), WHOLE] | None = None

    def apply_to(self, request: Request) -> Request:
        """`request` with what these fields say, but for `max_tokens`, which has other names, too."""
        return replace(
            request,
            sampling=self.to_sampling(),
            stop=tuple(self.stop or ()),
            use_cache=self.cache_prompt is not False,
            kv_bits=self.kv_bits,
            prefill_slice=self.prefill_chunk_size,
            approximate=self.approximate.to_approximation() if self.approximate is not None else None,
            slot=None if self.id_slot == ANY_SLOT else self.id_slot,
            speculation=self.speculation,
            prediction=self.prediction.to_text() if self.prediction is not None else "",
        )

    def to_sampling(self) -> Sampling:
        given: dict[str, Any] = {}
        if self.repeat_penalty is not None:
            given = {"repeat_last_n": USUAL_LAST_N, "repetition_penalty": self.repeat_penalty}
        given |= {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if given.get("dry_base", 1) < 1:
            del given["dry_base"]
        if self.top_k == -1:
            given["top_k"] = 0  # OpenAI-compatible servers write it so
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # random generators take no negative seeds
        if isinstance(self.logit_bias, list):
            given["logit_bias"] = {token: bias for token, bias in self.logit_bias if isinstance(token, int)}
            given["text_bias"] = tuple((text, bias) for text, bias in self.logit_bias if isinstance(text, str))
        elif self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return Sampling(**given)


_SAMPLING = [field.name for field in fields(Sampling) if field.name in GenerationFields.model_fields]


def to_limit(max_tokens: int | None) -> int | None:
    return None if max_tokens == NO_LIMIT else max_tokens


class LogprobFields(Body):
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def to_top_logprobs(self) -> int | None:
        """Raises InvalidField where fields contradict each other."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidField("top_logprobs", "needs logprobs to be true.")
        return None


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    """Raises InvalidField for what is not among the tools."""
    if choice.mode == "required" and not (tools and choice.allowed != ()):
        raise InvalidField("tool_choice", "required needs at least one tool: give tools.")
    named = {choice.name} if choice.mode == "named" else set(choice.allowed or ())
    if not named <= {tool.name for tool in tools}:
        raise InvalidField("tool_choice", "names a function that is not among the tools.")


# ── what it must look like, under the names that clients of several servers have for it ──


class StructuredOutputs(Body):
    """vLLM's object: one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: FormatText | None = None
    choice: Choices | None = None
    grammar: FormatText | None = None
    structural_tag: Annotated[None, not_here("is not supported: use json, regex or grammar")] = None

    def formats(self) -> Iterator[AnswerFormat]:
        if self.json_object:
            yield JsonFormat(param="structured_outputs.json_object")
        yield from _formats(self, _STRUCTURED, "structured_outputs.")


class FormatFields(Body):
    """The names under which clients of several servers say what an answer must look like: one at a time."""

    response_format: ResponseFormat | None = None
    grammar: FormatText | None = None
    json_schema: SchemaOrText | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: FormatText | None = None
    guided_choice: Choices | None = None
    guided_grammar: FormatText | None = None
    structured_outputs: StructuredOutputs | None = None

    def to_format(self, own: AnswerFormat | None = None) -> AnswerFormat | None:
        """`own`: what a field says that one API alone has. Raises InvalidField for more than one."""
        response_format = self.response_format.to_format() if self.response_format else None
        formats = [each for each in (own, response_format) if each is not None]
        formats += _formats(self, _GUIDED)
        formats += self.structured_outputs.formats() if self.structured_outputs else ()
        if len(formats) > 1:
            raise InvalidField(formats[1].param, f"goes without {formats[0].param}: leave one of them out.")
        return formats[0] if formats else None


Maker = Callable[..., AnswerFormat]


def _choice(texts: list[str], *, param: str) -> AnswerFormat:
    return ChoiceFormat(tuple(texts), param=param)


_GUIDED: dict[str, Maker] = {
    "grammar": GrammarFormat,
    "json_schema": JsonFormat,
    "guided_json": JsonFormat,
    "guided_regex": RegexFormat,
    "guided_choice": _choice,
    "guided_grammar": GrammarFormat,
}
_STRUCTURED: dict[str, Maker] = {
    "json_": JsonFormat,
    "regex": RegexFormat,
    "choice": _choice,
    "grammar": GrammarFormat,
}


def _formats(fields: Body, makers: Mapping[str, Maker], prefix: str = "") -> Iterator[AnswerFormat]:
    """What is given of these fields. A grammar without text is none."""
    for name, make in makers.items():
        if (value := getattr(fields, name)) not in (None, ""):
            yield make(value, param=f"{prefix}{name.rstrip('_')}")


# ── a conversation that is longer than the context, and beginnings that are sent again ──


class RoomFields(Body):
    """What may be done when a conversation is longer than the context."""

    evict: bool | None = None
    recall: Literal["off", "tool", "auto"] | None = None

    def to_recall(self) -> Recall | None:
        return Recall(self.recall) if self.recall is not None else None


class CacheControl(Body):
    """Anthropic's: the prompt will be sent again up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    def to_ttl(self) -> Ttl:
        return Ttl.LONG if self.ttl == "1h" else Ttl.SHORT


class MarkFields(Body):
    """Fields of a message, or a part of one. With either, a beginning that is sent again ends with it."""

    cache_control: CacheControl | None = None
    stable: bool | None = None

    def to_mark(self) -> Ttl | None:
        """How long that beginning is kept at least. None: none ends here."""
        if self.cache_control is not None:
            return self.cache_control.to_ttl()
        return Ttl.SHORT if self.stable else None


def breakpoints_in_text(parts: Iterable[tuple[Ttl | None, str | None]], messages: int) -> list[Breakpoint]:
    """Where beginnings end in the last of so many messages, whose text has the texts of these parts on lines of
    their own. Each part comes with its mark; a text of None adds nothing. One at the end of the text is one at the
    end of the message."""
    chars, ends = -1, list[tuple[int, Ttl]]()
    for ttl, text in parts:
        chars += len(text) + 1 if text is not None else 0
        if ttl is not None:
            ends.append((max(chars, 0), ttl))
    return [Breakpoint(messages, None if end == max(chars, 0) else end, ttl) for end, ttl in ends]


def ttl_of(breakpoints: Iterable[Breakpoint]) -> Ttl | None:
    """How long a conversation with these is kept; None: as usual."""
    return Ttl.LONG if any(one.ttl is Ttl.LONG for one in breakpoints) else None
