"""The fields that chat and text completions share, each with its bounds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.errors import InvalidField
from emberkeep.server.wire.body import Body
from emberkeep.types import Json, JsonFormat, Request, Sampling

MAX_SCHEMA_BYTES = 256 << 10
_INT32_MAX = 2**31 - 1
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
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema is too large: use at most {MAX_SCHEMA_BYTES} bytes")
    return schema


def _listed(stop: Json) -> Json:
    return [stop] if isinstance(stop, str) else stop


Schema = Annotated[dict[str, Any], AfterValidator(_small_enough)]
Label = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=_INT32_MAX)]
UserId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,512}$")]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(_listed, json_schema_input_type=StopText | list[StopText]),
]


class StreamOptions(Body):
    include_usage: bool | None = None


class NamedSchema(Body):
    schema_: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def to_format(self) -> JsonFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonFormat()
        if self.json_schema is None:
            raise InvalidField("response_format.json_schema", "is required when type is json_schema.")
        return JsonFormat(self.json_schema.schema_)


class GenerationBody(Body):
    """Every field may be null, which means the same as leaving it out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Count | None = None
    stop: Stops | None = None
    response_format: ResponseFormat | None = None

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None

    user_id: UserId | None = None
    llama_user_id: UserId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = None
    conversation_id: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_prompt: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        return Request(
            format=self.response_format.to_format() if self.response_format else None,
            sampling=self._sampling(),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            n=self.n or 1,
            namespace=self._namespace(),
            use_cache=self.cache_prompt is not False,
            conversation_id=self.conversation_id or self.prompt_cache_key or self.user or None,
            want_progress=bool(self.stream and self.return_progress),
        )

    def _sampling(self) -> Sampling:
        values = {name: getattr(self, name) for name in _PASSED_ON}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # random generators take no negative seeds
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return Sampling(**given)

    def _namespace(self) -> str:
        """A JSON list, so that no user and salt can be chosen to look like another pair."""
        if self.user_id and self.llama_user_id and self.user_id != self.llama_user_id:
            raise InvalidField("llama_user_id", "must equal user_id when both are given.")
        user = self.user_id or self.llama_user_id or ""
        salt = self.cache_salt or ""
        return json.dumps([user, salt]) if user or salt else ""
