"""An answer as Anthropic's Messages have it: a message at once, or events in their order, and what it cost.

    message_start, for each block: content_block_start, content_block_delta ..., content_block_stop,
    then message_delta, message_stop

`ping` may come anywhere. A stream begins when there is something to tell: what was reused is known by then.
"""

from __future__ import annotations

import json

from emberkeep.api.answer import Answer, SseFrames, detail_json, timings_json, tool_json
from emberkeep.api.anthropic_blocks import pack_reasoning, signature_of
from emberkeep.api.errors import ANTHROPIC_ERRORS, Failure, sse
from emberkeep.types.events import (
    Accepted,
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
    merge_usage,
)
from emberkeep.types.request import Json, ToolCall
from emberkeep.values import dataclass

_CUT = "max_tokens"
_FULL = "model_context_window_exceeded"
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: _CUT, FinishReason.TOOL_CALLS: "tool_use"}


@dataclass(frozen=True, slots=True)
class MessageEnvelope:
    """What is known of a message before it is written."""

    id: str
    model: str
    conversation_id: str | None
    max_tokens: int
    omits_thinking: bool = False
    """The client does not want to see reasoning: its signature stands for it."""

    def message(self, content: list[Json], usage: Usage, ending: dict[str, Json]) -> dict[str, Json]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage_json(usage),
        }

    def ending(self, finish: FinishReason | None, stop: str | None, completed: Completed) -> dict[str, Json]:
        """Why it ended. One that was cut before its limit has filled the context; not every service counts."""
        reason = _REASONS[finish] if finish else None
        limit = completed.fit.clamped_to or self.max_tokens
        if reason == _CUT and 0 < completed.usage.completion_tokens < limit:
            reason = _FULL
        is_stop = finish is FinishReason.STOP and stop is not None
        return {"stop_reason": "stop_sequence" if is_stop else reason, "stop_sequence": stop if is_stop else None}

    def thinking(self, reasoning: str) -> dict[str, Json]:
        if self.omits_thinking:
            return {"type": "thinking", "thinking": "", "signature": pack_reasoning(reasoning)}
        return {"type": "thinking", "thinking": reasoning, "signature": signature_of(reasoning)}


def usage_json(usage: Usage) -> dict[str, Json]:
    """Every token of the prompt is read from the cache, or stored there because it stands before a breakpoint, or
    neither."""
    cached, created = usage.cached_tokens, usage.created_tokens
    for_long = max(usage.marked.long_tokens - cached, 0)
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_long,
            "ephemeral_1h_input_tokens": for_long,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }


# ── at once ──


def message_json(answer: Answer, envelope: MessageEnvelope) -> dict[str, Json]:
    (choice,), completed = answer.choices, answer.completed
    content: list[Json] = [envelope.thinking(choice.reasoning)] if choice.reasoning else []
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    content += [_tool_use(call.id, call.name, _input(call)) for _, call in sorted(choice.calls.items())]
    ending = envelope.ending(choice.finish, choice.stop, completed)
    return {**envelope.message(content, completed.usage, ending), **_beside(completed, envelope)}


def _tool_use(id: str, name: str, arguments: Json) -> dict[str, Json]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _input(call: ToolCall) -> Json:
    """Nothing where the model was cut off before its arguments were whole."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _beside(completed: Completed, envelope: MessageEnvelope) -> dict[str, Json]:
    """What Anthropic's messages do not have: their clients pass it on unread."""
    return {
        "timings": timings_json(completed.timings),
        "emberkeep": detail_json(completed, envelope.conversation_id),
    }


# ── as a stream ──

_MARKER = json.dumps("\0").encode()


class MessageFrames(SseFrames):
    def __init__(self, envelope: MessageEnvelope) -> None:
        self._envelope = envelope
        self._usage = Usage()
        """What is known so far."""
        self._has_begun = False
        self._blocks = 0
        self._open = ""
        """The type of the block that is being written; empty: none is."""
        self._around = (b"", b"")
        """The JSON before and after the text of a delta."""
        self._reasoning = ""
        self._finished: Finished | None = None
        self._completed: list[Completed] = []

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece("text", event.text)
            case ReasoningDelta():
                return self._think(event.text)
            case ToolCallDelta():
                return self._call(event)
            case Finished():
                self._finished = event
                return self._begin() + self._close()
            case Completed():
                self._completed.append(event)
            case Accepted():
                self._usage = Usage(event.prompt_tokens)
            case Progress():
                self._usage = Usage(event.total, cached_tokens=event.cached, marked=event.marked)
            case CallStarted() | CallEnded():
                return self._begin() + _event("ping", emberkeep=tool_json(event))
        return b""

    def end(self) -> bytes:
        completed = merge_usage(self._completed)
        finished = self._finished or Finished(0, FinishReason.STOP)
        delta = self._envelope.ending(finished.reason, finished.stop, completed)
        told = _beside(completed, self._envelope)
        last = _event("message_delta", delta=delta, usage=usage_json(completed.usage), **told)
        return self._begin() + self._close() + last + _event("message_stop")

    def idle(self) -> bytes:
        return self._begin() + _event("ping")

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return ANTHROPIC_ERRORS.frame(failure, request_id)

    # ── blocks ──

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        not_yet = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=self._envelope.message([], self._usage, not_yet))

    def _piece(self, kind: str, text: str) -> bytes:
        """More of a text, which begins a block unless one of its kind is being written."""
        if not text:
            return b""
        begin = b"" if self._open == kind else self._start(kind, {"type": kind, kind: ""})
        return begin + self._around[0] + json.dumps(text).encode() + self._around[1]

    def _think(self, text: str) -> bytes:
        """Reasoning that the client does not want to see still opens a block: its signature follows."""
        self._reasoning += text
        if not self._envelope.omits_thinking:
            return self._piece("thinking", text)
        return b"" if self._open == "thinking" else self._start("thinking", {"type": "thinking", "thinking": ""})

    def _call(self, event: ToolCallDelta) -> bytes:
        begin = b""
        if event.id is not None or event.name is not None:
            begin = self._start("tool_use", _tool_use(event.id or "", event.name or "", {}))
        return begin + (self._around[0] + json.dumps(event.arguments).encode() + self._around[1])

    def _start(self, kind: str, block: dict[str, Json]) -> bytes:
        """Close what is open and begin another block. The first one is followed by a ping, as clients know it."""
        before, index = self._begin() + self._close(), self._blocks
        self._open, self._blocks = kind, index + 1
        name, key = _DELTAS[kind]
        delta = _event("content_block_delta", index=index, delta={"type": name, key: "\0"})
        self._around = delta.split(_MARKER)[0], delta.split(_MARKER)[1]
        signed = {**block, "signature": ""} if kind == "thinking" else block
        ping = b"" if index else _event("ping")
        return before + _event("content_block_start", index=index, content_block=signed) + ping

    def _close(self) -> bytes:
        if not self._open:
            return b""
        kind, self._open, index = self._open, "", self._blocks - 1
        return (self._sign(index) if kind == "thinking" else b"") + _event("content_block_stop", index=index)

    def _sign(self, index: int) -> bytes:
        signature = self._envelope.thinking(self._reasoning)["signature"]
        self._reasoning = ""
        return _event(
            "content_block_delta", index=index, delta={"type": "signature_delta", "signature": signature}
        )


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _event(kind: str, **fields: Json) -> bytes:
    return sse({"type": kind, **fields}, kind)
