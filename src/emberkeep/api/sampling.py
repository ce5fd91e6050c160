"""How a client may ask for tokens to be drawn: llama-server's fields, besides those that OpenAI has too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from emberkeep.api.errors import TOKEN_ID
from emberkeep.api.field_kinds import INT32_MAX, NO_OTHERS, WHOLE, Count, whole
from emberkeep.types.request import DEFAULT_SAMPLERS, Json

BAN = float("-inf")
_MOST_BIASED = 1024
_MOST_BIAS = 10_000.0
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
USUAL_LAST_N = 64
"""Tokens that penalties look at where a client speaks llama-server's language and does not say."""

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, Field(pattern=TOKEN_ID)]


def _to_samplers(value: Json) -> tuple[str, ...]:
    """Names that llama-server does not know either are left out, as it does: front ends send those of others."""
    if isinstance(value, str):
        return tuple(_LETTERS[letter] for letter in value if letter in _LETTERS)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > 64:
        raise ValueError("give a list of at most 64 names of samplers, or a text of their letters")
    spelled = (name.lower().replace("-", "_") for name in value)
    return tuple(_NAMES[name] for name in spelled if name in _NAMES)


def _unless_list(value: Json) -> Json:
    return None if isinstance(value, list) else value


def _to_pairs(value: Json) -> list[tuple[int | str, float]] | None:
    """None for what is no list, which is refused, or not, by what reads objects."""
    if not isinstance(value, list):
        return None
    if len(value) > _MOST_BIASED:
        raise ValueError(f"give at most {_MOST_BIASED} pairs")
    return [_to_pair(pair) for pair in value]


def _to_pair(pair: Json) -> tuple[int | str, float]:
    match [whole(part) for part in pair] if isinstance(pair, list) else pair:
        case [int() | str() as token, False] if token is not True:
            return token, BAN
        case [int() | str() as token, int() | float() as bias] if not isinstance(token, bool):
            if (
                bias is not True
                and abs(bias) <= _MOST_BIAS
                and (isinstance(token, str) or 0 <= token <= INT32_MAX)
            ):
                return token, float(bias)
    raise ValueError("give an object, or a list of pairs: a token's id or a text, and a number or false to ban it")


def _all_of(last: Json) -> Json:
    return INT32_MAX if last == -1 else last


LastN = Annotated[
    Count,
    BeforeValidator(_all_of, json_schema_input_type=Annotated[int, Field(ge=-1, le=INT32_MAX)]),
]
Samplers = Annotated[tuple[str, ...], PlainValidator(_to_samplers, json_schema_input_type=str | list[str])]
Breaker = Annotated[str, Field(max_length=256)]
_Object = Annotated[dict[TokenKey, Bias], Field(max_length=_MOST_BIASED, json_schema_extra=NO_OTHERS)]
_Pair = tuple[
    Annotated[int, Field(ge=0, le=INT32_MAX)] | str,
    Annotated[float, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)] | Literal[False],
]
_Pairs = Annotated[list[_Pair], Field(max_length=_MOST_BIASED)]


class SamplerFields(BaseModel):
    """Every field may be null, which means the same as leaving it out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)

    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    repeat_last_n: LastN | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(le=100)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: LastN | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(min_length=1, max_length=64)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    mirostat: Annotated[int, Field(ge=0, le=2), WHOLE] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=100)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=5)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0, le=100)] | None = None
    adaptive_target: Annotated[float, Field(lt=0)] | None = None
    samplers: Samplers | None = None
    min_keep: Count | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[_Object | None, BeforeValidator(_unless_list)] = None
    """By the ids of tokens. Its other form, a list of pairs, is `bias_pairs`: a client calls both the same."""
    bias_pairs: Annotated[
        list[tuple[int | str, float]] | None,
        PlainValidator(_to_pairs, json_schema_input_type=_Object | _Pairs | None),
    ] = Field(default=None, alias="logit_bias")

    def sampler_settings(self) -> dict[str, Any]:
        """What is given, as fields of `Sampling`."""
        given = {name: getattr(self, name) for name in _AS_THEY_ARE}
        given = {name: value for name, value in given.items() if value is not None}
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if given.get("dry_base", 1) < 1:
            del given["dry_base"]
        if self.repeat_penalty is not None:
            given = {"repeat_last_n": USUAL_LAST_N, **given, "repetition_penalty": self.repeat_penalty}
        given["logit_bias"], given["text_bias"] = self._to_bias()
        return given

    def _to_bias(self) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
        """By the ids of tokens, and by texts."""
        by_id = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        pairs = self.bias_pairs or ()
        by_id |= {of: by for of, by in pairs if isinstance(of, int)}
        return by_id, tuple((of, by) for of, by in pairs if isinstance(of, str))


_AS_THEY_ARE = (
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "top_n_sigma",
    "dynatemp_range",
    "dynatemp_exponent",
    "samplers",
    "min_keep",
    "ignore_eos",
)
