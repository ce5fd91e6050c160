"""What a client may ask: the fields of a request, each with its bounds.

HTTP and the library refuse the same, with the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError

from emberkeep.api.answer_format import FormatFields
from emberkeep.api.answer_format import Schema as Schema
from emberkeep.api.body import Body as Body
from emberkeep.api.body import parse_body as parse_body
from emberkeep.api.body import parse_list as parse_list
from emberkeep.api.body import parse_object as parse_object
from emberkeep.api.body import validate as validate
from emberkeep.api.errors import USER_ID
from emberkeep.api.field_kinds import INT32_MAX as INT32_MAX
from emberkeep.api.field_kinds import NO_OTHERS as NO_OTHERS
from emberkeep.api.field_kinds import WHOLE as WHOLE
from emberkeep.api.field_kinds import Count as Count
from emberkeep.api.field_kinds import whole
from emberkeep.api.sampling import SamplerFields
from emberkeep.config.settings import OFF
from emberkeep.errors import InvalidField
from emberkeep.types.request import (
    Approximation,
    Breakpoint,
    Infill,
    Json,
    Recall,
    Repair,
    Request,
    Sampling,
    Ttl,
    private_namespace,
)
from emberkeep.values import dataclass

# ── fields ──

NO_LIMIT = -1
ANY_SLOT = -1
MAX_CHOICES = 16
LEAST_SLICE = 32
"""Prompt tokens in a step; with fewer a step takes hardly less time."""
USUAL_COMPLETION = 256
"""Tokens of a raw completion, unless it says: a model that was trained on texts only never ends one."""
_PASSED_ON = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _listed(stop: Json) -> Json:
    return [stop] if isinstance(stop, str) else stop


def _no_less_than_no_limit(limit: int) -> int:
    if limit < NO_LIMIT:
        raise ValueError(f"give 0 or more, or {NO_LIMIT} for no limit")
    return limit


Label = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
FactName = Annotated[str, Field(min_length=1, max_length=256)]
Remembered = Annotated[str, Field(min_length=1, max_length=65_536)]
Question = Annotated[str, Field(min_length=1, max_length=4096)]
MaxResults = Annotated[int, Field(ge=1, le=100), WHOLE]
MaxConversations = Annotated[int, Field(ge=1, le=1000), WHOLE]
Limit = Annotated[
    int,
    Field(le=INT32_MAX, json_schema_extra={"minimum": NO_LIMIT}),
    WHOLE,
    AfterValidator(_no_less_than_no_limit),
]
Places = Annotated[int, Field(ge=0, le=65_536), WHOLE]
Probability = Annotated[float, Field(gt=0, le=1)]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE]
KvBits = Annotated[Literal[16, 8, 4], BeforeValidator(whole)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(_listed, json_schema_input_type=StopText | list[StopText]),
]
UserId = Annotated[str, Field(pattern=USER_ID)]


class ApproximationFields(Body):
    """How state from other positions is repaired. Fields that are left out are as in `Approximation`."""

    repair: Literal["off", "none", "selective", "cacheblend"] = "cacheblend"
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    boundary: Places | None = None
    side: Literal["first", "last", "both"] | None = None
    overlap: Places | None = None
    sinks: Places | None = None

    def to_approximation(self) -> Approximation | Literal[False]:
        if self.repair == OFF:
            return False
        given = {name: value for name, value in self if value is not None}
        return Approximation(**{**given, "repair": Repair(self.repair)})


def _as_object(value: Json) -> Json:
    """A word is short for an object with that `repair`; false stands for off."""
    if value is False:
        return {"repair": OFF}
    return {"repair": value} if isinstance(value, str) else value


Approximate = Annotated[
    ApproximationFields,
    BeforeValidator(
        _as_object,
        json_schema_input_type=Literal[False, "off", "none", "selective", "cacheblend"] | ApproximationFields,
    ),
]


class RoomFields(Body):
    """What may be done when a conversation is longer than the context."""

    evict: bool | None = None
    recall: Literal["off", "tool", "auto"] | None = None

    def to_recall(self) -> Recall | None:
        return Recall(self.recall) if self.recall is not None else None


MAX_PREDICTION = 256 << 10
"""Characters. A quarter of a second to tokenize, and longer than answers are."""


# ── beginnings that are sent again ──


class CacheControl(Body):
    """Anthropic's: the prompt will be sent again up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    def to_ttl(self) -> Ttl:
        return Ttl.LONG if self.ttl == "1h" else Ttl.SHORT


