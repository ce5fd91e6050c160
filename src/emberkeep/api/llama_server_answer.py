"""An answer as llama-server's own clients get it: one object per prompt and choice, or chunks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

from emberkeep.api.answer import LOWEST, ChoiceAnswer, progress_json, timings_json
from emberkeep.api.errors import sse
from emberkeep.api.frames import SseFrames
from emberkeep.api.llama_server import LlamaBody, settings_json
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
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass


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
        """Of the prompt that choice `index` belongs to."""
        return self.records[index // self.records[0].request.n]

    def final(
        self, index: int, choice: ChoiceAnswer, tokens: Sequence[int], has_new_line: bool
    ) -> dict[str, Json]:
        """The object for a choice that has ended."""
        record = self.record(index)
        completed = record.completed
        assert completed is not None
        told = {
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
        if choice.logprobs and self.body.wants_probs:
            told["completion_probabilities"] = probabilities_json(choice.logprobs, self.body)
        return _only(told, self.body.response_fields) if self.body.response_fields else told


def whole_json(choices: Sequence[ChoiceAnswer], envelope: LlamaEnvelope) -> Json:
    """One object, or a list where there are several choices or prompts."""
    told = [
        envelope.final(index, choice, choice.tokens if envelope.body.return_tokens else (), "\n" in choice.text)
        for index, choice in enumerate(choices)
    ]
    return told[0] if len(told) == 1 else told


def _stop_type(choice: ChoiceAnswer) -> str:
    if choice.stop:
        return "word"
    return "limit" if choice.finish is FinishReason.LENGTH else "eos"


def _only(told: dict[str, Json], fields: Iterable[str]) -> dict[str, Json]:
    """`a/b` is the `b` of `a`, under that name. What there is not is left out."""
    chosen: dict[str, Json] = {}
    for path in fields:
        value: Json = told
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
    entry = _drawn_entry if body.post_sampling_probs else _entry
    name = "top_probs" if body.post_sampling_probs else "top_logprobs"
    return [entry(token) | {name: [entry(other) for other in token.top]} for token in tokens]


def _entry(token: TokenLogprob) -> dict[str, Json]:
    return _told(token) | {"logprob": max(token.logprob, LOWEST)}


def _drawn_entry(token: TokenLogprob) -> dict[str, Json]:
    return _told(token) | {"prob": math.exp(token.logprob)}


def _told(token: TokenLogprob) -> dict[str, Json]:
    # A piece may end in the middle of a character: what of it is text is told.
    text = token.piece.decode("utf-8", "ignore")
    return {"id": token.token_id, "token": text, "bytes": list(token.piece)}


# ── as a stream ──


@dataclass(slots=True)
class _Choice:
    """What has come of a choice that is not over yet."""

    answer: ChoiceAnswer = field(default_factory=ChoiceAnswer)
    has_new_line: bool = False
    is_told: bool = False

    @property
    def predicted(self) -> int:
        return len(self.answer.tokens)


class LlamaFrames(SseFrames):
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

    def end(self) -> bytes:
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
        if event.logprobs and self._envelope.body.wants_probs:
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
        """What can be told before the end."""
        if self._began is None:
            self._began = self._now()
        spent = 1e3 * (self._now() - self._began)
        return native_timings(Timings(predicted_n=choice.predicted, predicted_ms=spent))

    def _finals(self) -> Iterable[bytes]:
        for index, choice in enumerate(self._choices):
            is_over = choice.answer.finish is not None and self._envelope.record(index).completed is not None
            if is_over and not choice.is_told:
                choice.is_told = True
                yield sse(self._envelope.final(index, choice.answer, (), choice.has_new_line))
