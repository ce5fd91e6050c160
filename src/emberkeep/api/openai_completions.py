"""The body of `/v1/completions`: prompts that are texts or token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainValidator

from emberkeep.api.body import INT32_MAX, Body, Count, validate, whole
from emberkeep.api.fields import to_limit
from emberkeep.api.kinds import ChoiceCount, TopLogprobs
from emberkeep.api.openai_chat import ChatBody, GenerationBody
from emberkeep.errors import InvalidField
from emberkeep.types.request import Infill, Json, Request

USUAL_COMPLETION = 256
"""Tokens of a raw completion, unless it says: a model that was trained on texts only never ends one."""
MAX_PROMPTS = 32

Prompt = str | tuple[int, ...]


def to_prompts(value: Any, most: int = MAX_PROMPTS) -> tuple[Prompt, ...]:
    """Raises ValueError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("give a string, a list of strings, a list of token ids or a list of such lists")
    if isinstance(value[0], (int, float)):
        return (_to_tokens(value),)
    if len(value) > most:
        raise ValueError(f"give at most {most} of them in one request")
    return tuple(item if isinstance(item, str) else _to_tokens(item) for item in value)


def _to_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("each of them is a string or a list of token ids that is not empty")
    if not all(type(token) is int for token in value):
        value = [whole(token) for token in value]
    if not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise ValueError("a token id is a whole number that is not negative")
    return tuple(value)


_Tokens = Annotated[list[Count], Field(min_length=1)]
_Several = Annotated[list[str | _Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    tuple[Prompt, ...], PlainValidator(to_prompts, json_schema_input_type=str | _Tokens | _Several)
]


class CompletionFields(Body):
    """What only the completion of a raw text has."""

    n: ChoiceCount | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: ChoiceCount | None = None

    @property
    def tried(self) -> int:
        """How many choices are generated for each prompt."""
        return self.best_of or self.n or 1

    @property
    def chooses_best(self) -> bool:
        """Only the likeliest of the choices that are generated are told."""
        return self.tried != (self.n or 1)

    def apply_to_completion(self, request: Request) -> Request:
        """`request`, with the log probabilities that it is asked for, and what these fields say. Raises
        InvalidField for what cannot be done."""
        request = replace(request, echo=bool(self.echo), infill=self._infill())
        if not self.chooses_best:
            return request
        if self.tried < (self.n or 1):
            raise InvalidField("best_of", "give n or more.")
        if request.scores_prompt:
            raise InvalidField("best_of", "goes without the log probabilities of an echoed prompt.")
        return replace(request, n=self.tried, top_logprobs=request.top_logprobs or 0)

    def _infill(self) -> Infill | None:
        if not self.suffix:
            return None
        if self.echo:
            raise InvalidField("echo", "goes without suffix: leave one of them out.")
        return Infill(self.suffix)


class CompletionBody(CompletionFields, GenerationBody):
    prompt: Prompts
    logprobs: TopLogprobs | None = None

    def to_requests(self) -> list[Request]:
        """One per prompt. Raises InvalidField for what cannot be done."""
        if self.chooses_best and self.stream:
            raise InvalidField("best_of", "goes without stream: which is best is known at the end.")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidField("suffix", "goes with prompts that are texts, and not with token ids.")
        limit = USUAL_COMPLETION if self.max_tokens is None else to_limit(self.max_tokens)
        base = replace(self.to_base(), top_logprobs=self.logprobs, max_tokens=limit)
        base = self.apply_to_completion(base)
        return [replace(base, prompt=prompt) for prompt in self.prompt]


C = TypeVar("C", bound=ChatBody)
P = TypeVar("P", bound=CompletionBody)


def read_chat_or_completion(value: Mapping[str, Json], chat: type[C], completion: type[P]) -> C | P:
    """The body of a chat or of a text completion, of these kinds. Raises InvalidField."""
    if value.get("prompt") is None:
        return validate(chat, value)
    if value.get("messages") is not None:
        raise InvalidField("prompt", "goes without messages: leave one of them out.")
    return validate(completion, value)


def to_one_request(body: ChatBody | CompletionBody) -> Request:
    """Raises InvalidField."""
    if isinstance(body, ChatBody):
        return body.to_request()
    requests = body.to_requests()
    if len(requests) > 1:
        raise InvalidField("prompt", "give one prompt: each is explained on its own.")
    return requests[0]
