"""Fields that every API has: whose request it is, what is sent again, what an answer must look like.

HTTP and the library refuse the same, with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.api.body import WHOLE, Body, Label, Name, not_here, parse_json
from emberkeep.api.errors import USER_ID
from emberkeep.api.sampling import TopLogprobs
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import (
    AnswerFormat,
    Breakpoint,
    ChoiceFormat,
    GrammarFormat,
    Json,
    JsonFormat,
    Recall,
    RegexFormat,
    Request,
    Ttl,
)

MAX_CHOICES = 16
FactName = Annotated[str, Field(min_length=1, max_length=256)]
Remembered = Annotated[str, Field(min_length=1, max_length=65_536)]
Question = Annotated[str, Field(min_length=1, max_length=4096)]
MaxResults = Annotated[int, Field(ge=1, le=100), WHOLE]
MaxConversations = Annotated[int, Field(ge=1, le=1000), WHOLE]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE]
UserId = Annotated[str, Field(pattern=USER_ID)]


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


# ── what an answer must look like, under the names that clients of several servers have for it ──

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
