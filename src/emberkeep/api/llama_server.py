"""llama-server's own completions: the bodies of `/completion` and `/infill`, and what they ask for.

Fields that make no sense here are accepted where leaving them out changes nothing that a client could see, and
refused by name where it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, field, replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from emberkeep.api.answer import ChoiceAnswer, Frames, progress_json, timings_json
from emberkeep.api.body import INT32_MAX, WHOLE, Body, Count, whole
from emberkeep.api.errors import sse
from emberkeep.api.fields import USUAL_LAST_N, Limit, to_limit
from emberkeep.api.kinds import BAN, MAX_CHOICES
from emberkeep.api.openai_answer import LOWEST
from emberkeep.api.openai_chat import GenerationBody
from emberkeep.api.openai_completions import MAX_PROMPTS, Prompt
from emberkeep.errors import InvalidField
from emberkeep.types.events import (
    Accepted,
    Completed,
    Event,
    Finished,
    FinishReason,
    Progress,
    TextDelta,
    Timings,
    TokenLogprob,
)
from emberkeep.types.request import Infill, Json, Request, Sampling, SourceFile
from emberkeep.values import dataclass

Tokenize = Callable[[str, bool], list[int]]
"""Token ids of a text; the flag: it is the beginning of a prompt. Raises RequestError."""

RANDOM_SEED = -1
_MAX_PROBS = 1000
_MAX_CHARS = 4 << 20
_WORDS = (
    "give a text, a list of token ids, a list of both, an object with a prompt_string, or a list of such prompts"
)


class LoraScale(Body):
    id: Count
    scale: float


MilliSeconds = Annotated[int, Field(ge=-1), WHOLE]


class LineFields(Body):
    """Where an answer of several lines ends."""

    t_max_predict_ms: MilliSeconds | None = None
    n_indent: Count | None = None

    def apply_to_lines(self, request: Request) -> Request:
        late = self.t_max_predict_ms if self.t_max_predict_ms and self.t_max_predict_ms > 0 else None
        return replace(request, line_seconds=late / 1e3 if late else None, indent=self.n_indent or 0)


class LlamaBody(GenerationBody, LineFields):
    """What `/completion` and `/infill` have in common. Every field may be null."""

    n_predict: Limit | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    n_probs: Annotated[int, Field(ge=0, le=_MAX_PROBS), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_PROBS), WHOLE] | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=256)] | None = None
    lora: Annotated[list[LoraScale], Field(max_length=64, json_schema_extra={"maxItems": 0})] | None = None

    @property
    def probs(self) -> int:
        """How many of the likeliest tokens are told with each one; 0: nothing is."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or 0

    def to_sampling(self) -> Sampling:
        sampling = super().to_sampling()
        if self.repeat_last_n is None:
            sampling = replace(sampling, repeat_last_n=USUAL_LAST_N)
        return replace(sampling, seed=None) if self.seed == RANDOM_SEED else sampling

    def to_base(self) -> Request:
        """Raises InvalidField where fields contradict each other, and for what cannot be done."""
        if self.lora:
            raise InvalidField(
                "lora",
                "adapters are chosen when a model is loaded: use --lora, and GET /lora-adapters lists them.",
            )
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        return replace(
            self.apply_to_lines(super().to_base()),
            max_tokens=to_limit(limit),
            n=self.n_cmpl or self.n or 1,
            top_logprobs=self.probs or None,
            logprobs_as_drawn=bool(self.post_sampling_probs),
        )


def _to_prompts(value: Json) -> tuple[Json, ...]:
    """As they are, but one by one. Which of them are what they should be is seen when they are tokenized."""
    if not value and value != "":
        raise ValueError(_WORDS)
    several = isinstance(value, list) and not any(map(_is_token, value))
    prompts = tuple(value) if several else (value,)
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"give at most {MAX_PROMPTS} prompts in one request")
    if not all(map(_is_prompt, prompts)):
        raise ValueError(_WORDS)
    return prompts


def _is_prompt(value: Json) -> bool:
    match value:
        case str():
            return True
        case {"prompt_string": str() | list() as inner}:
            return "multimodal_data" not in value and _is_prompt(inner)
        case [_, *_]:
            return all(isinstance(part, str) or _is_token(part) for part in value)
    return False


def _is_token(value: Json) -> bool:
    value = whole(value)
    return type(value) is int and 0 <= value <= INT32_MAX


_Token = Annotated[int, Field(ge=0, le=INT32_MAX)]


class PromptObject(Body):
    prompt_string: str


_OnePrompt = str | PromptObject
Prompts = Annotated[
    tuple[Any, ...],
    PlainValidator(
        _to_prompts,
        json_schema_input_type=_OnePrompt
        | Annotated[list[_Token | str], Field(min_length=1, max_length=MAX_PROMPTS)],
    ),
]