class MarkFields(Body):
    """Of a message, or a part of one. With either, a beginning that is sent again ends with it."""

    cache_control: CacheControl | None = None
    stable: bool | None = None

    def to_mark(self) -> Ttl | None:
        """How long that beginning is kept at least. None: none ends here."""
        if self.cache_control is not None:
            return self.cache_control.to_ttl()
        return Ttl.SHORT if self.stable else None


MARKS = 'give cache_control as {"type": "ephemeral"}, also with a ttl of 5m or 1h, and stable as true or false'


def mark_of(part: Json) -> Ttl | None:
    """As `MarkFields.to_mark`, of what may be none. Raises ValueError."""
    if not isinstance(part, Mapping) or not ("cache_control" in part or "stable" in part):
        return None
    try:
        return MarkFields.model_validate(part).to_mark()
    except ValidationError:
        raise ValueError(MARKS) from None


@dataclass(frozen=True, slots=True)
class TextMarks:
    """Where beginnings end in the text of a message whose parts are on lines of their own."""

    chars: int
    """Of the whole text."""
    ends: tuple[tuple[int, Ttl], ...]
    """How many of them each beginning has, and how long it is kept."""

    def breakpoints(self, messages: int) -> list[Breakpoint]:
        """In the last of so many messages. One at the end of its text is one at the end of the message."""
        return [Breakpoint(messages, None if end == self.chars else end, ttl) for end, ttl in self.ends]


NO_MARKS = TextMarks(0, ())


def text_marks(parts: Iterable[tuple[Json, str | None]]) -> TextMarks:
    """Of parts and the text that each adds; None: it adds none. Raises ValueError."""
    chars, ends = -1, list[tuple[int, Ttl]]()
    for part, text in parts:
        chars += len(text) + 1 if text is not None else 0
        if (ttl := mark_of(part)) is not None:
            ends.append((max(chars, 0), ttl))
    return TextMarks(max(chars, 0), tuple(ends))


def ttl_of(breakpoints: Iterable[Breakpoint]) -> Ttl | None:
    """How long a conversation with these is kept; None: as usual."""
    return Ttl.LONG if any(one.ttl is Ttl.LONG for one in breakpoints) else None


class TextPart(Body):
    type: Literal["text"]
    text: str


def _join_texts(content: Json) -> Json:
    """A list of texts as one text, each on its own line: as in messages."""
    if not isinstance(content, list):
        return content
    return "\n".join(map(_text_of, content))


def _text_of(part: Json) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError("give a text or a list of parts of type text")


PredictedText = Annotated[str, Field(max_length=MAX_PREDICTION)]


class PredictionBody(Body):
    """What the answer will be like: a draft that the model checks."""

    type: Literal["content"]
    content: Annotated[
        PredictedText, BeforeValidator(_join_texts, json_schema_input_type=PredictedText | list[TextPart])
    ]


class GenerationFields(SamplerFields, Body):
    """Every field may be null, which means the same as leaving it out."""

    max_tokens: Limit | None = None
    stop: Stops | None = None

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None

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
            prediction=self.prediction.content if self.prediction is not None else "",
        )

    def to_sampling(self) -> Sampling:
        values = {name: getattr(self, name) for name in _PASSED_ON}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.top_k == -1:
            given["top_k"] = 0  # OpenAI-compatible servers write it so
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # random generators take no negative seeds
        return Sampling(**{**self.sampler_settings(), **given})


def to_limit(max_tokens: int | None) -> int | None:
    return None if max_tokens == NO_LIMIT else max_tokens


class LogprobFields(Body):
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    def to_top_logprobs(self) -> int | None:
        """Raises InvalidField where fields contradict each other."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidField("top_logprobs", "needs logprobs to be true.")
        return None


class StreamOptions(Body):
    include_usage: bool | None = None


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


# ── bodies ──


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
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

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
