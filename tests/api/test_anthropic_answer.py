"""Answers as Anthropic's Messages have them: events in their order, and messages at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from emberkeep.api.answer import Answer
from emberkeep.api.anthropic_blocks import pack_reasoning, signature_of
from emberkeep.api.anthropic_messages import MessageEnvelope, MessageFrames, message_json, usage_json
from emberkeep.api.errors import Failure
from emberkeep.types.events import (
    Accepted,
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    Marked,
    Progress,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    ToolOutcome,
    Usage,
)
from emberkeep.types.request import ToolCall

ENVELOPE = MessageEnvelope("msg_1", "tiny", None, max_tokens=16)
USAGE = Usage(prompt_tokens=100, completion_tokens=16, cached_tokens=40, reasoning_tokens=3, marked=Marked(90, 60))
COMPLETED = Completed(USAGE, Timings(), LookupRecord())
STOP = Finished(0, FinishReason.STOP)


def streamed(*events: Event, envelope: MessageEnvelope = ENVELOPE) -> list[dict[str, Any]]:
    frames = MessageFrames(envelope)
    return parsed(b"".join([*(frames.frame(event) for event in (*events, COMPLETED)), frames.end()]))


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """The events; the name of each is its type."""
    events = []
    for frame in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def whole(*events: Event, envelope: MessageEnvelope = ENVELOPE) -> dict[str, Any]:
    answer = Answer(1)
    answer.add([*events, COMPLETED])
    return message_json(answer, envelope)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


# ── order ──


def test_a_text_comes_in_the_order_that_clients_expect() -> None:
    events = streamed(Accepted(100), TextDelta(0, "Hel"), TextDelta(0, "lo"), STOP)
    assert kinds(events) == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, block, _, first, second, stop, delta, _ = events
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"] | {"usage": None} == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": None,
    }
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert first == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}
    assert second["delta"] == {"type": "text_delta", "text": "lo"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    events = streamed(
        ReasoningDelta(0, "It may "),
        ReasoningDelta(0, "rain."),
        TextDelta(0, "Let me see."),
        ToolCallDelta(0, 0, "call_1", "get_weather", ""),
        ToolCallDelta(0, 0, None, None, '{"city": '),
        ToolCallDelta(0, 0, None, None, '"Oslo"}'),
        ToolCallDelta(0, 1, "call_2", "get_time", "{}"),
        Finished(0, FinishReason.TOOL_CALLS),
    )
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "get_time", "input": {}},
    ]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "It may "}),
        (0, {"type": "thinking_delta", "thinking": "rain."}),
        (0, {"type": "signature_delta", "signature": signature_of("It may rain.")}),
        (1, {"type": "text_delta", "text": "Let me see."}),
        (2, {"type": "input_json_delta", "partial_json": ""}),
        (2, {"type": "input_json_delta", "partial_json": '{"city": '}),
        (2, {"type": "input_json_delta", "partial_json": '"Oslo"}'}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_that_is_not_to_be_shown_leaves_its_signature() -> None:
    envelope = replace(ENVELOPE, omits_thinking=True)
    said = (ReasoningDelta(0, "It may "), ReasoningDelta(0, "rain."), TextDelta(0, "Rain."), STOP)
    events = streamed(*said, envelope=envelope)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert deltas[0] == {"type": "signature_delta", "signature": pack_reasoning("It may rain.")}
    assert whole(*said, envelope=envelope)["content"][0] == {
        "type": "thinking",
        "thinking": "",
        "signature": pack_reasoning("It may rain."),
    }


def test_an_answer_without_a_word_has_no_block() -> None:
    assert kinds(streamed(TextDelta(0, ""), STOP)) == ["message_start", "message_delta", "message_stop"]


def test_silence_is_filled_with_pings_after_the_beginning() -> None:
    frames = MessageFrames(ENVELOPE)
    assert kinds(parsed(frames.idle())) == ["message_start", "ping"]
    assert kinds(parsed(frames.idle())) == ["ping"]
    assert kinds(parsed(frames.frame(TextDelta(0, "x"))))[0] == "content_block_start"


def test_tools_that_run_here_are_told_in_pings() -> None:
    call = ToolCall("call_1", "search_memory", "{}")
    events = streamed(CallStarted(call), CallEnded(ToolOutcome(call, "nothing")), TextDelta(0, "x"), STOP)
    told = [
        event["emberkeep"]["tool"]["state"] for event in events if "emberkeep" in event and "delta" not in event
    ]
    assert told == ["started", "done"]
    assert kinds(events)[:3] == ["message_start", "ping", "ping"]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    frames = MessageFrames(ENVELOPE)
    (event,) = parsed(frames.failure(Failure(503, "overloaded", "Try again."), "req_1"))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "Try again."},
        "request_id": "req_1",
    }


@pytest.mark.parametrize("text", ["\u2028", 'a "quoted" line\n', "\0", "☂"])
def test_any_text_comes_through(text: str) -> None:
    events = streamed(TextDelta(0, "x"), TextDelta(0, text), STOP)
    assert events[4]["delta"]["text"] == text


# ── at once ──


def test_a_message_at_once_has_what_the_stream_has() -> None:
    message = whole(
        ReasoningDelta(0, "Rain?"),
        TextDelta(0, "Let me "),
        TextDelta(0, "see."),
        ToolCallDelta(0, 0, "call_1", "get_weather", '{"city": "Oslo"}'),
        Finished(0, FinishReason.TOOL_CALLS),
    )
    assert message["content"] == [
        {"type": "thinking", "thinking": "Rain?", "signature": signature_of("Rain?")},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo"}},
    ]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    assert message["usage"] == usage_json(USAGE)
    assert message["emberkeep"]["reason"] == "new"


@pytest.mark.parametrize("arguments", ["", '{"city": "Os', "[1]", "null"])
def test_arguments_that_are_no_object_are_none(arguments: str) -> None:
    message = whole(ToolCallDelta(0, 0, "call_1", "f", arguments), Finished(0, FinishReason.LENGTH))
    assert message["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("finished", "tokens", "reason", "sequence"),
    [
        (Finished(0, FinishReason.STOP), 3, "end_turn", None),
        (Finished(0, FinishReason.STOP, "END"), 3, "stop_sequence", "END"),
        (Finished(0, FinishReason.LENGTH), 16, "max_tokens", None),
        (Finished(0, FinishReason.LENGTH), 3, "model_context_window_exceeded", None),
        (Finished(0, FinishReason.LENGTH), 0, "max_tokens", None),
        (Finished(0, FinishReason.TOOL_CALLS, "END"), 3, "tool_use", None),
    ],
)
def test_why_an_answer_ended(finished: Finished, tokens: int, reason: str, sequence: str | None) -> None:
    completed = replace(COMPLETED, usage=replace(USAGE, completion_tokens=tokens))
    answer, frames = Answer(1), MessageFrames(ENVELOPE)
    answer.add([finished, completed])
    told = message_json(answer, ENVELOPE)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    delta = parsed(frames.frame(finished) + frames.frame(completed) + frames.end())[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


# ── usage ──


@pytest.mark.parametrize(
    ("cached", "marked", "read", "created", "for_5m", "for_1h", "rest"),
    [
        (0, Marked(), 0, 0, 0, 0, 100),
        (40, Marked(), 40, 0, 0, 0, 60),
        (0, Marked(90), 0, 90, 90, 0, 10),
        (40, Marked(90, 60), 40, 50, 30, 20, 10),
        (70, Marked(90, 60), 70, 20, 20, 0, 10),
        (99, Marked(90, 60), 99, 0, 0, 0, 1),
    ],
)
def test_every_token_of_the_prompt_is_counted_once(
    cached: int, marked: Marked, read: int, created: int, for_5m: int, for_1h: int, rest: int
) -> None:
    usage = usage_json(Usage(100, 5, cached, 2, marked=marked))
    assert usage == {
        "input_tokens": rest,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": for_5m, "ephemeral_1h_input_tokens": for_1h},
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
        "service_tier": "standard",
    }


def test_a_stream_begins_with_what_is_known_and_ends_with_what_it_cost() -> None:
    progress = Progress(total=100, cached=40, processed=40, elapsed_ms=1.0, marked=Marked(90, 60))
    events = streamed(Accepted(100), progress, TextDelta(0, "x"), STOP)
    assert events[0]["message"]["usage"] == usage_json(replace(USAGE, completion_tokens=0, reasoning_tokens=0))
    assert events[-2]["usage"] == usage_json(USAGE)
