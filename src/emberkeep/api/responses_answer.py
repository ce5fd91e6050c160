"""An answer as OpenAI's Responses API gives it: items of output, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import field

from emberkeep.api.answer import BlockFrames, detail_json, timings_json
from emberkeep.api.errors import Failure
from emberkeep.api.kinds import custom_input, seal
from emberkeep.api.openai_answer import chat_logprobs
from emberkeep.api.responses_body import Toolset
from emberkeep.api.responses_items import SEALED, Called, Item, output_id
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
class _Block:
    """A text, reasoning or a call, as far as it is written."""

    id: str
    place: int
    texts: list[str] = field(default_factory=list)
    """A call has its arguments here."""
    part_type = ""
    """What its one part is called; empty: it has no parts."""

    def part(self, *, is_empty: bool = False) -> dict[str, Json]:
        return {"type": self.part_type, "text": "" if is_empty else "".join(self.texts)}

    def json(self, status: str) -> Item:
        raise NotImplementedError

    @property
    def where(self) -> dict[str, Json]:
        where: dict[str, Json] = {"item_id": self.id, "output_index": self.place}
        return {**where, "content_index": 0} if self.part_type else where


@dataclass(slots=True)
class _Message(_Block):
    logprobs: list[TokenLogprob] = field(default_factory=list)
    part_type = "output_text"

    def part(self, *, is_empty: bool = False) -> dict[str, Json]:
        logprobs = [] if is_empty else _logprobs(self.logprobs)
        text = "" if is_empty else "".join(self.texts)
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}

    def json(self, status: str) -> Item:
        content = [self.part()] if status != IN_PROGRESS else []
        return {"id": self.id, "type": "message", "status": status, "content": content, "role": "assistant"}


@dataclass(slots=True)
class _Reasoning(_Block):
    is_sealed: bool = False
    """It is given as `encrypted_content` too."""
    part_type = "reasoning_text"

    def json(self, status: str) -> Item:
        is_done = status != IN_PROGRESS
        item: Item = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
        item["content"] = [self.part()] if is_done else []
        if self.is_sealed:
            item["encrypted_content"] = seal("".join(self.texts), SEALED) if is_done else ""
        return item


@dataclass(slots=True)
class _Call(_Block):
    index: int = 0
    called: Called = Called("")
    call_id: str = ""

    def json(self, status: str) -> Item:
        arguments = "".join(self.texts) if status != IN_PROGRESS else ""
        named: Item = {"call_id": self.call_id, "name": self.called.name}
        if self.called.namespace:
            named["namespace"] = self.called.namespace
        if self.called.is_custom:
            named["input"] = custom_input(arguments)
        else:
            named["arguments"] = arguments
        return {"id": self.id, "type": _call_type(self.called), "status": status, **named}


def _call_type(called: Called) -> str:
    return "custom_tool_call" if called.is_custom else "function_call"


class Output:
    """The items of one answer, made of its events in order."""

    def __init__(self, response_id: str, tools: Toolset, *, seals_reasoning: bool = False) -> None:
        self._id = response_id
        self._tools = tools
        self._seals = seals_reasoning
        self.items: list[_Block] = []
        self.finish = FinishReason.STOP
        self._completed: Completed | None = None
        self._ran: list[CallEnded] = []

    def add(self, event: Event) -> _Block | None:
        """The item that the event adds to, which may be a new one. None: it says nothing."""
        last = self.items[-1] if self.items else None
        match event:
            case TextDelta():
                if not (event.text or event.logprobs):
                    return None
                message = last if isinstance(last, _Message) else _Message(*self._next("message"))
                message.texts.append(event.text)
                message.logprobs.extend(event.logprobs)
                return self._at_its_place(message)
            case ReasoningDelta():
                if not event.text:
                    return None
                where = self._next("reasoning")
                reasoning = last if isinstance(last, _Reasoning) else _Reasoning(*where, is_sealed=self._seals)
                reasoning.texts.append(event.text)
                return self._at_its_place(reasoning)
            case ToolCallDelta():
                is_same = isinstance(last, _Call) and last.index == event.call_index
                call = last if is_same and last else self._new_call(event)
                call.texts.append(event.arguments)
                return self._at_its_place(call)
            case Finished():
                self.finish = event.reason
                if not self.items:  # clients expect a message, even where the model has said nothing
                    return self._at_its_place(_Message(*self._next("message")))
            case Completed():
                self._completed = event
            case CallEnded():
                self._ran.append(event)
        return None

    def json(self, status: str) -> list[Item]:
        """With the status of the last one; those before it are complete."""
        last = len(self.items) - 1
        return [item.json(status if item.place == last else COMPLETED) for item in self.items]

    @property
    def status(self) -> str:
        """The status of the answer, and so of its last item."""
        return INCOMPLETE if self.finish is FinishReason.LENGTH else COMPLETED

    def finished(self, head: dict[str, Json], conversation_id: str | None) -> dict[str, Json]:
        """The whole response, after Completed."""
        assert self._completed is not None
        reason = {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None
        detail = detail_json(self._completed, conversation_id, self._ran)
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

    def _new_call(self, event: ToolCallDelta) -> _Call:
        called = self._tools.as_called(event.name or "")
        where = self._next(_call_type(called))
        return _Call(*where, index=event.call_index, called=called, call_id=event.id or "")

    def _at_its_place(self, item: _Block) -> _Block:
        """`item`, which is among the items from now on."""
        if item.place == len(self.items):
            self.items.append(item)
        return item

    def _next(self, kind: str) -> tuple[str, int]:
        """The id and the place of a new item."""
        return output_id(self._id, kind, len(self.items)), len(self.items)


def failed(head: dict[str, Json], output: Output, failure: Failure) -> dict[str, Json]:
    """The response with what there is of an answer that failed."""
    error = {"code": _error_code(failure), "message": failure.message}
    return head | {"status": "failed", "error": error, "output": output.json(INCOMPLETE)}


def cancelled(head: dict[str, Json], output: Output) -> dict[str, Json]:
    return head | {"status": "cancelled", "output": output.json(INCOMPLETE)}


def _error_code(failure: Failure) -> str:
    """One of those few that OpenAI has for responses; Codex looks for the first."""
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
    logprobs: Json = chat_logprobs(tokens)
    return list(logprobs["content"]) if logprobs else []


# ── as a stream ──


class ResponseFrames(BlockFrames):
    """One event after the other, each with its number."""

    def __init__(self, head: dict[str, Json], output: Output, conversation_id: str | None) -> None:
        """`output` is this stream's own."""
        super().__init__()
        self._head = head
        self._output = output
        self._conversation_id = conversation_id
        self._sequence = 0
        self._open: _Block | None = None

    def frame(self, event: Event) -> bytes:
        begun = self._begin()
        item = self._output.add(event)
        if item is not None and item is not self._open:
            begun += self._close(COMPLETED) + self._start(item)
        if isinstance(event, Finished):
            return begun + self._close(self._output.status)
        return begun + self._delta(item, event) if item is not None else begun

    def end(self) -> bytes:
        response = self._output.finished(self._head, self._conversation_id)
        return self._event(f"response.{response['status']}", response=response)

    def idle(self) -> bytes:
        return self._begin() or super().idle()

    def failure(self, failure: Failure, request_id: str) -> bytes:
        begun, response = self._begin(), failed(self._head, self._output, failure)
        error = self._event("error", code=failure.code, message=failure.message, param=failure.param)
        return begun + error + self._event("response.failed", response=response)

    def _beginning(self) -> bytes:
        created = self._event("response.created", response=self._head)
        return created + self._event("response.in_progress", response=self._head)

    def _event(self, kind: str, **fields: Json) -> bytes:
        return super()._event(kind, **fields, sequence_number=self._next())

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    # ── items ──

    def _start(self, item: _Block) -> bytes:
        """Opens it."""
        self._open, where = item, item.where
        logprobs: dict[str, Json] = {"logprobs": []} if isinstance(item, _Message) else {}
        self._open_delta(_name(item, "delta"), **where, delta="\0", **logprobs, sequence_number="\0")
        added = self._event("response.output_item.added", output_index=item.place, item=item.json(IN_PROGRESS))
        if not item.part_type:
            return added
        return added + self._event("response.content_part.added", **where, part=item.part(is_empty=True))

    def _delta(self, item: _Block, event: Event) -> bytes:
        match event:
            case TextDelta() if event.logprobs:
                fields = {"delta": event.text, "logprobs": _logprobs(event.logprobs)}
                return self._event("response.output_text.delta", **item.where, **fields)
            case TextDelta() | ReasoningDelta():
                return self._piece(event.text)
            case ToolCallDelta() if event.arguments and isinstance(item, _Call) and not item.called.is_custom:
                return self._piece(event.arguments)
        return b""

    def _piece(self, text: str) -> bytes:
        before, between, after = self._around
        return before + json.dumps(text).encode() + between + str(self._next()).encode() + after

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        whole, part = item.json(status), item.part()
        match item:
            case _Message():
                fields = {"text": part["text"], "logprobs": part["logprobs"]}
            case _Call() if item.called.is_custom:
                fields = {"input": whole["input"]}
            case _Call():
                fields = {"name": whole["name"], "arguments": whole["arguments"]}
            case _:
                fields = {"text": part["text"]}
        closed = b""
        if isinstance(item, _Call) and item.called.is_custom:
            # Only a whole JSON text tells what the input is: it comes in one piece.
            closed = self._event(_name(item, "delta"), **item.where, delta=whole["input"])
        closed += self._event(_name(item, "done"), **item.where, **fields)
        if item.part_type:
            closed += self._event("response.content_part.done", **item.where, part=part)
        return closed + self._event("response.output_item.done", output_index=item.place, item=whole)


def _name(item: _Block, ending: str) -> str:
    """The name of an event that is about what the item says."""
    if isinstance(item, _Call):
        kind = "custom_tool_call_input" if item.called.is_custom else "function_call_arguments"
        return f"response.{kind}.{ending}"
    return f"response.{item.part_type}.{ending}"
