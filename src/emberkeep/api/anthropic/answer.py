"""An answer as Anthropic's Messages have it: a message at once, or events in their order, and what it cost.

    message_start, for each block: content_block_start, content_block_delta ..., content_block_stop,
    then message_delta, message_stop

`ping` may come anywhere. A stream begins when there is something to tell: what was reused is known by then.
"""

from __future__ import annotations

import json

from emberkeep.api.answer import Answer, detail_json, timings_json, tool_json
from emberkeep.api.anthropic.blocks import pack_reasoning, signature_of
from emberkeep.api.errors import ANTHROPIC_ERRORS, Failure
from emberkeep.api.frames import BlockFrames
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


class MessageFrames(BlockFrames):
    def __init__(self, envelope: MessageEnvelope) -> None:
        super().__init__()
        self._envelope = envelope
        self._usage = Usage()
        """What is known so far."""
        self._blocks = 0
        self._open = ""
        """The type of the block that is being written; empty: none is."""
        self._reasoning = ""
        self._finished = Finished(0, FinishReason.STOP)
        self._completed: list[Completed] = []

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._add("text", event.text)
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
                return self._begin() + self._event("ping", emberkeep=tool_json(event))
        return b""

    def end(self) -> bytes:
        completed = merge_usage(self._completed)
        delta = self._envelope.ending(self._finished.reason, self._finished.stop, completed)
        beside = _beside(completed, self._envelope)
        last = self._event("message_delta", delta=delta, usage=usage_json(completed.usage), **beside)
        return self._begin() + self._close() + last + self._event("message_stop")

    def idle(self) -> bytes:
        return self._begin() + self._event("ping")

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return ANTHROPIC_ERRORS.frame(failure, request_id)

    # ── blocks ──

    def _beginning(self) -> bytes:
        not_yet = {"stop_reason": None, "stop_sequence": None}
        return self._event("message_start", message=self._envelope.message([], self._usage, not_yet))

    def _add(self, kind: str, text: str) -> bytes:
        """More of a text, which begins a block unless one of its kind is being written."""
        if not text:
            return b""
        begin = b"" if self._open == kind else self._start(kind, {"type": kind, kind: ""})
        return begin + self._piece(text)

    def _think(self, text: str) -> bytes:
        """Reasoning that the client does not want to see still opens a block: its signature follows."""
        self._reasoning += text
        if not self._envelope.omits_thinking:
            return self._add("thinking", text)
        return b"" if self._open == "thinking" else self._start("thinking", {"type": "thinking", "thinking": ""})

    def _call(self, event: ToolCallDelta) -> bytes:
        begin = b""
        if event.id is not None or event.name is not None:
            begin = self._start("tool_use", _tool_use(event.id or "", event.name or "", {}))
        return begin + self._piece(event.arguments)

    def _start(self, kind: str, block: dict[str, Json]) -> bytes:
        """Close what is open and begin another block. The first one is followed by a ping, as clients know it."""
        before, index = self._begin() + self._close(), self._blocks
        self._open, self._blocks = kind, index + 1
        name, key = _DELTAS[kind]
        self._open_delta("content_block_delta", index=index, delta={"type": name, key: "\0"})
        signed = {**block, "signature": ""} if kind == "thinking" else block
        ping = b"" if index else self._event("ping")
        return before + self._event("content_block_start", index=index, content_block=signed) + ping

    def _close(self) -> bytes:
        kind, self._open, index = self._open, "", self._blocks - 1
        stop = self._event("content_block_stop", index=index) if kind else b""
        if kind != "thinking":
            return stop
        signature, self._reasoning = self._envelope.thinking(self._reasoning)["signature"], ""
        delta = {"type": "signature_delta", "signature": signature}
        return self._event("content_block_delta", index=index, delta=delta) + stop


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
