"""The fields that chat and text completions share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from emberkeep.errors import InvalidField
from emberkeep.library.checking import USER_ID, Body
from emberkeep.library.fields import INT32_MAX, GenerationFields, Label, Name, Schema, to_limit
from emberkeep.types import JsonFormat, Request, Ttl, private_namespace

UserId = Annotated[str, Field(pattern=USER_ID)]

ANY_SLOT = -1
_TTLS = {"in_memory": Ttl.SHORT, "in-memory": Ttl.SHORT, "24h": Ttl.EXTENDED}


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


class UserFields(Body):
    """Who asks, and as whom."""

    user_id: UserId | None = None
    llama_user_id: UserId | None = None
    user: Label | None = None
    cache_salt: Name | None = None

    def to_user(self) -> str:
        """OpenAI's `user` counts too: somebody who is named must not share state with those who are not.

        Raises InvalidField where fields contradict each other.
        """
        if self.user_id and self.llama_user_id and self.user_id != self.llama_user_id:
            raise InvalidField("llama_user_id", "must equal user_id when both are given.")
        return self.user_id or self.llama_user_id or self.user or ""

    def to_namespace(self) -> str:
        """Raises InvalidField where fields contradict each other."""
        return private_namespace(self.to_user(), self.cache_salt or "")


class OwnerFields(UserFields):
    """Whose state it is, and what the owner calls it."""

    conversation_id: Label | None = None
    prompt_cache_key: Label | None = None

    def to_owned(self) -> Request:
        """A request that says this and nothing else. Raises InvalidField where fields contradict each other."""
        return Request(
            user=self.to_user(),
            namespace=self.to_namespace(),
            conversation_id=self.conversation_id or None,
            cache_key=self.prompt_cache_key or None,
        )


class GenerationBody(GenerationFields, OwnerFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: Annotated[int, Field(ge=1, le=16)] | None = None
    response_format: ResponseFormat | None = None

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Field(ge=ANY_SLOT, le=INT32_MAX)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        return replace(
            self.to_owned(),
            format=self.response_format.to_format() if self.response_format else None,
            sampling=self.to_sampling(),
            max_tokens=to_limit(self.max_tokens),
            stop=tuple(self.stop or ()),
            n=self.n or 1,
            use_cache=self.cache_prompt is not False,
            kv_bits=self.kv_bits,
            approximate=self.to_approximation(),
            ttl=_TTLS[self.prompt_cache_retention] if self.prompt_cache_retention else None,
            slot=None if self.id_slot == ANY_SLOT else self.id_slot,
            want_progress=bool(self.stream and self.return_progress),
        )
