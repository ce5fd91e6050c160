"""OpenAI's chat completions and completions as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from emberkeep.api.answer import (
    Envelope,
    chat_logprobs,
    detail_json,
    progress_json,
    question_json,
    text_logprobs,
    timings_json,
    tool_json,
    usage_json,
)
from emberkeep.api.call_shape import TOOL_CALLS, CallShape, StreamedCalls
from emberkeep.api.errors import sse
from emberkeep.api.frames import MARKER, SseFrames, loading_comment
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    Loading,
    PermissionAsked,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    merge_usage,
)
from emberkeep.types.request import Json

DONE = b"data: [DONE]\n\n"


class ChunkFrames(SseFrames):
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

    def choice(
        self, index: int, fields: dict[str, Json], logprobs: Json = None, finish: str | None = None
    ) -> dict[str, Json]:
        raise NotImplementedError

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

    def choice(
        self, index: int, fields: dict[str, Json], logprobs: Json = None, finish: str | None = None
    ) -> dict[str, Json]:
        return {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}

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

    def choice(
        self, index: int, fields: dict[str, Json], logprobs: Json = None, finish: str | None = None
    ) -> dict[str, Json]:
        return {"index": index, "text": "", **fields, "logprobs": logprobs, "finish_reason": finish}

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
