"""What an answer must look like, under the names that clients of several servers have for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.api.body import Body, parse_json
from emberkeep.api.field_kinds import NotHere
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
    structural_tag: NotHere = None

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

    def to_format(self, own: AnswerFormat | None = None) -> AnswerFormat | None:
        """`own`: what a field asks for that one API alone has. Raises InvalidField for more than one."""
        asked = [*([own] if own is not None else ()), *self._formats()]
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
