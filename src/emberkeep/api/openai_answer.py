"""Chat completions and completions as OpenAI's clients get them: at once, or as a stream of chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field

from emberkeep.api.answer import (
    MARKER,
    Answer,
    ChoiceAnswer,
    Frames,
    detail_json,
    loading_comment,
    progress_json,
    question_json,
    timings_json,
    tool_json,
    usage_json,
)
from emberkeep.api.errors import sse
from emberkeep.api.kinds import call_json, custom_input
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    Loading,
    PermissionAsked,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    merge_usage,
)
from emberkeep.types.request import Json, ToolCall
from emberkeep.values import dataclass

DONE = b"data: [DONE]\n\n"

# ── calls ──


@dataclass(frozen=True, slots=True)
class CallShape:
    custom: frozenset[str] = frozenset()
    """Names of the tools that take a text."""
    is_legacy: bool = False
    """The client sent `functions`: an answer has one `function_call`."""

    def in_message(self, calls: Sequence[ToolCall]) -> dict[str, Json]:
        """The fields of a message with one call or more."""
        if self.is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._whole(call) for call in calls]}

    def finish(self, reason: FinishReason | None) -> str | None:
        return "function_call" if self.is_legacy and reason is FinishReason.TOOL_CALLS else reason

    def _whole(self, call: ToolCall) -> dict[str, Json]:
        return custom_json(call) if call.name in self.custom else call_json(call)


TOOL_CALLS = CallShape()


def custom_json(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}


@dataclass(slots=True)
class StreamedCalls:
    """The calls of one stream. A custom tool's text is told when it is whole: it is written as JSON, of which the
    beginning says little."""

    shape: CallShape
    _held: dict[int, tuple[int, ToolCall]] = field(default_factory=dict)
    """By choice: the call of a custom tool that is being written, and its number."""

    def deltas(self, event: ToolCallDelta) -> list[Json]:
        """What to write in the choice of `event`."""
        if self.shape.is_legacy:
            return [{"function_call": _function(event)}] if event.call_index == 0 else []
        deltas = self.rest(event.index) if event.name is not None else []
        if event.name in self.shape.custom:
            self._held[event.index] = event.call_index, event.added_to(None)
        elif event.index in self._held and event.name is None:
            number, call = self._held[event.index]
            self._held[event.index] = number, event.added_to(call)
        else:
            deltas.append({"tool_calls": [_call_delta(event)]})
        return deltas

    def rest(self, index: int) -> list[Json]:
        """What is still to be told of a choice that goes on with something else, or ends."""
        if index not in self._held:
            return []
        number, call = self._held.pop(index)
        return [{"tool_calls": [{"index": number, **custom_json(call)}]}]


def _function(event: ToolCallDelta) -> dict[str, Json]:
    return {**({} if event.name is None else {"name": event.name}), "arguments": event.arguments}


def _call_delta(event: ToolCallDelta) -> dict[str, Json]:
    if event.id is None and event.name is None:
        return {"index": event.call_index, "function": _function(event)}
    function = {"name": event.name or "", "arguments": event.arguments}
    return {"index": event.call_index, "id": event.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    conversation_id: str | None

    def head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


# ── at once ──


def chat_json(answer: Answer, envelope: Envelope, calls: CallShape = TOOL_CALLS) -> dict[str, Json]:
    choices: list[dict[str, Json]] = [
        {
            "index": index,
            "message": _message(choice, calls),
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": calls.finish(choice.finish),
        }
        for index, choice in enumerate(answer.choices)
    ]
    return _wrap(answer, envelope, "chat.completion", choices)


def _message(choice: ChoiceAnswer, calls: CallShape) -> dict[str, Json]:
    message: dict[str, Json] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message |= calls.in_message([call for _, call in sorted(choice.calls.items())])
    return message


def text_json(answer: Answer, envelope: Envelope) -> dict[str, Json]:
    choices: list[dict[str, Json]] = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": text_logprobs(choice.logprobs, choice.logprobs_start),
            "finish_reason": choice.finish,
        }
        for index, choice in enumerate(answer.choices)
    ]
    return _wrap(answer, envelope, "text_completion", choices)


def _wrap(answer: Answer, envelope: Envelope, kind: str, choices: list[dict[str, Json]]) -> dict[str, Json]:
    completed = answer.completed
    return envelope.head(kind) | {
        "choices": choices,
        "usage": usage_json(completed.usage),
        "timings": timings_json(completed.timings),
        "emberkeep": answer.detail_json(envelope.conversation_id),
    }


# ── as a stream ──


class ChunkFrames(Frames):
    """OpenAI's chunks: what chats and completions of a text have in common."""

    kind: str

    def __init__(self, envelope: Envelope, include_usage: bool) -> None:
        self._envelope = envelope
        self._include_usage = include_usage
        self._completed: list[Completed] = []
        self._head = envelope.head(self.kind)
        # OpenAI: when usage was asked for, every chunk but the last has it as null.
        self._rest: dict[str, Json] = {"usage": None} if include_usage else {}
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def news(self, fields: dict[str, Json]) -> dict[str, Json]:
        """These fields where a choice has what is new in it."""
        raise NotImplementedError

    def choice(
        self, index: int, fields: dict[str, Json], logprobs: Json = None, finish: str | None = None
    ) -> dict[str, Json]:
        return {"index": index, **self.news(fields), "logprobs": logprobs, "finish_reason": finish}

    def frame(self, event: Event) -> bytes:
        match event:
            case Loading():
                return loading_comment(event)
            case Progress():
                return self._chunk([self.choice(0, {})], prompt_progress=progress_json(event))
            case Completed():
                self._completed.append(event)
            case CallStarted() | CallEnded():
                return self._aside(emberkeep=tool_json(event))
            case PermissionAsked():
                return self._aside(emberkeep=question_json(event))
        return b""

    def end(self) -> bytes:
        completed = merge_usage(self._completed)
        timings = timings_json(completed.timings)
        frames = self._aside(timings=timings, emberkeep=detail_json(completed, self._envelope.conversation_id))
        if self._include_usage:
            frames += self._chunk([], usage=usage_json(completed.usage), timings=timings)
        return frames + DONE

    def _chunk(self, choices: Sequence[Json], **extra: Json) -> bytes:
        return sse(self._head | {"choices": choices} | self._rest | extra)

    def _aside(self, **extra: Json) -> bytes:
        """Something beside the answer. OpenAI's clients do not look at the names of events: to them it is one more
        chunk, without text."""
        return b"event: emberkeep\n" + self._chunk([self.choice(0, {})], **extra)

    def _plain(self, index: int, key: str, text: str) -> bytes:
        """A chunk with nothing but a text. The JSON around it is written once."""
        around = self._around.get((index, key))
        if around is None:
            # A model's name, before the marker, may be any text.
            before, _, after = self._chunk([self.choice(index, {key: "\0"})]).rpartition(MARKER)
            around = self._around[index, key] = before, after
        return around[0] + json.dumps(text).encode() + around[1]


