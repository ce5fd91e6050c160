"""Fields that every way to ask for text has in common, each with its bounds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.config import OFF
from emberkeep.library.checking import TOKEN_ID, Body
from emberkeep.types import Approximation, Json, Recall, Repair, Sampling

MAX_SCHEMA_BYTES = 256 << 10
NO_LIMIT = -1
INT32_MAX = 2**31 - 1
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
MaxResults = Annotated[int, Field(ge=1, le=100)]
MaxConversations = Annotated[int, Field(ge=1, le=1000)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Limit = Annotated[
    int, Field(le=INT32_MAX, json_schema_extra={"minimum": NO_LIMIT}), AfterValidator(_no_less_than_no_limit)
]
Places = Annotated[int, Field(ge=0, le=65_536)]
Probability = Annotated[float, Field(gt=0, le=1)]
KvBits = Literal[16, 8, 4]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern=TOKEN_ID)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(_listed, json_schema_input_type=StopText | list[StopText]),
]


class ApproximationFields(Body):
    """How state from other places is repaired; whatever is left out is as in `Approximation`."""

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


def _spelled_out(value: Json) -> Json:
    """A word says how to repair, and false is one for it."""
    if value is False:
        return {"repair": OFF}
    return {"repair": value} if isinstance(value, str) else value


Approximate = Annotated[
    ApproximationFields,
    BeforeValidator(
        _spelled_out,
        json_schema_input_type=Literal[False, "off", "none", "selective", "cacheblend"] | ApproximationFields,
    ),
]


class RoomFields(Body):
    """What may be done when a conversation is longer than the context."""

    evict: bool | None = None
    recall: Literal["off", "tool", "auto"] | None = None

    def to_recall(self) -> Recall | None:
        return Recall(self.recall) if self.recall is not None else None


NO_OTHERS: dict[str, Json] = {"additionalProperties": False}
"""For a schema of a mapping: pydantic only says which keys may be there."""


class GenerationFields(Body):
    """Every field may be null, which means the same as leaving it out."""

    max_tokens: Limit | None = None
    stop: Stops | None = None

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra=NO_OTHERS)] | None = None

    kv_bits: KvBits | None = None
    approximate: Approximate | None = None

    def to_approximation(self) -> Approximation | Literal[False] | None:
        return self.approximate.to_approximation() if self.approximate is not None else None

    def to_sampling(self) -> Sampling:
        values = {name: getattr(self, name) for name in _PASSED_ON}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # random generators take no negative seeds
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return Sampling(**given)


def to_limit(max_tokens: int | None) -> int | None:
    return None if max_tokens == NO_LIMIT else max_tokens
