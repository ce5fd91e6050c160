"""Requests and streams as Anthropic publishes them, shape by shape: every field of theirs is understood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from emberkeep.api.anthropic_messages import MessageEnvelope, MessageFrames, MessagesBody
from emberkeep.api.body import parse_body
from emberkeep.types.events import (
    Accepted,
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)

# ── streams ──

START: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_1nZdL29xx5MUA1yADyHTEsnR8uuvGzszyY",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "claude-opus-4-20250514",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 25, "output_tokens": 1},
        },
    }
]


def end(reason: str, tokens: int) -> list[dict[str, Any]]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}},
        {"type": "message_stop"},
    ]


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    opened = {"type": "content_block_start", "index": index, "content_block": start}
    pieces = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    return [
        opened,
        *([{"type": "ping"}] if index == 0 else []),
        *pieces,
        {"type": "content_block_stop", "index": index},
    ]


HELLO = [{"type": "text_delta", "text": "Hello"}, {"type": "text_delta", "text": "!"}]
TEXT = [*START, *block(0, {"type": "text", "text": ""}, *HELLO), *end("end_turn", 15)]
TOOL = [
    *START,
    *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Okay"}),
    *block(
        1,
        {"type": "tool_use", "id": "toolu_01T1x1fJ34qAmk2tNTrN7Up6", "name": "get_weather", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"location":'},
        {"type": "input_json_delta", "partial_json": ' "San Francisco, CA"}'},
    ),
    *end("tool_use", 89),
]
THINKING = [
    *START,
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "27 * 453 = "},
        {"type": "thinking_delta", "thinking": "12231"},
        {"type": "signature_delta", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"},
    ),
    *block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "12231"}),
    *end("end_turn", 15),
]


def events_of(published: list[dict[str, Any]]) -> list[Event]:
    """What a model would have had to do for this stream."""
    events: list[Event] = [Accepted(25)]
    calls = 0
    for event in published:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            start = event["content_block"]
            events.append(ToolCallDelta(0, calls, start["id"], start["name"], ""))
            calls += 1
        match event.get("delta"):
            case {"type": "text_delta", "text": text}:
                events.append(TextDelta(0, text))
            case {"type": "thinking_delta", "thinking": text}:
                events.append(ReasoningDelta(0, text))
            case {"type": "input_json_delta", "partial_json": text} if text:
                events.append(ToolCallDelta(0, calls - 1, None, None, text))
            case {"stop_reason": reason}:
                events.append(Finished(0, FinishReason.TOOL_CALLS if reason == "tool_use" else FinishReason.STOP))
    tokens = published[-2]["usage"]["output_tokens"]
    return [*events, Completed(Usage(25, tokens), Timings(), LookupRecord())]


@pytest.mark.parametrize("published", [TEXT, TOOL, THINKING], ids=["text", "tool", "thinking"])
def test_a_published_stream_is_written_event_by_event(published: list[dict[str, Any]]) -> None:
    frames = MessageFrames(MessageEnvelope("msg_1", "tiny", None, 1024))
    raw = b"".join([*(frames.frame(event) for event in events_of(published)), frames.end()]).decode()
    written = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in written] == [event["type"] for event in published]
    for ours, theirs in zip(written, published, strict=True):
        compare(ours, theirs)


def compare(ours: Any, theirs: Any, path: str = "") -> None:
    """Every field of theirs is there; what it says is the same but for ids, signatures and figures."""
    if isinstance(theirs, dict):
        assert set(theirs) <= set(ours), path
        for name, value in theirs.items():
            compare(ours[name], value, f"{path}.{name}")
    elif not path.endswith((".id", ".model", ".signature", "_tokens")):
        assert ours == theirs, path
    else:
        assert type(ours) is type(theirs), path


# ── requests ──

USER = {"role": "user", "content": "Hello, Claude"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
    },
}
CALL = {
    "type": "tool_use",
    "id": "toolu_01A09q90qw90lq917835lq9",
    "name": "get_weather",
    "input": {"location": "SF"},
}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_01A09q90qw90lq917835lq9", "content": "15 degrees"}
TEXT_RESULT = {**RESULT, "content": [{"type": "text", "text": "15 degrees"}], "is_error": False}
THOUGHT = {
    "type": "thinking",
    "thinking": "The weather...",
    "signature": "BDaL4VrbR2Oj0hO4XpJxT28J5TILnCrrUXoKiiNBZW9P",
}
CACHED = {"type": "text", "text": "A long book.", "cache_control": {"type": "ephemeral"}}
SEARCH_RESULT = {
    "type": "search_result",
    "source": "https://docs.company.com/product-guide",
    "title": "Product Configuration Guide",
    "content": [{"type": "text", "text": "The default timeout is 30 seconds."}],
}
REQUESTS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What are LLMs?"},
        ]
    },
    {"messages": [USER, {"role": "assistant", "content": "The answer is ("}], "max_tokens": 1},
    {"messages": [USER], "system": "You are a seasoned data scientist.", "temperature": 1.0, "top_k": 5},
    {"messages": [USER], "stop_sequences": ["\n\nHuman:"], "metadata": {"user_id": "13803d75-b4b5-4c3e"}},
    {"messages": [USER], "tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {
        "messages": [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}],
        "tools": [WEATHER],
    },
    {
        "messages": [
            USER,
            {"role": "assistant", "content": [THOUGHT, CALL]},
            {"role": "user", "content": [TEXT_RESULT, {"type": "text", "text": "What next?"}]},
        ],
        "tools": [{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "thinking": {"type": "enabled", "budget_tokens": 10000},
        "max_tokens": 16000,
    },
    {"messages": [USER], "system": [{"type": "text", "text": "You analyse books."}, CACHED]},
    {"messages": [USER], "cache_control": {"type": "ephemeral"}},
    {"messages": [{"role": "user", "content": [SEARCH_RESULT, {"type": "text", "text": "What is the timeout?"}]}]},
    {
        "messages": [USER],
        "output_config": {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}, "effort": "low"},
    },
    {"messages": [USER], "thinking": {"type": "adaptive"}, "service_tier": "auto", "stream": True},
]


@pytest.mark.parametrize("published", REQUESTS)
def test_a_published_request_is_understood(published: dict[str, Any]) -> None:
    body = {"model": "claude-opus-4-20250514", "max_tokens": 1024, **published}
    request = parse_body(MessagesBody, json.dumps(body).encode()).to_request()
    assert request.messages[-1].role in ("user", "assistant", "tool")
    assert request.max_tokens == body["max_tokens"]
    assert len(request.tools) == len(published.get("tools", ()))
