"""llama-server's own completions: the bodies of `/completion` and `/infill`, and what they ask for.

Fields that make no sense here are accepted where leaving them out changes nothing that a client could see, and
refused by name where it would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from emberkeep.api.body import INT32_MAX, WHOLE, Body, Count, whole
from emberkeep.api.request import MAX_CHOICES, MAX_PROMPTS, GenerationBody, Prompt
from emberkeep.api.sampling import BAN, USUAL_LAST_N, Limit, to_limit
from emberkeep.errors import InvalidField
from emberkeep.types.request import Infill, Json, Request, Sampling, SourceFile

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
    def wants_probs(self) -> bool:
        return bool(self._probs)

    @property
    def _probs(self) -> int:
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
            top_logprobs=self._probs or None,
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


# ── what was asked, as an answer tells it ──


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
