"""Kinds of values that fields of several APIs take: their bounds, and what becomes of them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from emberkeep.api.body import (
    BY_KIND,
    INT32_MAX,
    NO_OTHERS,
    TOKEN_ID,
    TOOL_NAME,
    USER_ID,
    WHOLE,
    Body,
    Count,
    parse_json,
    whole,
)
from emberkeep.config.settings import OFF
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types.lineage import Approximation, Repair
from emberkeep.types.request import DEFAULT_SAMPLERS, Json, JsonFormat, Tool, ToolCall

# ── numbers and texts ──


LEAST_SLICE = 32
"""Prompt tokens in a step; with fewer a step takes hardly less time."""

MAX_CHOICES = 16

KvBits = Annotated[Literal[16, 8, 4], BeforeValidator(whole)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(ge=0.01, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
UpTo100 = Annotated[float, Field(ge=0, le=100)]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE]
LastN = Annotated[
    Count,
    BeforeValidator(
        lambda last: INT32_MAX if last == -1 else last,
        json_schema_input_type=Annotated[int, Field(ge=-1, le=INT32_MAX)],
    ),
]

UserId = Annotated[str, Field(pattern=USER_ID)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=StopText | list[StopText]
    ),
]

FactName = Annotated[str, Field(min_length=1, max_length=256)]
Remembered = Annotated[str, Field(min_length=1, max_length=65_536)]
Question = Annotated[str, Field(min_length=1, max_length=4096)]
MaxResults = Annotated[int, Field(ge=1, le=100), WHOLE]
MaxConversations = Annotated[int, Field(ge=1, le=1000), WHOLE]

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

# ── bias ──


BAN = float("-inf")
_MOST_BIASED = 1024
_MOST_BIAS = 10_000.0

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


BiasByToken = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MOST_BIASED, json_schema_extra=NO_OTHERS),
]
BiasPairs = Annotated[
    list[Any],
    Field(max_length=_MOST_BIASED),
    BeforeValidator(
        lambda pairs: [_to_pair(pair) for pair in pairs],
        json_schema_input_type=Annotated[list[_Pair], Field(max_length=_MOST_BIASED)],
    ),
]

# ── how state is repaired ──


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

# ── texts, and what the answer is expected to be ──


MAX_PREDICTION = 256 << 10
"""Characters. A quarter of a second to tokenize, and longer than answers are."""


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


# ── schemas ──


MAX_SCHEMA_BYTES = 256 << 10


def _small_enough(schema: dict[str, Json]) -> dict[str, Json]:
    try:
        size = len(json.dumps(schema))
    except TypeError as error:
        raise ValueError("give a schema of plain JSON values") from error
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema is too large: use at most {MAX_SCHEMA_BYTES} bytes")
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_small_enough)]


def _read_schema(value: Json) -> Json:
    """A schema may be given as the text of one."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode("utf-8", "surrogatepass"))
    except RequestError:
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


# ── tools as OpenAI's APIs write them: to the model a custom tool is a function of one text ──


ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


class FunctionFields(Body):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


def _any_text(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "text":
        raise ValueError("a custom tool takes any text here: leave the grammar of its input out")
    return form


class CustomFields(Body):
    name: ToolName
    description: str | None = None
    format: Annotated[dict[str, Any], AfterValidator(_any_text)] | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", _CUSTOM_PARAMETERS)


def call_json(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


_CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_ESCAPE = 12
"""A pair of surrogates."""


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The inverse, also of arguments that were cut; what is no such JSON is the text itself."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return _cut_input(arguments)
    return text if isinstance(text, str) else arguments


def _cut_input(arguments: str) -> str:
    begun = _BEGUN.match(arguments)
    if begun is None:
        return arguments
    text = arguments[begun.end() :]
    for length in range(len(text), max(len(text) - _LONGEST_ESCAPE, -1), -1):
        try:
            return str(json.loads(f'"{text[:length]}"', strict=False))
        except ValueError:  # it ends in the middle of an escape
            continue
    return arguments


# ── reasoning that clients carry for us as an opaque text: it hides nothing, most have the reasoning beside it ──


_MOST_BYTES = 4 << 20
"""A small text can be made that unpacks to gigabytes."""
_URL_SAFE = str.maketrans("-_", "+/")


def seal(text: str, prefix: str) -> str:
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return prefix + base64.urlsafe_b64encode(packed).decode()


def unseal(sealed: str, prefix: str) -> str:
    """The inverse; empty for what does not begin with `prefix`, or was not made here."""
    if not sealed.startswith(prefix):
        return ""
    try:
        packed = base64.b64decode(sealed.removeprefix(prefix).translate(_URL_SAFE), validate=True)
        return zlib.decompressobj().decompress(packed, _MOST_BYTES).decode("utf-8")
    except (ValueError, zlib.error):
        return ""
