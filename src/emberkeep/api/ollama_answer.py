"""An answer as Ollama's clients get it: lines of JSON, or one object; the last one says what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from time import perf_counter

from emberkeep.api.answer import MARKER, Answer, Frames, arguments_of, detail_json
from emberkeep.api.errors import OLLAMA_ERRORS
from emberkeep.api.ollama_body import to_context
from emberkeep.api.openai_answer import chat_logprobs
from emberkeep.types.events import Event, FinishReason, ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta
from emberkeep.types.request import Embedded, Json, Message, Request, ToolCall
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class OllamaEnvelope:
    """What every object of one answer has in common."""

    model: str
    """As the client called it."""
    request: Request
    began: float = field(default_factory=perf_counter)

    def head(self) -> dict[str, Json]:
        return {"model": self.model, "created_at": now()}

    def piece(self, text: str, thinking: str = "", calls: Sequence[Json] = ()) -> dict[str, Json]:
        more: dict[str, Json] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def ended(self, answer: Answer) -> dict[str, Json]:
        """The fields of the last object that tell how the answer ended."""
        completed, finish = answer.completed, answer.choices[0].finish
        timings, usage = completed.timings, completed.usage
        total_ms = 1e3 * (perf_counter() - self.began)
        return {
            "done": True,
            "done_reason": "length" if finish is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(total_ms),
            # Before its prompt is evaluated, a request waits for its model and for its turn.
            "load_duration": _nanoseconds(max(total_ms - timings.prompt_ms - timings.predicted_ms, 0)),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prompt_ms),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timings.predicted_ms),
            "emberkeep": detail_json(completed, self.request.conversation_id),
        }


class GenerateEnvelope(OllamaEnvelope):
    """What every object of an answer of `/api/generate` has in common."""

    def piece(self, text: str, thinking: str = "", calls: Sequence[Json] = ()) -> dict[str, Json]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def ended(self, answer: Answer) -> dict[str, Json]:
        ending = OllamaEnvelope.ended(self, answer)
        return ending if self.request.prompt is not None else {**ending, "context": self._context(answer)}

    def _context(self, answer: Answer) -> list[int]:
        choice = answer.choices[0]
        return to_context([*self.request.messages, Message("assistant", choice.text, choice.reasoning)])


def loaded_json(envelope: OllamaEnvelope, reason: str) -> dict[str, Json]:
    """For a request that asks nothing: its model is there now (`load`), or gone (`unload`)."""
    return {**envelope.head(), **envelope.piece(""), "done": True, "done_reason": reason}


def whole_json(answer: Answer, envelope: OllamaEnvelope) -> dict[str, Json]:
    choice = answer.choices[0]
    calls = [call for index in sorted(choice.calls) for call in _calls_json(index, choice.calls[index])]
    return {
        **envelope.head(),
        **envelope.piece(choice.text, choice.reasoning, calls),
        **_logprobs_json(choice.logprobs),
        **envelope.ended(answer),
    }


class OllamaFrames(Frames):
    """One object per line. The JSON around a text is built once: only the text and the time differ."""

    media_type = "application/x-ndjson"
    errors = OLLAMA_ERRORS

    def __init__(self, envelope: OllamaEnvelope) -> None:
        self._envelope = envelope
        self._answer = Answer(1)
        self._texts: list[str] = []
        self._open_call: int | None = None
        """The call whose arguments are being written: Ollama's clients get them all at once."""
        text = {**envelope.head(), "created_at": "\0", **envelope.piece("\0"), "done": False}
        self._around = _line(text).rsplit(MARKER, 2)  # the model's name, before them, is the client's word

    def frame(self, event: Event) -> bytes:
        if type(event) is TextDelta and self._open_call is None:
            return self._text(event)
        is_same_call = isinstance(event, ToolCallDelta) and event.call_index == self._open_call
        before = b"" if is_same_call else self._close_call()
        match event:
            case TextDelta():
                return before + self._text(event)
            case ReasoningDelta() if event.text:
                before += self._line(self._envelope.piece("", event.text))
            case ToolCallDelta():
                self._open_call = event.call_index
        self._answer.add([event])
        return before

    def end(self) -> bytes:
        self._answer.add([TextDelta(0, "".join(self._texts))])
        envelope = self._envelope
        return _line({**envelope.head(), **envelope.piece(""), **envelope.ended(self._answer)})

    def idle(self) -> bytes:
        return b""  # its clients take every line for a part of the answer

    def _text(self, event: TextDelta) -> bytes:
        self._texts.append(event.text)
        if event.logprobs:
            return self._line(self._envelope.piece(event.text), event.logprobs)
        if not event.text:
            return b""
        before, between, after = self._around
        return before + json.dumps(now()).encode() + between + json.dumps(event.text).encode() + after

    def _close_call(self) -> bytes:
        """The call that has come to its end with the event that follows it."""
        index, self._open_call = self._open_call, None
        if index is None:
            return b""
        calls = _calls_json(index, self._answer.choices[0].calls[index])
        return self._line(self._envelope.piece("", calls=calls)) if calls else b""

    def _line(self, piece: dict[str, Json], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return _line({**self._envelope.head(), **piece, "done": False, **_logprobs_json(logprobs)})


def _line(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _calls_json(index: int, call: ToolCall) -> list[Json]:
    """None for a call whose arguments were cut off: they must be an object."""
    if (arguments := arguments_of(call)) is None:
        return []
    return [{"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}]


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
    logprobs = chat_logprobs(tokens)
    return {"logprobs": logprobs["content"]} if logprobs else {}


def embedded_json(embedded: Embedded, model: str, began: float) -> dict[str, Json]:
    return {
        "model": model,
        "embeddings": [vector.tolist() for vector in embedded.vectors],
        "total_duration": _nanoseconds(1e3 * (perf_counter() - began)),
        "load_duration": 0,
        "prompt_eval_count": embedded.prompt_tokens,
    }


def now() -> str:
    """The time in RFC 3339, with nanoseconds."""
    return timestamp(time.time_ns())


def timestamp(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{_to_the_second(seconds)}.{rest:09d}Z"


@lru_cache(maxsize=8)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _nanoseconds(milliseconds: float) -> int:
    return round(1e6 * milliseconds)
