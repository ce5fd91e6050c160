"""What an answer must look like, under the names that clients of several servers have for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.api.body import Body, not_here, parse_json
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types.request import AnswerFormat, ChoiceFormat, GrammarFormat, Json, JsonFormat, RegexFormat

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
