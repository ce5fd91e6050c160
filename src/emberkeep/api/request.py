"""What a client may ask: the fields of a request, each with its bounds, and how a body is read.

HTTP and the library refuse the same, with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from emberkeep.api.errors import HALF_A_CHARACTER, USER_ID, refusal
from emberkeep.api.field_kinds import INT32_MAX as INT32_MAX
from emberkeep.api.field_kinds import NO_OTHERS as NO_OTHERS
from emberkeep.api.field_kinds import Count as Count
from emberkeep.api.field_kinds import Whole as Whole
from emberkeep.api.field_kinds import whole
from emberkeep.api.sampling import SamplerFields
from emberkeep.config import OFF
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types import (
    AnswerFormat,
    Approximation,
    ChoiceFormat,
    GrammarFormat,
    Infill,
    Json,
    JsonFormat,
    Recall,
    RegexFormat,
    Repair,
    Request,
    Sampling,
    Ttl,
    exceeds_depth,
    private_namespace,
)

MAX_DEPTH = 64
MAX_VALUES = 600_000
"""Values and keys of a body: 100,000 messages. While they are parsed, a third of a second, all threads wait."""


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; known ones must have exactly their JSON type."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


B = TypeVar("B", bound=Body)


def parse_body(model: type[B], raw: bytes) -> B:
    """Raises RequestError, or InvalidField with the path of the first bad field."""
    return validate(model, parse_object(raw))


def validate(model: type[B], value: Mapping[str, Json]) -> B:
    """Raises InvalidField with the path of the first bad field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refusal(first["loc"], first["type"], first.get("ctx", {})) from None


def parse_object(raw: bytes) -> dict[str, Json]:
    """Raises RequestError."""
    value = _parse_json(raw)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def parse_list(raw: bytes) -> list[Json]:
    """Raises RequestError."""
    value = _parse_json(raw)
    if not isinstance(value, list):
        raise RequestError("The body must be a JSON list.")
    return value