class ChatFrames(ChunkFrames):
    kind = "chat.completion.chunk"

    def __init__(self, envelope: Envelope, include_usage: bool, calls: CallShape = TOOL_CALLS) -> None:
        super().__init__(envelope, include_usage)
        self._calls = StreamedCalls(calls)
        self._started: set[int] = set()

    def news(self, fields: dict[str, Json]) -> dict[str, Json]:
        return {"delta": fields}

    def frame(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            return self._piece(event.index, "content", event.text, event.logprobs)
        match event:
            case ReasoningDelta():
                return self._piece(event.index, "reasoning_content", event.text)
            case ToolCallDelta():
                return b"".join(self._delta(event.index, delta) for delta in self._calls.deltas(event))
            case Finished():
                rest = b"".join(self._delta(event.index, delta) for delta in self._calls.rest(event.index))
                return rest + self._delta(event.index, {}, finish=self._calls.shape.finish(event.reason))
        return super().frame(event)

    def _piece(self, index: int, key: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        if logprobs or (text and index not in self._started):
            return self._delta(index, {key: text}, chat_logprobs(logprobs))
        return self._plain(index, key, text) if text else b""

    def _delta(
        self, index: int, delta: dict[str, Json], logprobs: Json = None, finish: str | None = None
    ) -> bytes:
        """The first delta of a choice also says the role: a frame of its own would only cost time."""
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "" if finish else None} | delta
        return self._chunk([self.choice(index, delta, logprobs, finish)])


class TextFrames(ChunkFrames):
    kind = "text_completion"

    def __init__(self, envelope: Envelope, include_usage: bool) -> None:
        super().__init__(envelope, include_usage)
        self._offsets: dict[int, int] = {}

    def news(self, fields: dict[str, Json]) -> dict[str, Json]:
        return {"text": "", **fields}

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                offset = self._offsets.get(event.index, 0)
                self._offsets[event.index] = offset + len(event.text)
                if event.logprobs:
                    logprobs = text_logprobs(event.logprobs, offset)
                    return self._chunk([self.choice(event.index, {"text": event.text}, logprobs)])
                return self._plain(event.index, "text", event.text) if event.text else b""
            case Finished():
                return self._chunk([self.choice(event.index, {}, finish=event.reason)])
        return super().frame(event)


# ── log probabilities ──


LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """None when there are none."""
    if not tokens:
        return None
    content = [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
    """`offset`: characters of this choice's text that came before these tokens."""
    if not tokens:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(_text(token))
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [None if math.isnan(token.logprob) else _finite(token) for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: TokenLogprob) -> Json:
    if math.isnan(token.logprob):
        return None
    return {_text(other): _finite(other) for other in token.top}


def _entry(token: TokenLogprob) -> dict[str, Json]:
    return {"token": _text(token), "logprob": _finite(token), "bytes": list(token.piece)}


def _text(token: TokenLogprob) -> str:
    return token.piece.decode("utf-8", "replace")


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LOWEST)
