"""Ollama's `/api/chat` and `/api/generate`: their bodies, which become a `Request`.

`api/ollama_answer.py` writes what comes back.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from emberkeep.api.body import BY_KIND, INT32_MAX, WHOLE, Body, Count, Label
from emberkeep.api.embeddings import MAX_INPUTS, Dimensions, embedding_request
from emberkeep.api.fields import GenerationFields, OwnerFields, RoomFields, to_limit
from emberkeep.api.kinds import Schema, TopLogprobs
from emberkeep.api.openai_chat import MAX_MESSAGES, ToolList
from emberkeep.api.openai_completions import USUAL_COMPLETION
from emberkeep.errors import InvalidField
from emberkeep.types.request import (
    EmbeddingRequest,
    Image,
    Infill,
    Json,
    JsonFormat,
    Message,
    ReasoningFormat,
    Request,
    Role,
    Sampling,
    ToolCall,
)

_FILL_CONTEXT = -2
"""As `num_predict`: as many tokens as the context has room for, which is what no limit means here."""
_RANDOM_SEED = -1


def _no_limit(limit: int) -> int:
    if limit < _FILL_CONTEXT:
        raise ValueError("give 0 or more, -1 for no limit or -2 to fill the context")
    return max(limit, -1)


class OptionFields(GenerationFields):
    """Ollama's `options`, and under our names what only we have. Others are ignored, as Ollama does: most of them
    say how a model is to be loaded (`num_gpu`, `num_batch`, `use_mmap`)."""

    num_ctx: Count | None = None
    num_predict: (
        Annotated[
            int,
            Field(le=INT32_MAX, json_schema_extra={"minimum": _FILL_CONTEXT}),
            WHOLE,
            AfterValidator(_no_limit),
        ]
        | None
    ) = None

    def to_sampling(self) -> Sampling:
        sampling = super().to_sampling()
        return replace(sampling, seed=None) if self.seed == _RANDOM_SEED else sampling

    def to_base(self, owned: Request) -> Request:
        """`owned` with what these options say."""
        limit = self.max_tokens if self.num_predict is None else self.num_predict
        return replace(self.apply_to(owned), max_tokens=to_limit(limit))


# ── how long the model stays ──

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER, _UNIT = r"[0-9]*\.?[0-9]+", "ns|us|µs|ms|s|m|h"
_PART = re.compile(f"({_NUMBER})({_UNIT})")
_DURATION = re.compile(f"^([-+]?)((?:{_NUMBER}(?:{_UNIT}))+|{_NUMBER})$")


_FOR_EVER_S = 1e10


def _to_seconds(value: Json) -> float:
    """Seconds as a number, or a duration as Go writes it (`1h30m`). What is negative has no end."""
    seconds = _parse_duration(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError('give seconds, or a duration such as "5m"')
    return float(seconds) if abs(seconds) < _FOR_EVER_S else -1.0


def _parse_duration(text: str) -> float | None:
    found = _DURATION.match(text.strip())
    if found is None:
        return None
    sign, number = found.groups()
    parts = _PART.findall(number)
    seconds = sum(float(many) * _UNIT_S[unit] for many, unit in parts) if parts else float(number)
    return -seconds if sign == "-" else seconds


_Duration = Annotated[str, Field(pattern=_DURATION.pattern)]
KeepAlive = Annotated[float, PlainValidator(_to_seconds, json_schema_input_type=float | _Duration)]


# ── what both bodies have ──


class OllamaBody(OwnerFields, RoomFields):
    model: str | None = None
    stream: bool | None = None
    """None: yes, unlike everywhere else."""
    format: Annotated[Literal["", "json"] | Schema, BY_KIND] | None = None
    options: OptionFields | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = None

    @property
    def wants_stream(self) -> bool:
        return self.stream is not False

    @property
    def num_ctx(self) -> int:
        """0 where nothing is said."""
        return (self.options.num_ctx if self.options else None) or 0

    def to_base(self) -> Request:
        """What this body says, without a prompt. Raises InvalidField where fields contradict each other."""
        options = self.options or OptionFields()
        return replace(
            options.to_base(self.to_owned()),
            format=self._to_json_format(),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_args=self._template_args(),
            reasoning=self._reasoning(),
            evict=False if self.truncate is False else self.evict,
            recall=self.to_recall(),
            keep_alive_s=self.keep_alive,
        )

    def _to_json_format(self) -> JsonFormat | None:
        """Ollama's clients send an empty text for none."""
        if self.format is None or self.format == "":
            return None
        return JsonFormat() if self.format == "json" else JsonFormat(self.format)

    def _template_args(self) -> dict[str, Json]:
        if self.think is None:
            return {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **level}

    def _reasoning(self) -> ReasoningFormat | None:
        if self.think is None:
            return None
        return ReasoningFormat.SEPARATE if self.think else ReasoningFormat.STRIP


# ── /api/chat ──


class CalledFunctionFields(Body):
    name: Label
    arguments: dict[str, Any] | str | None = None


class OllamaCall(Body):
    id: Label | None = None
    function: CalledFunctionFields

    def to_call(self, id: str) -> ToolCall:
        """`id`: for a call that has none."""
        given = self.function.arguments
        written = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        return ToolCall(self.id or id, self.function.name, written)


_IMAGE_KINDS = {"iVBOR": "png", "R0lGO": "gif", "UklGR": "webp"}


