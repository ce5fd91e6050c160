"""An answer as OpenAI's Responses API gives it: items of output, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import field
from typing import TypeVar

from emberkeep.api.answer import SseFrames, chat_logprobs, detail_json, timings_json, tool_json
from emberkeep.api.errors import Failure, sse
from emberkeep.api.responses import Toolset
from emberkeep.api.responses_items import SEALED, Called, Item, output_id
from emberkeep.api.sealed import seal
from emberkeep.api.tools import custom_input
from emberkeep.types.events import (
    CallEnded,
    Completed,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import Json
from emberkeep.values import dataclass

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


# ── items while they are written ──


@dataclass(slots=True)
class _Message:
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def part(self) -> dict[str, Json]:
        told = _logprobs(self.logprobs)
        return {"type": "output_text", "annotations": [], "logprobs": told, "text": "".join(self.texts)}

    def empty_part(self) -> dict[str, Json]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}

    def json(self, status: str) -> Item:
        content = [self.part()] if status != IN_PROGRESS else []
        return {"id": self.id, "type": "message", "status": status, "content": content, "role": "assistant"}


@dataclass(slots=True)
class _Reasoning:
    id: str
    is_sealed: bool
    """It is given as `encrypted_content` too."""
    texts: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Json]:
        return {"type": "reasoning_text", "text": "".join(self.texts)}

    def empty_part(self) -> dict[str, Json]:
        return {"type": "reasoning_text", "text": ""}

    def json(self, status: str) -> Item:
        told: Item = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
        told["content"] = [self.part()] if status != IN_PROGRESS else []
        if self.is_sealed:
            told["encrypted_content"] = seal("".join(self.texts), SEALED) if status != IN_PROGRESS else ""
        return told


@dataclass(slots=True)
class _Call:
    id: str
    index: int
    called: Called
    call_id: str
    arguments: list[str] = field(default_factory=list)

    def json(self, status: str) -> Item:
        arguments = "".join(self.arguments) if status != IN_PROGRESS else ""
        named: Item = {"call_id": self.call_id, "name": self.called.name}
        if self.called.namespace:
            named["namespace"] = self.called.namespace
        if self.called.is_custom:
            given = custom_input(arguments)
            return {"id": self.id, "type": "custom_tool_call", "status": status, **named, "input": given}
        return {"id": self.id, "type": "function_call", "status": status, **named, "arguments": arguments}


_Item = _Message | _Reasoning | _Call
NewItem = TypeVar("NewItem", _Message, _Reasoning, _Call)


class Output:
    """The items of one answer, made of its events in order."""

    def __init__(self, response_id: str, tools: Toolset, *, seals_reasoning: bool = False) -> None:
        self._id = response_id
        self._tools = tools
        self._seals_reasoning = seals_reasoning
        self.items: list[_Item] = []
        self.finish = FinishReason.STOP
        self._completed: Completed | None = None
        self._ran: list[CallEnded] = []

    def add(self, event: Event) -> _Item | None:
        """The item that the event adds to, which may be a new one. None: it says nothing."""
        match event:
            case TextDelta():
                return self._add_text(event) if event.text or event.logprobs else None
            case ReasoningDelta():
                return self._add_reasoning(event) if event.text else None
            case ToolCallDelta():
                return self._add_call(event)
            case Finished():
                self.finish = event.reason
                if not self.items:  # clients expect a message, even where the model has said nothing
                    return self._new(_Message(self._next_id("message")))
            case Completed():
                self._completed = event
            case CallEnded():
                self._ran.append(event)
        return None

    def json(self, status: str) -> list[Item]:
        """With the status of the last one; those before it are complete."""
        last = len(self.items) - 1
        return [item.json(status if place == last else COMPLETED) for place, item in enumerate(self.items)]

    @property
    def status(self) -> str:
        """Of the answer, and so of its last item."""
        return INCOMPLETE if self.finish is FinishReason.LENGTH else COMPLETED

    def finished(self, head: dict[str, Json], conversation_id: str | None) -> dict[str, Json]:
        """The whole response, after Completed."""
        assert self._completed is not None
        reason = {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None
        detail = detail_json(self._completed, conversation_id)
        if self._ran:
            detail["tools"] = [tool_json(event)["tool"] for event in self._ran]
        if self._tools.left_out:
            detail["left_out"] = list(self._tools.left_out)
        return head | {
            "status": self.status,
            "completed_at": int(time.time()),
            "incomplete_details": reason,
            "output": self.json(self.status),
            "usage": usage_json(self._completed.usage),
            "timings": timings_json(self._completed.timings),
            "emberkeep": detail,
        }

    def _add_text(self, event: TextDelta) -> _Item:
        item = self.items[-1] if self.items else None
        if not isinstance(item, _Message):
            item = self._new(_Message(self._next_id("message")))
        item.texts.append(event.text)
        item.logprobs.extend(event.logprobs)
        return item

    def _add_reasoning(self, event: ReasoningDelta) -> _Item:
        item = self.items[-1] if self.items else None
        if not isinstance(item, _Reasoning):
            item = self._new(_Reasoning(self._next_id("reasoning"), self._seals_reasoning))
        item.texts.append(event.text)
        return item

    def _add_call(self, event: ToolCallDelta) -> _Item:
        item = self.items[-1] if self.items else None
        if not isinstance(item, _Call) or item.index != event.call_index:
            called = self._tools.as_called(event.name or "")
            kind = "custom_tool_call" if called.is_custom else "function_call"
            item = self._new(_Call(self._next_id(kind), event.call_index, called, event.id or ""))
        item.arguments.append(event.arguments)
        return item

    def _new(self, item: NewItem) -> NewItem:
        self.items.append(item)
        return item

    def _next_id(self, kind: str) -> str:
        return output_id(self._id, kind, len(self.items))


def failed(head: dict[str, Json], output: Output, failure: Failure) -> dict[str, Json]:
    """The response with what there is of an answer that failed."""
    error = {"code": _error_code(failure), "message": failure.message}
    return head | {"status": "failed", "error": error, "output": output.json(INCOMPLETE)}


def cancelled(head: dict[str, Json], output: Output) -> dict[str, Json]:
    return head | {"status": "cancelled", "output": output.json(INCOMPLETE)}


def _error_code(failure: Failure) -> str:
    """Of those few that OpenAI has for responses; Codex looks for the first."""
    if failure.code in ("context_length_exceeded", "rate_limit_exceeded"):
        return failure.code
    return "invalid_prompt" if failure.status < 500 else "server_error"


def usage_json(usage: Usage) -> dict[str, Json]:
    is_marked = usage.marked.tokens > 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created_tokens if is_marked else usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[Json]:
    told: Json = chat_logprobs(tokens)
    return list(told["content"]) if told else []


# ── as a stream ──


class ResponseFrames(SseFrames):
    """One event after the other, each with its number."""

    def __init__(self, head: dict[str, Json], output: Output, conversation_id: str | None) -> None:
        """`output` is this stream's own."""
        self._head = head
        self._output = output
        self._conversation_id = conversation_id
        self._sequence = 0
        self._open: _Item | None = None
        self._before = self._between = self._after = b""
        """The JSON of the open item's deltas: before, between and after its text and its number."""

    def frame(self, event: Event) -> bytes:
        begun = self._begin() if not self._sequence else b""
        item = self._output.add(event)
        if isinstance(event, Finished):
            opened = self._turn_to(item) if item is not None else b""
            return begun + opened + self._close(self._output.status)
        if item is None:
            return begun
        opened = self._turn_to(item) if item is not self._open else b""
        return begun + opened + self._delta(item, event)

    def end(self) -> bytes:
        response = self._output.finished(self._head, self._conversation_id)
        return self._event(f"response.{response['status']}", response=response)

    def idle(self) -> bytes:
        return super().idle() if self._sequence else self._begin()

    def failure(self, failure: Failure, request_id: str) -> bytes:
        begun = self._begin() if not self._sequence else b""
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        response = failed(self._head, self._output, failure)
        return begun + self._event("error", **told) + self._event("response.failed", response=response)

    def _begin(self) -> bytes:
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def _event(self, kind: str, **told: Json) -> bytes:
        return sse({"type": kind, **told, "sequence_number": self._next()}, kind)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    # ── items ──

    def _turn_to(self, item: _Item) -> bytes:
        """Closes the open item and opens this one, which is the last."""
        closed = self._close(COMPLETED)
        self._open = item
        where = self._where(item)
        opened = self._event(
            "response.output_item.added", output_index=where["output_index"], item=item.json(IN_PROGRESS)
        )
        match item:
            case _Message():
                self._prepare("response.output_text.delta", where, logprobs=[])
                opened += self._event("response.content_part.added", **where, part=item.empty_part())
            case _Reasoning():
                self._prepare("response.reasoning_text.delta", where)
                opened += self._event("response.content_part.added", **where, part=item.empty_part())
            case _Call():
                self._prepare("response.function_call_arguments.delta", where)
        return closed + opened

    def _delta(self, item: _Item, event: Event) -> bytes:
        match event:
            case TextDelta() if event.logprobs:
                told = {"delta": event.text, "logprobs": _logprobs(event.logprobs)}
                return self._event("response.output_text.delta", **self._where(item), **told)
            case TextDelta() | ReasoningDelta():
                return self._piece(event.text)
            case ToolCallDelta() if event.arguments and isinstance(item, _Call) and not item.called.is_custom:
                return self._piece(event.arguments)
        return b""

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        where, whole = self._where(item), item.json(status)
        match item:
            case _Message():
                part = item.part()
                told = {"text": part["text"], "logprobs": part["logprobs"]}
                closed = self._event("response.output_text.done", **where, **told)
                closed += self._event("response.content_part.done", **where, part=part)
            case _Reasoning():
                closed = self._event("response.reasoning_text.done", **where, text=item.part()["text"])
                closed += self._event("response.content_part.done", **where, part=item.part())
            case _Call() if item.called.is_custom:
                # Only a whole JSON text tells what the input is: it comes in one piece.
                closed = self._event("response.custom_tool_call_input.delta", **where, delta=whole["input"])
                closed += self._event("response.custom_tool_call_input.done", **where, input=whole["input"])
            case _Call():
                told = {"name": whole["name"], "arguments": whole["arguments"]}
                closed = self._event("response.function_call_arguments.done", **where, **told)
        return closed + self._event("response.output_item.done", output_index=where["output_index"], item=whole)

    def _where(self, item: _Item) -> dict[str, Json]:
        """`item` is the last one, or the one before it."""
        items = self._output.items
        where: dict[str, Json] = {"item_id": item.id, "output_index": len(items) - (1 if item is items[-1] else 2)}
        return where if isinstance(item, _Call) else {**where, "content_index": 0}

    def _prepare(self, kind: str, where: dict[str, Json], **rest: Json) -> None:
        """The JSON around the pieces of an item is written once: the token path is concatenation."""
        whole = sse({"type": kind, **where, "delta": "\0", **rest, "sequence_number": "\0"}, kind)
        self._before, self._between, self._after = whole.split(_MARKER)

    def _piece(self, text: str) -> bytes:
        number = str(self._next()).encode()
        return self._before + json.dumps(text).encode() + self._between + number + self._after


_MARKER = json.dumps("\0").encode()
