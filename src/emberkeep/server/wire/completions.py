"""The body of `/v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from emberkeep.errors import InvalidField
from emberkeep.library.fields import Count
from emberkeep.server.wire.fields import GenerationBody
from emberkeep.types import Request

MAX_PROMPTS = 32
MAX_TOKEN_ID = 2**31 - 1

Prompt = str | tuple[int, ...]


def _to_prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("give a string, a list of strings, a list of token ids or a list of such lists")
    if isinstance(value[0], int):
        return (_to_tokens(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"give at most {MAX_PROMPTS} prompts in one request")
    return tuple(item if isinstance(item, str) else _to_tokens(item) for item in value)


def _to_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a prompt is a string or a list of token ids that is not empty")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value):
        raise ValueError("a token id is a whole number that is not negative")
    return tuple(value)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_to_prompts, json_schema_input_type=str | list[str] | list[Count] | list[list[Count]]),
]


class CompletionBody(GenerationBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None

    def to_requests(self) -> list[Request]:
        """One per prompt. Raises InvalidField for what cannot be done."""
        if self.suffix:
            raise InvalidField("suffix", "is not supported: put everything into the prompt.")
        base = replace(self.to_base(), echo=bool(self.echo), top_logprobs=self.logprobs)
        if self.best_of not in (None, base.n):
            raise InvalidField("best_of", "must equal n: leave it out.")
        return [replace(base, prompt=prompt) for prompt in self.prompt]
