"""How an answer is to be generated: the fields of OpenAI and llama-server, and ours, with their bounds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from emberkeep.api.body import BY_KIND, INT32_MAX, NO_OTHERS, WHOLE, Body, Count, whole
from emberkeep.api.errors import TOKEN_ID
from emberkeep.config.settings import OFF
from emberkeep.types.lineage import Approximation, Repair
from emberkeep.types.request import DEFAULT_SAMPLERS, Json, Request, Sampling

NO_LIMIT = -1
ANY_SLOT = -1
LEAST_SLICE = 32
"""Prompt tokens in a step; with fewer a step takes hardly less time."""
USUAL_LAST_N = 64
"""Tokens that penalties look at where a client speaks llama-server's language and does not say."""
MAX_PREDICTION = 256 << 10
"""Characters. A quarter of a second to tokenize, and longer than answers are."""
BAN = float("-inf")
_MOST_BIASED = 1024
_MOST_BIAS = 10_000.0

# ── samplers ──

_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
}
_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}
_NAMES |= {name: name for name in (*DEFAULT_SAMPLERS, "infill")}
_NAMES |= {name.replace("_", ""): full for name, full in _NAMES.items()}


def _to_samplers(value: Json) -> tuple[str, ...]:
    """Names that llama-server does not know either are left out, as it does: front ends send those of others."""
    if isinstance(value, str):
        return tuple(_LETTERS[letter] for letter in value if letter in _LETTERS)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > 64:
        raise ValueError("give a list of at most 64 names of samplers, or a text of their letters")
    spelled = (name.lower().replace("-", "_") for name in value)
    return tuple(_NAMES[name] for name in spelled if name in _NAMES)


Samplers = Annotated[tuple[str, ...], PlainValidator(_to_samplers, json_schema_input_type=str | list[str])]
LastN = Annotated[
    Count,
    BeforeValidator(
        lambda last: INT32_MAX if last == -1 else last,
        json_schema_input_type=Annotated[int, Field(ge=-1, le=INT32_MAX)],
    ),
]

# ── bias ──

Token = Annotated[int, Field(ge=0, le=INT32_MAX)]
_Pair = tuple[Token | str, Annotated[float, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)] | Literal[False]]


def _to_pair(pair: Json) -> tuple[int | str, float]:
    match [whole(part) for part in pair] if isinstance(pair, list) else pair:
        case [int() | str() as token, False] if token is not True:
            return token, BAN
        case [int() | str() as token, int() | float() as bias] if not isinstance(token, bool):
            is_token = isinstance(token, str) or 0 <= token <= INT32_MAX
            if is_token and bias is not True and abs(bias) <= _MOST_BIAS:
                return token, float(bias)
    raise ValueError("give an object, or a list of pairs: a token's id or a text, and a number or false to ban it")


_BiasByToken = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MOST_BIASED, json_schema_extra=NO_OTHERS),
]
_BiasPairs = Annotated[
    list[Any],
    Field(max_length=_MOST_BIASED),
    BeforeValidator(
        lambda pairs: [_to_pair(pair) for pair in pairs],
        json_schema_input_type=Annotated[list[_Pair], Field(max_length=_MOST_BIASED)],
    ),
]

# ── repair, predictions ──

Places = Annotated[int, Field(ge=0, le=65_536), WHOLE]


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


class TextPart(Body):
    type: Literal["text"]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    """Parts as in messages: each on its own line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _not_too_long(content: str | list[TextPart]) -> str | list[TextPart]:
    if len(_joined(content)) > MAX_PREDICTION:
        raise ValueError(f"give {MAX_PREDICTION} or fewer characters")
    return content


class PredictionBody(Body):
    """What the answer will be like: a draft that the model checks."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Field(max_length=MAX_PREDICTION)] | list[TextPart], BY_KIND, AfterValidator(_not_too_long)
    ]

    def to_text(self) -> str:
        return _joined(self.content)


# ── all of them ──


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
KvBits = Annotated[Literal[16, 8, 4], BeforeValidator(whole)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(ge=0.01, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
UpTo100 = Annotated[float, Field(ge=0, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=StopText | list[StopText]
    ),
]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]


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
    logit_bias: Annotated[_BiasByToken | _BiasPairs, BY_KIND] | None = None

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
