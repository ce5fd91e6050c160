"""OpenAI's published examples, replayed: the requests of its reference are accepted, and what comes back has every
field, and every event of a stream, that the reference shows for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from emberkeep.types.events import Finished, FinishReason, ReasoningDelta, ToolCallDelta
from helpers.scripted_server import COMPLETED, ScriptedBackend, says

WEATHER = {
    "type": "function",
    "name": "get_current_weather",
    "description": "Get the current weather in a given location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location", "unit"],
    },
}
TEXT = {"model": "default", "input": "Tell me a three sentence bedtime story about a unicorn."}
IMAGE = {
    "model": "default",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "what is in this image?"},
                {"type": "input_image", "image_url": "https://example.com/boardwalk.jpg"},
            ],
        }
    ],
}
STREAM = {"model": "default", "instructions": "You are a helpful assistant.", "input": "Hello!", "stream": True}
FUNCTIONS = {
    "model": "default",
    "input": "What is the weather like in Boston today?",
    "tools": [WEATHER],
    "tool_choice": "auto",
}
REASONING = {
    "model": "default",
    "input": "How much wood would a woodchuck chuck?",
    "reasoning": {"effort": "high"},
}
HOSTED = {
    "web_search_preview": {"tools": [{"type": "web_search_preview"}]},
    "file_search": {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 20}]},
}

RESPONSE_FIELDS = {
    *("id", "object", "created_at", "status", "completed_at", "error", "incomplete_details", "instructions"),
    *("max_output_tokens", "model", "output", "parallel_tool_calls", "previous_response_id", "reasoning", "store"),
    *("temperature", "text", "tool_choice", "tools", "top_p", "truncation", "usage", "user", "metadata"),
}
EVENT_FIELDS = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.content_part.added": {"item_id", "output_index", "content_index", "part"},
    "response.output_text.delta": {"item_id", "output_index", "content_index", "delta"},
    "response.output_text.done": {"item_id", "output_index", "content_index", "text"},
    "response.content_part.done": {"item_id", "output_index", "content_index", "part"},
    "response.output_item.done": {"output_index", "item"},
    "response.completed": {"response"},
}
"""In the order of the reference's stream."""


def ask(http: httpx.Client, body: dict[str, Any]) -> Any:
    answered = http.post("/v1/responses", json=body)
    assert answered.status_code == 200, answered.text
    return answered.json()


@pytest.mark.parametrize("body", [TEXT, IMAGE, FUNCTIONS, REASONING])
def test_a_response_has_every_field_of_the_reference(
    http: httpx.Client, backend: ScriptedBackend, body: dict[str, Any]
) -> None:
    told = ask(http, body)
    assert set(told) >= RESPONSE_FIELDS
    assert told["usage"].keys() >= {"input_tokens", "input_tokens_details", "output_tokens", "total_tokens"}
    assert told["output"][0].keys() >= {"type", "id", "status", "role", "content"}
    assert told["output"][0]["content"][0].keys() >= {"type", "text", "annotations"}
    assert told["text"] == {"format": {"type": "text"}, "verbosity": None}


def test_a_stream_has_every_event_of_the_reference_in_its_order(
    http: httpx.Client, backend: ScriptedBackend
) -> None:
    lines = http.post("/v1/responses", json=STREAM).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds == list(EVENT_FIELDS)
    for event in events:
        assert event.keys() >= EVENT_FIELDS[event["type"]] | {"type", "sequence_number"}
    assert set(events[-1]["response"]) >= RESPONSE_FIELDS


def test_a_function_call_has_every_field_of_the_reference(http: httpx.Client, backend: ScriptedBackend) -> None:
    arguments = '{"location":"Boston, MA","unit":"celsius"}'
    backend.reset(
        ToolCallDelta(0, 0, "call_1", "get_current_weather", arguments),
        Finished(0, FinishReason.TOOL_CALLS),
        COMPLETED,
    )
    told = ask(http, FUNCTIONS)
    [call] = told["output"]
    assert call.pop("id").startswith("fc_")
    expected = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "get_current_weather",
        "arguments": arguments,
    }
    assert call == expected | {"status": "completed"}
    assert told["tools"] == [WEATHER | {"strict": None}]


def test_reasoning_is_an_item_before_the_message(http: httpx.Client, backend: ScriptedBackend) -> None:
    backend.reset(ReasoningDelta(0, "Hm."), *says("Much."))
    told = ask(http, REASONING)
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    assert told["reasoning"] == {"effort": "high", "summary": None}
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.parametrize("kind", HOSTED)
def test_the_examples_with_hosted_tools_are_refused_by_name(http: httpx.Client, kind: str) -> None:
    refused = http.post("/v1/responses", json=TEXT | HOSTED[kind])
    assert refused.status_code == 400 and f"'{kind}' runs at OpenAI only" in refused.json()["error"]["message"]
