"""Fields that every API has: whose request it is, what to do when there is no room, what is sent again.

HTTP and the library refuse the same, with the same words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from emberkeep.api.answer_format import FormatFields
from emberkeep.api.body import INT32_MAX, WHOLE, Body, Count, Label, Name, whole
from emberkeep.api.errors import USER_ID
from emberkeep.api.sampling import GenerationFields, TopLogprobs, to_limit
from emberkeep.errors import InvalidField
from emberkeep.types.request import Breakpoint, Infill, Recall, Request, Ttl, private_namespace

MAX_CHOICES = 16
USUAL_COMPLETION = 256
"""Tokens of a raw completion, unless it says: a model that was trained on texts only never ends one."""

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


# ── bodies ──


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


class StreamOptions(Body):
    include_usage: bool | None = None


RETENTIONS = {"in_memory": Ttl.SHORT, "in-memory": Ttl.SHORT, "24h": Ttl.EXTENDED}


class GenerationBody(GenerationFields, FormatFields, OwnerFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    n: ChoiceCount | None = None

    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        return replace(
            self.apply_to(self.to_owned()),
            format=self.to_format(),
            max_tokens=to_limit(self.max_tokens),
            n=self.n or 1,
            ttl=RETENTIONS[self.prompt_cache_retention] if self.prompt_cache_retention else None,
            want_progress=bool(self.stream and self.return_progress),
        )


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