class LlamaCompletionBody(LlamaBody):
    prompt: Prompts

    @property
    def needs_tokens(self) -> bool:
        """A prompt has texts between token ids, which are tokenized here."""
        return any(
            isinstance(prompt, list) and any(isinstance(part, str) for part in prompt) for prompt in self.prompt
        )

    def to_requests(self, tokenize: Tokenize) -> list[Request]:
        """One per prompt. Raises RequestError for what cannot be done."""
        base = self.to_base()
        return [replace(base, prompt=_to_prompt(prompt, tokenize)) for prompt in self.prompt]


def _to_prompt(value: Json, tokenize: Tokenize) -> Prompt:
    if isinstance(value, dict):
        value = value["prompt_string"]
    if isinstance(value, str):
        return value
    tokens: list[int] = []
    for place, part in enumerate(value):
        tokens += tokenize(part, place == 0) if isinstance(part, str) else [int(part)]
    return tuple(tokens)


class ExtraFile(Body):
    text: Annotated[str, Field(max_length=_MAX_CHARS)]
    filename: Annotated[str, Field(max_length=4096)] | None = None


class InfillBody(LlamaBody):
    input_prefix: Annotated[str, Field(max_length=_MAX_CHARS)]
    input_suffix: Annotated[str, Field(max_length=_MAX_CHARS)]
    input_extra: Annotated[list[ExtraFile], Field(max_length=1024)] | None = None
    prompt: Annotated[str, Field(max_length=_MAX_CHARS)] | None = None

    def to_requests(self) -> list[Request]:
        """Raises InvalidField for what cannot be done."""
        files = tuple(SourceFile(file.filename or "tmp", file.text) for file in self.input_extra or ())
        infill = Infill(self.input_suffix, files, self.prompt or "", "input_suffix")
        return [replace(self.to_base(), prompt=self.input_prefix, infill=infill)]


# ── what was used, as an answer has it ──


def settings_json(request: Request, *, stream: bool = False) -> dict[str, Json]:
    """`generation_settings`: everything as it was used."""
    sampling, limit = request.sampling, -1 if request.max_tokens is None else request.max_tokens
    fields = asdict(sampling)
    del fields["text_bias"]
    # JSON has no infinity: null stands for a token that is banned.
    biases = [*sampling.logit_bias.items(), *sampling.text_bias]
    return {
        **{"repeat_penalty" if name == "repetition_penalty" else name: value for name, value in fields.items()},
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        "repeat_last_n": USUAL_LAST_N if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "logit_bias": [{"token": of, "bias": None if bias == BAN else bias} for of, bias in biases],
        "stop": list(request.stop),
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "n_probs": request.top_logprobs or 0,
        "post_sampling_probs": request.logprobs_as_drawn,
        "lora": [],
    }


# ── answers ──


