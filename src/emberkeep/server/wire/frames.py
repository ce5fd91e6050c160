"""Events as server-sent events, one `bytes` each.

The token path is string concatenation around one escaped text: the JSON before and after it is built once
per choice. JSON is written in ASCII because some clients take U+2028 inside a text for the end of a line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from emberkeep.server.wire.cost import detail_json, timings_json, tool_json, usage_json
from emberkeep.server.wire.envelope import Envelope
from emberkeep.server.wire.logprobs import chat_logprobs, text_logprobs
from emberkeep.types import (
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    Json,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    merge_usage,
)

DONE = b"data: [DONE]\n\n"


class Frames(Protocol):
    """Stateful: one object per stream, fed in order."""

    def frame(self, event: Event) -> bytes:
        """What to send for `event`; empty for what the stream does not show (yet)."""

    def end(self) -> bytes:
        """Everything after the last event, [DONE] included."""


class _Chunks:
    """The JSON around a choice."""

    def __init__(self, envelope: Envelope, kind: str, include_usage: bool) -> None:
        self._envelope = envelope
        self._include_usage = include_usage
        self._completed: list[Completed] = []
        self.head = envelope.head(kind)
        # OpenAI: when usage was asked for, every chunk but the last has it as null.
        self.rest: dict[str, Json] = {"usage": None} if include_usage else {}

    def chunk(self, choices: Sequence[Json], **extra: Json) -> bytes:
        return _event(self.head | {"choices": choices} | self.rest | extra)

    def around(self, choice: dict[str, Json]) -> tuple[bytes, bytes]:
        """Everything before and after the text in the chunk of `choice`, whose text is a marker."""
        before, after = self.chunk([choice]).split(_MARKER)
        return before, after

    def progress(self, choice: Json, event: Progress) -> bytes:
        spent = {"total": event.total, "cache": event.cached, "processed": event.processed}
        return self.chunk([choice], prompt_progress=spent | {"time_ms": event.elapsed_ms})

    def told(self, choice: Json, detail: Json) -> bytes:
        """What happens here beside the answer."""
        return b"event: emberkeep\n" + self.chunk([choice], emberkeep=detail)

    def keep(self, event: Completed) -> bytes:
        self._completed.append(event)
        return b""

    def end(self, empty_choice: Json) -> bytes:
        """OpenAI's clients do not look at event names: to them the detail is one more chunk, without text."""
        completed = merge_usage(self._completed)
        timings = timings_json(completed.timings)
        detail = detail_json(completed, self._envelope.conversation_id)
        frames = b"event: emberkeep\n" + self.chunk([empty_choice], timings=timings, emberkeep=detail)
        if self._include_usage:
            frames += self.chunk([], usage=usage_json(completed.usage), timings=timings)
        return frames + DONE


_MARKER = json.dumps("\0").encode()


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class ChatFrames:
    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self._chunks = _Chunks(envelope, "chat.completion.chunk", include_usage)
        self._started: set[int] = set()
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def frame(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            return self._piece(event.index, "content", event.text, event.logprobs)
        match event:
            case ReasoningDelta():
                return self._piece(event.index, "reasoning_content", event.text)
            case ToolCallDelta():
                return self._delta(event.index, {"tool_calls": [_call_json(event)]})
            case Finished():
                return self._delta(event.index, {}, finish=event.reason)
            case Progress():
                return self._chunks.progress(_chat_choice(0, {}), event)
            case Completed():
                return self._chunks.keep(event)
            case CallStarted() | CallEnded():
                return self._chunks.told(_chat_choice(0, {}), tool_json(event))
        return b""

    def end(self) -> bytes:
        return self._chunks.end(_chat_choice(0, {}))

    def _piece(self, index: int, key: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        if not text and not logprobs:
            return b""
        if logprobs or index not in self._started:
            return self._delta(index, {key: text}, chat_logprobs(logprobs))
        around = self._around.get((index, key))
        if around is None:
            around = self._chunks.around(_chat_choice(index, {key: "\0"}))
            self._around[index, key] = around
        return around[0] + json.dumps(text).encode() + around[1]

    def _delta(self, index: int, delta: Json, logprobs: Json = None, finish: str | None = None) -> bytes:
        """The first delta of a choice also says the role: a frame of its own would only cost time."""
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "" if finish else None} | delta
        return self._chunks.chunk([_chat_choice(index, delta, logprobs, finish)])


def _chat_choice(index: int, delta: Json, logprobs: Json = None, finish: str | None = None) -> dict[str, Json]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _call_json(event: ToolCallDelta) -> dict[str, Json]:
    function = {"arguments": event.arguments}
    if event.id is None and event.name is None:
        return {"index": event.call_index, "function": function}
    function = {"name": event.name or "", **function}
    return {"index": event.call_index, "id": event.id, "type": "function", "function": function}


class TextFrames:
    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self._chunks = _Chunks(envelope, "text_completion", include_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, int] = {}

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece(event)
            case Finished():
                return self._chunks.chunk([_text_choice(event.index, "", finish=event.reason)])
            case Progress():
                return self._chunks.progress(_text_choice(0, ""), event)
            case Completed():
                return self._chunks.keep(event)
        return b""

    def end(self) -> bytes:
        return self._chunks.end(_text_choice(0, ""))

    def _piece(self, event: TextDelta) -> bytes:
        offset = self._offsets.get(event.index, 0)
        self._offsets[event.index] = offset + len(event.text)
        if event.logprobs:
            logprobs = text_logprobs(event.logprobs, offset)
            return self._chunks.chunk([_text_choice(event.index, event.text, logprobs)])
        return self._plain(event) if event.text else b""

    def _plain(self, event: TextDelta) -> bytes:
        around = self._around.get(event.index)
        if around is None:
            around = self._around[event.index] = self._chunks.around(_text_choice(event.index, "\0"))
        return around[0] + json.dumps(event.text).encode() + around[1]


def _text_choice(index: int, text: str, logprobs: Json = None, finish: Json = None) -> dict[str, Json]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
