"""Events gathered into one JSON answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from emberkeep.server.wire.cost import detail_json, timings_json, tool_json, usage_json
from emberkeep.server.wire.envelope import Envelope
from emberkeep.server.wire.logprobs import chat_logprobs, text_logprobs
from emberkeep.types import (
    CallEnded,
    Completed,
    Event,
    Finished,
    FinishReason,
    Json,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    merge_usage,
)


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, delta: ToolCallDelta) -> None:
        self.id = delta.id or self.id
        self.name = delta.name or self.name
        self.arguments += delta.arguments

    def json(self) -> dict[str, Json]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _Choice:
    text: str = ""
    reasoning: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs_start: int = 0
    """Characters of `text` before the first token with a log probability: an echoed prompt has none."""
    finish: FinishReason | None = None

    def add_text(self, delta: TextDelta) -> None:
        if not self.logprobs:
            self.logprobs_start = len(self.text)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)

    def message(self) -> dict[str, Json]:
        message: dict[str, Json] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.json() for _, call in sorted(self.calls.items())]
        return message


class Answer:
    """All events of one HTTP request, in order of arrival."""

    def __init__(self, choices: int) -> None:
        self._choices = [_Choice() for _ in range(choices)]
        self._completed: list[Completed] = []
        self._called: list[CallEnded] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self._choices[event.index].add_text(event)
                case ReasoningDelta():
                    self._choices[event.index].reasoning += event.text
                case ToolCallDelta():
                    self._choices[event.index].calls.setdefault(event.call_index, _Call()).add(event)
                case Finished():
                    self._choices[event.index].finish = event.reason
                case Completed():
                    self._completed.append(event)
                case CallEnded():
                    self._called.append(event)

    def chat_json(self, envelope: Envelope) -> dict[str, Json]:
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._wrapped(envelope, "chat.completion", choices)

    def text_json(self, envelope: Envelope) -> dict[str, Json]:
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": text_logprobs(choice.logprobs, choice.logprobs_start),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._wrapped(envelope, "text_completion", choices)

    def _wrapped(self, envelope: Envelope, kind: str, choices: list[dict[str, Json]]) -> dict[str, Json]:
        completed = merge_usage(self._completed)
        return envelope.head(kind) | {
            "choices": choices,
            "usage": usage_json(completed.usage),
            "timings": timings_json(completed.timings),
            "emberkeep": self._detail(completed, envelope.conversation_id),
        }

    def _detail(self, completed: Completed, conversation_id: str | None) -> dict[str, Json]:
        told = detail_json(completed, conversation_id)
        return {**told, "tools": [tool_json(event)["tool"] for event in self._called]} if self._called else told
