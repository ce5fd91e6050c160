"""Answers of the Responses API: every event by its name, in OpenAI's order, and the response at the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai._models import validate_type
from openai.types.responses import Response, ResponseStreamEvent

from emberkeep.api.body import validate
from emberkeep.api.errors import Failure
from emberkeep.api.kinds import unseal
from emberkeep.api.responses_answer import Output, ResponseFrames
from emberkeep.api.responses_body import ResponseBody, response_head
from emberkeep.api.responses_items import SEALED
from emberkeep.types.events import (
    Accepted,
    CallEnded,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolOutcome,
)
from emberkeep.types.request import ToolCall
from helpers.scripted_server import COMPLETED

ID = "resp_" + "0" * 32
TOOLS = [
    {"type": "function", "name": "look", "parameters": {}, "strict": False},
    {"type": "custom", "name": "run"},
    {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "find"}]},
]
STOP, LENGTH = Finished(0, FinishReason.STOP), Finished(0, FinishReason.LENGTH)


def frames(**fields: Any) -> ResponseFrames:
    body = validate(ResponseBody, {"input": "x", "tools": TOOLS, **fields})
    head = response_head(body, ID, 5, "tiny", is_stored=True)
    output = Output(ID, body.toolset, seals_reasoning=body.wants_encrypted_reasoning)
    return ResponseFrames(head, output, None)


def read(raw: bytes) -> list[dict[str, Any]]:
    """Events, each with a name that is its type."""
    told = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        told.append(event)
    return told


def play(*events: Event, **fields: Any) -> list[dict[str, Any]]:
    written = frames(**fields)
    told = read(b"".join(written.frame(event) for event in (*events, COMPLETED)) + written.end())
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        validate_type(type_=ResponseStreamEvent, value=event)
    validate_type(type_=Response, value=told[-1]["response"])
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


TEXT_EVENTS = ["output_text.done", "content_part.done", "output_item.done"]
REASONING_EVENTS = ["reasoning_text.done", "content_part.done", "output_item.done"]


def test_a_text_has_openais_events_in_openais_order() -> None:
    told = play(TextDelta(0, "Hi"), TextDelta(0, " there"), STOP)
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds(told) == [*begin, "output_text.delta", "output_text.delta", *TEXT_EVENTS, "completed"]
    added, part, first, second, done, part_done, item_done, end = told[2:]
    assert added["item"] == {
        "id": added["item"]["id"],
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    where = {"item_id": added["item"]["id"], "output_index": 0, "content_index": 0}
    for event in (part, first, second, done, part_done):
        assert {name: event[name] for name in where} == where
    assert (first["delta"], second["delta"], done["text"]) == ("Hi", " there", "Hi there")
    assert part_done["part"]["text"] == "Hi there"
    assert item_done["item"]["status"] == "completed"
    assert end["response"]["output"] == [item_done["item"]]


def test_the_beginning_is_sent_as_soon_as_the_request_is_accepted() -> None:
    assert kinds(read(frames().frame(Accepted(5)))) == ["created", "in_progress"]


def test_silence_is_filled_with_the_beginning_and_then_with_comments() -> None:
    written = frames()
    assert kinds(read(written.idle())) == ["created", "in_progress"]
    assert written.idle().startswith(b":")
    assert kinds(read(written.frame(TextDelta(0, "x"))))[0] == "output_item.added"


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    call = [
        ToolCallDelta(0, 0, "call_1", "look", ""),
        ToolCallDelta(0, 0, None, None, '{"a"'),
        ToolCallDelta(0, 0, None, None, ":1}"),
    ]
    second = ToolCallDelta(0, 1, "call_2", "crm__find", "{}")
    told = play(ReasoningDelta(0, "Hm"), TextDelta(0, "So"), *call, second, Finished(0, FinishReason.TOOL_CALLS))
    assert kinds(told) == [
        *["created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"],
        *REASONING_EVENTS,
        *["output_item.added", "content_part.added", "output_text.delta", *TEXT_EVENTS],
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"],
        *["function_call_arguments.done", "output_item.done"],
        *[
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ],
        "completed",
    ]
    reasoning, message, first, other = told[-1]["response"]["output"]
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "Hm"}])
    assert message["content"][0]["text"] == "So"
    assert first == {
        "id": first["id"],
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "look",
        "arguments": '{"a":1}',
    }
    assert (other["name"], other["namespace"], other["call_id"]) == ("find", "crm", "call_2")
    assert [event["output_index"] for event in told if event["type"] == "response.output_item.done"] == [
        0,
        1,
        2,
        3,
    ]
    assert len({item["id"] for item in told[-1]["response"]["output"]}) == 4


def test_a_custom_tool_gets_its_text() -> None:
    told = play(
        ToolCallDelta(0, 0, "call_1", "run", '{"input": "ls '), ToolCallDelta(0, 0, None, None, '-l"}'), STOP
    )
    named = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds(told)[3:5] == named
    assert (told[3]["delta"], told[4]["input"]) == ("ls -l", "ls -l")
    item = told[-1]["response"]["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", "ls -l")


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    told = play(TextDelta(0, "Hi"), LENGTH)
    response = told[-1]["response"]
    assert told[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    response = play(STOP)[-1]["response"]
    assert [part["text"] for item in response["output"] for part in item["content"]] == [""]


def test_usage_and_what_was_reused_are_told() -> None:
    response = play(TextDelta(0, "Hi"), STOP)[-1]["response"]
    assert response["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 15,
    }
    assert response["emberkeep"]["reused"] == {"hot": 1, "warm": 2, "cold": 5, "remote": 0}
    assert response["timings"]["prompt_n"] == 4


def test_reasoning_is_sealed_for_clients_that_ask() -> None:
    told = play(ReasoningDelta(0, "Hm"), STOP, include=["reasoning.encrypted_content"])
    assert unseal(told[-1]["response"]["output"][0]["encrypted_content"], SEALED) == "Hm"
    assert "encrypted_content" not in play(ReasoningDelta(0, "Hm"), STOP)[-1]["response"]["output"][0]


def test_log_probabilities_ride_on_deltas_and_on_the_part() -> None:
    token = TokenLogprob(1, b"Hi", -0.5, (TokenLogprob(2, b"Ho", -1.5),))
    told = play(TextDelta(0, "Hi", (token,)), STOP)
    delta = next(event for event in told if event["type"] == "response.output_text.delta")
    expected = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    assert {name: delta["logprobs"][0][name] for name in expected} == expected
    assert delta["logprobs"][0]["top_logprobs"][0]["token"] == "Ho"
    assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == delta["logprobs"]


def test_tools_that_ran_here_are_told_beside_the_answer() -> None:
    outcome = ToolOutcome(ToolCall("call_1", "clock", "{}"), "noon")
    response = play(CallEnded(outcome), TextDelta(0, "Noon."), STOP)[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["emberkeep"]["tools"][0]["result"] == "noon"


def test_a_tool_that_was_left_out_is_told() -> None:
    tools = [{"type": "web_search", "external_web_access": False}]
    assert play(TextDelta(0, "x"), STOP, tools=tools)[-1]["response"]["emberkeep"]["left_out"] == ["web_search"]


@pytest.mark.parametrize(
    ("status", "code", "told_code"),
    [
        (500, None, "server_error"),
        (400, "context_length_exceeded", "context_length_exceeded"),
        (429, "rate_limit_exceeded", "rate_limit_exceeded"),
        (400, None, "invalid_prompt"),
    ],
)
def test_a_stream_that_fails_says_so_twice(status: int, code: str | None, told_code: str) -> None:
    written = frames()
    begun = written.frame(TextDelta(0, "Hi"))
    told = read(begun + written.failure(Failure(status, "t", "It broke.", code, "input"), "req_1"))
    error, last = told[-2:]
    assert (error["type"], error["message"], error["code"], error["param"]) == (
        "error",
        "It broke.",
        code,
        "input",
    )
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": told_code, "message": "It broke."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hi"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
