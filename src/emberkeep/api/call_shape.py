"""Calls as chat completions write them: tool calls, with a text for custom tools, or the older function call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from emberkeep.api.tools import call_json, custom_input
from emberkeep.types.events import FinishReason, ToolCallDelta
from emberkeep.types.request import Json, ToolCall
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class CallShape:
    custom: frozenset[str] = frozenset()
    """Names of the tools that take a text."""
    is_legacy: bool = False
    """The client sent `functions`: an answer has one `function_call`."""

    def in_message(self, calls: Sequence[ToolCall]) -> dict[str, Json]:
        """Of one call or more."""
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
        told = self.rest(event.index) if event.name is not None else []
        if event.name in self.shape.custom:
            self._held[event.index] = event.call_index, event.added_to(None)
        elif event.index in self._held and event.name is None:
            number, call = self._held[event.index]
            self._held[event.index] = number, event.added_to(call)
        else:
            told.append({"tool_calls": [_call_delta(event)]})
        return told

    def rest(self, index: int) -> list[Json]:
        """What is still to be told of a choice that goes on with something else, or ends."""
        if index not in self._held:
            return []
        number, call = self._held.pop(index)
        return [{"tool_calls": [{"index": number, **custom_json(call)}]}]


def _function(event: ToolCallDelta) -> dict[str, Json]:
    return (
        {"arguments": event.arguments}
        if event.name is None
        else {"name": event.name, "arguments": event.arguments}
    )


def _call_delta(event: ToolCallDelta) -> dict[str, Json]:
    function = {"arguments": event.arguments}
    if event.id is None and event.name is None:
        return {"index": event.call_index, "function": function}
    function = {"name": event.name or "", **function}
    return {"index": event.call_index, "id": event.id, "type": "function", "function": function}