@dataclass(slots=True)
class PromptRecord:
    """What is known of the answer to one prompt, besides its text."""

    request: Request
    prompt_tokens: int = 0
    prompt: str = ""
    completed: Completed | None = None

    def note(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self.prompt_tokens, self.prompt = event.prompt_tokens, event.prompt
        elif isinstance(event, Completed):
            self.completed = event


@dataclass(frozen=True, slots=True)
class LlamaEnvelope:
    """What every object of one answer has in common."""

    model: str
    body: LlamaBody
    records: Sequence[PromptRecord]
    """One for each prompt; filled while the answer is made."""

    def record(self, index: int) -> PromptRecord:
        """The record of the prompt that choice `index` belongs to."""
        return self.records[index // self.records[0].request.n]

    def final(
        self, index: int, choice: ChoiceAnswer, tokens: Sequence[int], has_new_line: bool
    ) -> dict[str, Json]:
        """The object for a choice that has ended."""
        record = self.record(index)
        completed = record.completed
        assert completed is not None
        fields = {
            "index": index,
            "content": choice.text,
            "tokens": list(tokens),
            "id_slot": completed.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": completed.usage.completion_tokens if record.request.n == 1 else len(choice.tokens),
            "tokens_evaluated": completed.usage.prompt_tokens,
            "generation_settings": settings_json(record.request, stream=bool(self.body.stream)),
            "prompt": record.prompt,
            "has_new_line": has_new_line,
            "truncated": bool(completed.fit.truncated_tokens or completed.fit.evictions),
            "stop_type": _stop_type(choice),
            "stopping_word": choice.stop or "",
            "tokens_cached": completed.usage.total_tokens,
            "timings": native_timings(completed.timings),
        }
        if choice.logprobs and self.body.probs:
            fields["completion_probabilities"] = probabilities_json(choice.logprobs, self.body)
        return _only(fields, self.body.response_fields) if self.body.response_fields else fields


def whole_json(choices: Sequence[ChoiceAnswer], envelope: LlamaEnvelope) -> Json:
    """One object, or a list where there are several choices or prompts."""
    fields = [
        envelope.final(index, choice, choice.tokens if envelope.body.return_tokens else (), "\n" in choice.text)
        for index, choice in enumerate(choices)
    ]
    return fields[0] if len(fields) == 1 else fields


def _stop_type(choice: ChoiceAnswer) -> str:
    if choice.stop:
        return "word"
    return "limit" if choice.finish is FinishReason.LENGTH else "eos"


def _only(whole: dict[str, Json], paths: Iterable[str]) -> dict[str, Json]:
    """`a/b` is the `b` of `a`, under that name. What there is not is left out."""
    chosen: dict[str, Json] = {}
    for path in paths:
        value: Json = whole
        for key in path.split("/"):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            chosen[path] = value
    return chosen


_MISSING: Any = object()


def native_timings(timings: Timings) -> dict[str, Json]:
    """With llama-server's milliseconds per token."""
    return {
        **timings_json(timings),
        "prompt_per_token_ms": timings.prompt_ms / timings.prompt_n if timings.prompt_n else None,
        "predicted_per_token_ms": timings.predicted_ms / timings.predicted_n if timings.predicted_n else None,
    }


def probabilities_json(tokens: Sequence[TokenLogprob], body: LlamaBody) -> list[Json]:
    """Log probabilities of the model, or the probabilities that tokens were drawn with."""
    drawn = bool(body.post_sampling_probs)
    name = "top_probs" if drawn else "top_logprobs"
    return [_entry(token, drawn) | {name: [_entry(other, drawn) for other in token.top]} for token in tokens]


def _entry(token: TokenLogprob, drawn: bool) -> dict[str, Json]:
    # A piece may end in the middle of a character: what of it is text is shown.
    text = token.piece.decode("utf-8", "ignore")
    chance = {"prob": math.exp(token.logprob)} if drawn else {"logprob": max(token.logprob, LOWEST)}
    return {"id": token.token_id, "token": text, "bytes": list(token.piece), **chance}


# ── as a stream ──


@dataclass(slots=True)
class _Choice:
    """What has come of a choice that is not over yet."""

    answer: ChoiceAnswer = field(default_factory=ChoiceAnswer)
    has_new_line: bool = False
    is_written: bool = False

    @property
    def predicted(self) -> int:
        return len(self.answer.tokens)


class LlamaFrames(Frames):
    """Chunks with `stop: false`, and one with `stop: true` for each choice when its prompt is done."""

    def __init__(self, envelope: LlamaEnvelope, now: Callable[[], float]) -> None:
        """`now`: seconds, for timings while the answer is written."""
        self._envelope = envelope
        self._now = now
        self._began: float | None = None
        count = sum(record.request.n for record in envelope.records)
        self._choices = [_Choice() for _ in range(count)]

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece(event)
            case Finished():
                answer = self._choices[event.index].answer
                answer.finish, answer.stop = event.reason, event.stop
            case Progress():
                return self._progress(event)
            case Completed():
                return b"".join(self._finals())
        return b""

    def _progress(self, event: Progress) -> bytes:
        more: dict[str, Json] = {"prompt_progress": progress_json(event)}
        if self._envelope.body.timings_per_token:
            evaluated = event.processed - event.cached
            more["timings"] = native_timings(Timings(event.cached, evaluated, event.elapsed_ms))
        return self._chunk(0, "", **more)

    def _piece(self, event: TextDelta) -> bytes:
        choice = self._choices[event.index]
        choice.answer.tokens += event.tokens
        choice.has_new_line = choice.has_new_line or "\n" in event.text
        more: dict[str, Json] = {}
        if event.logprobs and self._envelope.body.probs:
            more["completion_probabilities"] = probabilities_json(event.logprobs, self._envelope.body)
        if self._envelope.body.timings_per_token:
            more["timings"] = self._timings(choice)
        return self._chunk(event.index, event.text, event.tokens, **more)

    def _chunk(self, index: int, text: str, tokens: Sequence[int] = (), **more: Json) -> bytes:
        record = self._envelope.record(index)
        chunk: dict[str, Json] = {
            "index": index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": -1 if record.request.slot is None else record.request.slot,
            "tokens_predicted": self._choices[index].predicted,
            "tokens_evaluated": record.prompt_tokens,
        }
        return sse(chunk | more)

    def _timings(self, choice: _Choice) -> dict[str, Json]:
        """What can be fields before the end."""
        if self._began is None:
            self._began = self._now()
        spent = 1e3 * (self._now() - self._began)
        return native_timings(Timings(predicted_n=choice.predicted, predicted_ms=spent))

    def _finals(self) -> Iterable[bytes]:
        for index, choice in enumerate(self._choices):
            is_over = choice.answer.finish is not None and self._envelope.record(index).completed is not None
            if is_over and not choice.is_written:
                choice.is_written = True
                yield sse(self._envelope.final(index, choice.answer, (), choice.has_new_line))
