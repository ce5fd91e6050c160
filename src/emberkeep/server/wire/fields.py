"""The fields that chat and text completions share."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from emberkeep.errors import InvalidField
from emberkeep.library.checking import USER_ID, Body
from emberkeep.library.fields import GenerationFields, Label, Schema, to_limit
from emberkeep.types import JsonFormat, Request

UserId = Annotated[str, Field(pattern=USER_ID)]


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


class GenerationBody(GenerationFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: Annotated[int, Field(ge=1, le=16)] | None = None
    response_format: ResponseFormat | None = None

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
            sampling=self.to_sampling(),
            max_tokens=to_limit(self.max_tokens),
            stop=tuple(self.stop or ()),
            n=self.n or 1,
            namespace=self._namespace(),
            use_cache=self.cache_prompt is not False,
            conversation_id=self.conversation_id or self.prompt_cache_key or self.user or None,
            want_progress=bool(self.stream and self.return_progress),
        )

    def _namespace(self) -> str:
        """A JSON list, so that no user and salt can be chosen to look like another pair."""
        if self.user_id and self.llama_user_id and self.user_id != self.llama_user_id:
            raise InvalidField("llama_user_id", "must equal user_id when both are given.")
        user = self.user_id or self.llama_user_id or ""
        salt = self.cache_salt or ""
        return json.dumps([user, salt]) if user or salt else ""