def _to_image(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("give an image as base64") from None
    return f"data:image/{_IMAGE_KINDS.get(text[:5], 'jpeg')};base64,{text}"


Images = Annotated[list[Annotated[str, AfterValidator(_to_image)]], Field(max_length=64)]


class OllamaMessage(Body):
    role: Role
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=256)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None
    name: Label | None = None


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: ToolList | None = None

    @property
    def only_loads(self) -> bool:
        """Nothing is asked: the model is to be loaded, or with `keep_alive` 0 to be unloaded."""
        return not self.messages

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other."""
        return replace(
            self.to_base(),
            messages=_to_messages(self.messages or []),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
        )


def _to_messages(bodies: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    """Most clients of Ollama send no ids of calls. Those that are made up here are the same for the same
    conversation: some templates write them, and with other ones nothing would be reused."""
    messages, waiting, count = [], list[ToolCall](), 0
    for body in bodies:
        calls = [call.to_call(f"call_{count + place}") for place, call in enumerate(body.tool_calls or ())]
        count += len(calls)
        waiting += calls
        messages.append(_to_message(body, calls, _take_call(waiting, body) if body.role == "tool" else None))
    return tuple(messages)


def _take_call(waiting: list[ToolCall], result: OllamaMessage) -> str | None:
    """The id of the call that `result` belongs to, which waits no longer: the one it names, or the first."""
    if result.tool_call_id is not None:
        waiting[:] = [call for call in waiting if call.id != result.tool_call_id]
        return result.tool_call_id
    places = [place for place, call in enumerate(waiting) if call.name == result.tool_name] or [0]
    return waiting.pop(places[0]).id if waiting else None


def _to_message(body: OllamaMessage, calls: Sequence[ToolCall], call_id: str | None) -> Message:
    return Message(
        role=body.role,
        content=body.content or "",
        reasoning=body.thinking or "",
        tool_calls=tuple(calls),
        tool_call_id=call_id,
        name=body.tool_name or body.name,
        images=tuple(Image(url) for url in body.images or ()),
    )


# ── /api/generate ──

_MARK = 0x656B31
"""The first number of a `context` of ours."""
_PACKED = 3
"""Bytes in each of the others: they fit 32 bits, as ids of tokens do."""
_FOREIGN = "was not made here: leave it out, or send the conversation to /api/chat"

Turn = tuple[Role, str, str]
"""Role, content, reasoning."""


def to_context(messages: Sequence[Message]) -> list[int]:
    """A conversation as numbers, which clients keep and send back as `context`. Ollama's are ids of tokens. These
    hold the text: it gets the very tokens that were sampled, under any model, and reasoning stays apart."""
    turns = [(message.role, message.content, message.reasoning) for message in messages]
    written = json.dumps(turns, ensure_ascii=False).encode()
    written += b" " * (-len(written) % _PACKED)
    high, middle, low = np.frombuffer(written, np.uint8).reshape(-1, _PACKED).astype(np.int32).T
    return [_MARK, *(high << 16 | middle << 8 | low).tolist()]


def _from_context(value: Json) -> tuple[Message, ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, list) or value[0] != _MARK:
        raise ValueError(_FOREIGN)
    try:
        turns = json.loads(b"".join(number.to_bytes(_PACKED) for number in value[1:]))
        return tuple(_to_turn(*turn) for turn in turns)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(_FOREIGN) from None


def _to_turn(role: str, content: str, reasoning: str) -> Message:
    """Raises ValueError: it comes from a client."""
    known: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
    if not (isinstance(content, str) and isinstance(reasoning, str) and role in known):
        raise ValueError(role)
    (content + reasoning).encode()  # no half of a surrogate pair
    return Message(known[role], content, reasoning)


class GenerateBody(OllamaBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[
        tuple[Message, ...], PlainValidator(_from_context, json_schema_input_type=list[Count] | None)
    ] = ()
    raw: bool | None = None
    images: Images | None = None

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other, and for what cannot be done."""
        if self.raw or self.suffix:
            return self._to_text()
        if self.template:
            raise InvalidField(
                "template", "is the model's own here: leave it out, or send the whole text with raw."
            )
        return replace(self.to_base(), messages=self._to_messages())

    def _to_text(self) -> Request:
        for name in ("system", "template", "context", "images"):
            if getattr(self, name):
                raise InvalidField(name, "does not go with raw and suffix: put everything into the prompt.")
        base, infill = self.to_base(), Infill(self.suffix) if self.suffix else None
        limit = base.max_tokens if self._says_limit else USUAL_COMPLETION
        return replace(base, prompt=self.prompt or "", infill=infill, template_args={}, max_tokens=limit)

    @property
    def _says_limit(self) -> bool:
        options = self.options
        return options is not None and (options.num_predict is not None or options.max_tokens is not None)

    def _to_messages(self) -> tuple[Message, ...]:
        """A system prompt that is given takes the place of the one before."""
        before = self.context
        if self.system:
            rest = before[1:] if before and before[0].role == "system" else before
            before = (Message("system", self.system), *rest)
        return (*before, Message("user", self.prompt or "", images=tuple(map(Image, self.images or ()))))


# ── /api/embed, and /api/embeddings, which is older ──


class EmbedBody(OwnerFields):
    model: str | None = None
    input: Annotated[
        list[str],
        Field(max_length=MAX_INPUTS),
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]
        ),
    ]
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    keep_alive: KeepAlive | None = None

    def to_request(self) -> EmbeddingRequest:
        inputs, truncate = tuple(self.input), self.truncate is not False
        return embedding_request(self, inputs, dimensions=self.dimensions, truncate=truncate)


class EmbeddingsBody(OwnerFields):
    model: str | None = None
    prompt: str
    keep_alive: KeepAlive | None = None

    def to_request(self) -> EmbeddingRequest:
        """Its vectors are as long as the model makes them."""
        return embedding_request(self, (self.prompt,), normalize=False, truncate=True)