def _parse_json(raw: bytes) -> Json:
    if _values(raw) > MAX_VALUES and _values(_without_strings(raw)) > MAX_VALUES:
        raise RequestError(f"The body has more than {MAX_VALUES:,} values: send less.")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is valid JSON, and cannot be encoded or tokenised.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8: send JSON encoded as UTF-8.") from None
    except UnicodeEncodeError:
        raise RequestError(f"The body cannot be used: {HALF_A_CHARACTER}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if exceeds_depth(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _values(raw: bytes) -> int:
    """At least the number of values and keys: each but the first follows one of these characters."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def _without_strings(raw: bytes) -> bytes:
    """Without the strings, whose commas do not count. Stops after as many strings as values are allowed."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"', 2 * MAX_VALUES)[::2])


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number in JSON")


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested too deeply: use at most {MAX_DEPTH} levels.")


# ── fields ──

MAX_SCHEMA_BYTES = 256 << 10
NO_LIMIT = -1
MAX_CHOICES = 16
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


def _small_enough(schema: dict[str, Json]) -> dict[str, Json]:
    try:
        size = len(json.dumps(schema))
    except TypeError as error:
        raise ValueError("give a schema of plain JSON values") from error
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema is too large: use at most {MAX_SCHEMA_BYTES} bytes")
    return schema


def _listed(stop: Json) -> Json:
    return [stop] if isinstance(stop, str) else stop


def _no_less_than_no_limit(limit: int) -> int:
    if limit < NO_LIMIT:
        raise ValueError(f"give 0 or more, or {NO_LIMIT} for no limit")
    return limit


Schema = Annotated[dict[str, Any], AfterValidator(_small_enough)]
Label = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
FactName = Annotated[str, Field(min_length=1, max_length=256)]
Remembered = Annotated[str, Field(min_length=1, max_length=65_536)]
Question = Annotated[str, Field(min_length=1, max_length=4096)]
MaxResults = Annotated[Whole, Field(ge=1, le=100)]
MaxConversations = Annotated[Whole, Field(ge=1, le=1000)]
Limit = Annotated[
    Whole, Field(le=INT32_MAX, json_schema_extra={"minimum": NO_LIMIT}), AfterValidator(_no_less_than_no_limit)
]
Places = Annotated[Whole, Field(ge=0, le=65_536)]
Probability = Annotated[float, Field(gt=0, le=1)]
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
    top_k: Annotated[Whole, Field(ge=-1, le=INT32_MAX)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None

    kv_bits: KvBits | None = None
    approximate: Approximate | None = None
    speculation: bool | None = None
    prediction: PredictionBody | None = None

    def to_prediction(self) -> str:
        return self.prediction.content if self.prediction is not None else ""

    def to_approximation(self) -> Approximation | Literal[False] | None:
        return self.approximate.to_approximation() if self.approximate is not None else None

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


class StreamOptions(Body):
    include_usage: bool | None = None


# ── what an answer must look like ──


def _read_schema(value: Json) -> Json:
    """A schema may be given as the text of one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("give a JSON schema, as an object or as its text") from None


SchemaOrText = Annotated[Schema, BeforeValidator(_read_schema, json_schema_input_type=dict[str, Any] | str)]
FormatText = Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)]
Choices = Annotated[list[FormatText], Field(min_length=1, max_length=4096)]


class NamedSchema(Body):
    schema_: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    def to_format(self) -> JsonFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonFormat(self.schema_)
        if self.json_schema is None and self.schema_ is None:
            raise InvalidField("response_format.json_schema", "is required when type is json_schema.")
        return JsonFormat(self.json_schema.schema_ if self.json_schema else self.schema_)


class StructuredOutputs(Body):
    """vLLM's object: one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: FormatText | None = None
    choice: Choices | None = None
    grammar: FormatText | None = None
    structural_tag: Any = None

    def formats(self) -> Iterator[AnswerFormat]:
        """Raises InvalidField."""
        if self.structural_tag is not None:
            raise InvalidField(
                "structured_outputs.structural_tag", "is not supported: use json, regex or grammar."
            )
        yield from _formats("structured_outputs.json", self.json_)
        if self.json_object:
            yield JsonFormat(param="structured_outputs.json_object")
        yield from _formats("structured_outputs.regex", regex=self.regex)
        yield from _formats("structured_outputs.choice", choice=self.choice)
        yield from _formats("structured_outputs.grammar", grammar=self.grammar)


def _formats(
    param: str,
    schema: Mapping[str, Json] | None = None,
    *,
    grammar: str | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
) -> Iterator[AnswerFormat]:
    """What one field asks for, if it asks for anything. A grammar without text is none."""
    if schema is not None:
        yield JsonFormat(schema, param=param)
    if grammar:
        yield GrammarFormat(grammar, param=param)
    if regex:
        yield RegexFormat(regex, param=param)
    if choice:
        yield ChoiceFormat(tuple(choice), param=param)


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

    def to_format(self) -> AnswerFormat | None:
        """Raises InvalidField for more than one."""
        asked = list(self._formats())
        if len(asked) > 1:
            raise InvalidField(asked[1].param, f"goes without {asked[0].param}: leave one of them out.")
        return asked[0] if asked else None

    def _formats(self) -> Iterator[AnswerFormat]:
        wanted = self.response_format.to_format() if self.response_format else None
        if wanted is not None:
            yield wanted
        yield from _formats("grammar", grammar=self.grammar)
        yield from _formats("json_schema", self.json_schema)
        yield from _formats("guided_json", self.guided_json)
        yield from _formats("guided_regex", regex=self.guided_regex)
        yield from _formats("guided_choice", choice=self.guided_choice)
        yield from _formats("guided_grammar", grammar=self.guided_grammar)
        if self.structured_outputs is not None:
            yield from self.structured_outputs.formats()


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

    def to_owned(self) -> Request:
        """A request with these fields and nothing else. Raises InvalidField where fields contradict each other."""
        return Request(
            user=self.to_user(),
            namespace=self.to_namespace(),
            conversation_id=self.conversation_id or None,
            cache_key=self.prompt_cache_key or None,
        )


# ── bodies ──


ANY_SLOT = -1
RETENTIONS = {"in_memory": Ttl.SHORT, "in-memory": Ttl.SHORT, "24h": Ttl.EXTENDED}


class GenerationBody(GenerationFields, FormatFields, OwnerFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[Whole, Field(ge=ANY_SLOT, le=INT32_MAX)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        return replace(
            self.to_owned(),
            format=self.to_format(),
            sampling=self.to_sampling(),
            max_tokens=to_limit(self.max_tokens),
            stop=tuple(self.stop or ()),
            n=self.n or 1,
            use_cache=self.cache_prompt is not False,
            kv_bits=self.kv_bits,
            approximate=self.to_approximation(),
            ttl=RETENTIONS[self.prompt_cache_retention] if self.prompt_cache_retention else None,
            slot=None if self.id_slot == ANY_SLOT else self.id_slot,
            want_progress=bool(self.stream and self.return_progress),
            speculation=self.speculation,
            prediction=self.to_prediction(),
        )


MAX_PROMPTS = 32

Prompt = str | tuple[int, ...]


def to_prompts(value: Any, most: int = MAX_PROMPTS) -> tuple[Prompt, ...]:
    """Raises ValueError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("give a string, a list of strings, a list of token ids or a list of such lists")
    if isinstance(value[0], int):
        return (_to_tokens(value),)
    if len(value) > most:
        raise ValueError(f"give at most {most} of them in one request")
    return tuple(item if isinstance(item, str) else _to_tokens(item) for item in value)


def _to_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("each of them is a string or a list of token ids that is not empty")
    if not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise ValueError("a token id is a whole number that is not negative")
    return tuple(value)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(to_prompts, json_schema_input_type=str | list[str] | list[Count] | list[list[Count]]),
]


class CompletionBody(GenerationBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None

    def to_requests(self) -> list[Request]:
        """One per prompt. Raises InvalidField for what cannot be done."""
        base = replace(
            self.to_base(),
            echo=bool(self.echo),
            top_logprobs=self.logprobs,
            infill=self._infill(),
            max_tokens=USUAL_COMPLETION if self.max_tokens is None else to_limit(self.max_tokens),
        )
        if self.chooses_best:
            self._check_best()
            base = replace(base, n=self.tried, top_logprobs=self.logprobs or 0)
        return [replace(base, prompt=prompt) for prompt in self.prompt]

    @property
    def tried(self) -> int:
        """How many choices are generated for each prompt."""
        return self.best_of or self.n or 1

    @property
    def chooses_best(self) -> bool:
        """Only the likeliest of the choices that are generated are told."""
        return self.tried != (self.n or 1)

    def _check_best(self) -> None:
        if self.tried < (self.n or 1):
            raise InvalidField("best_of", "give n or more.")
        if self.stream:
            raise InvalidField("best_of", "goes without stream: which is best is known at the end.")
        if self.echo and self.logprobs is not None:
            raise InvalidField("best_of", "goes without the log probabilities of an echoed prompt.")

    def _infill(self) -> Infill | None:
        if not self.suffix:
            return None
        if self.echo:
            raise InvalidField("echo", "goes without suffix: leave one of them out.")
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidField("suffix", "goes with prompts that are texts, and not with token ids.")
        return Infill(self.suffix)
