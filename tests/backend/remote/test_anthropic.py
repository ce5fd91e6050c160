"""What only Anthropic has: blocks, signed thinking, marks of its prompt cache. The rest is in the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from emberkeep.backend.remote.anthropic import AnthropicProvider
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types.events import Completed, Event, Finished, FinishReason, Marked, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolCall, ToolChoice, Ttl
from helpers.vendors.anthropic_server import (
    KEY,
    MODELS,
    AnthropicServer,
    answer,
    begun,
    ended,
    redacted_block,
    said,
    text_block,
    thinking_block,
    tool_block,
)
from helpers.vendors.loopback import Stream
from helpers.vendors.wires import HELLO, asking, drive

pytestmark = pytest.mark.slow

REMOTE = RemoteModel("claude", "anthropic", MODELS[0], api_key_env="ANTHROPIC_API_KEY")
WEATHER = Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}})
CALLED = Message("assistant", tool_calls=(ToolCall("toolu_1", "weather", '{"place": "Lyon"}'),))
ANSWERED = Message("tool", "rain", tool_call_id="toolu_1")


def ask(server: AnthropicServer, *requests: Request) -> list[Event]:
    """The events of the last of them."""

    def open_at(url: str) -> AnthropicProvider:
        return AnthropicProvider(replace(REMOTE, base_url=url), KEY)

    return drive(lambda: server, open_at, asking(*requests))  # type: ignore[no-any-return]


def sent(request: Request) -> Any:
    server = AnthropicServer()
    ask(server, request)
    return server.asked[-1].body


def test_cached_tokens_are_part_of_the_prompt() -> None:
    counts = {
        "input_tokens": 3,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 20,
        "cache_creation": {"ephemeral_1h_input_tokens": 15, "ephemeral_5m_input_tokens": 5},
        "output_tokens_details": {"thinking_tokens": 4},
    }
    events = ask(AnthropicServer(Stream(answer(text_block(0, "x"), usage=counts))), HELLO)
    assert isinstance(events[-1], Completed)
    assert events[-1].usage == Usage(123, 7, 100, 4, marked=Marked(120, 115))


def test_how_an_answer_ended_is_passed_on() -> None:
    stopped = [*begun(), *text_block(0, "x"), *ended(stop="stop_sequence", stop_sequence="END")]
    assert Finished(0, FinishReason.STOP, "END") in ask(AnthropicServer(Stream(stopped)), HELLO)
    with pytest.raises(RequestError, match="declined"):
        ask(AnthropicServer(Stream([*begun(), *ended(stop="refusal")])), HELLO)


def test_tool_calls_come_in_pieces_and_without_arguments_as_an_empty_object() -> None:
    blocks = [
        text_block(0, "Let me see."),
        tool_block(1, "toolu_1", "weather", '{"pla', 'ce": "Lyon"}'),
        tool_block(2, "toolu_2", "now"),
    ]
    events = ask(AnthropicServer(Stream(answer(*blocks, stop="tool_use"))), HELLO)
    assert events[1:-1] == [
        ToolCallDelta(0, 0, "toolu_1", "weather", ""),
        ToolCallDelta(0, 0, None, None, '{"pla'),
        ToolCallDelta(0, 0, None, None, 'ce": "Lyon"}'),
        ToolCallDelta(0, 1, "toolu_2", "now", ""),
        ToolCallDelta(0, 1, None, None, "{}"),
        Finished(0, FinishReason.TOOL_CALLS),
    ]


def test_thinking_is_reasoning_and_goes_back_signed_with_its_call() -> None:
    blocks = [
        thinking_block(0, "Where?", "signed"),
        redacted_block(1, "secret"),
        tool_block(2, "toolu_1", "weather", '{"place": "Lyon"}'),
    ]
    server = AnthropicServer(Stream(answer(*blocks, stop="tool_use")), said("It rains."))
    followed = replace(HELLO, messages=(*HELLO.messages, replace(CALLED, reasoning="Where?"), ANSWERED))
    ask(server, HELLO, followed)
    assert server.asked[-1].body["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Where?", "signature": "signed"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Lyon"}},
    ]
    unsigned = sent(followed)["messages"][1]["content"]
    assert [block["type"] for block in unsigned] == ["tool_use"]


@pytest.mark.parametrize(
    ("wanted", "thinking"),
    [({}, None), ({"enable_thinking": True}, "adaptive"), ({"enable_thinking": False}, "disabled")],
)
def test_a_request_can_say_whether_to_think(wanted: dict[str, bool], thinking: str | None) -> None:
    assert sent(replace(HELLO, template_args=wanted)).get("thinking", {}).get("type") == thinking


def test_only_what_was_chosen_is_sent() -> None:
    body = sent(HELLO)
    assert set(body) == {"model", "max_tokens", "messages", "stream"}
    assert body["max_tokens"] == 4096
    chosen = sent(replace(HELLO, sampling=Sampling(temperature=0, top_k=5, seed=3), stop=("END",), max_tokens=9))
    assert (chosen["temperature"], chosen["top_k"], chosen["max_tokens"]) == (0, 5, 9)
    assert chosen["stop_sequences"] == ["END"]
    assert "seed" not in chosen and "top_p" not in chosen


def test_the_first_system_messages_are_the_system_and_later_ones_are_marked() -> None:
    messages = (
        Message("system", "Be kind."),
        Message("developer", "Be brief."),
        Message("user", "Hello?"),
        Message("system", "It is late."),
    )
    body = sent(Request(messages=messages, use_cache=False))
    assert [block["text"] for block in body["system"]] == ["Be kind.", "Be brief."]
    assert [block["text"] for block in body["messages"][0]["content"]] == [
        "Hello?",
        "<system>\nIt is late.\n</system>",
    ]


def test_roles_take_turns_and_results_stand_first() -> None:
    two = Message(
        "assistant", "Both.", tool_calls=(ToolCall("a.1", "weather", "{}"), ToolCall("b", "weather", "not json"))
    )
    messages = (
        Message("user", "Hello?"),
        Message("user", "Hello?"),
        two,
        Message("user", "Hurry."),
        Message("tool", "rain", tool_call_id="a.1"),
        Message("tool", "", tool_call_id="b"),
    )
    turns = sent(Request(messages=messages, use_cache=False))["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert len(turns[0]["content"]) == 2
    assert [block.get("input") for block in turns[1]["content"]] == [None, {}, {"arguments": "not json"}]
    assert turns[1]["content"][1]["id"] == turns[2]["content"][0]["tool_use_id"] == "a_1"
    assert [block["type"] for block in turns[2]["content"]] == ["tool_result", "tool_result", "text"]
    later = sent(Request(messages=(Message("assistant", "As I said."), Message("user", "What?"))))["messages"]
    assert [turn["role"] for turn in later] == ["user", "assistant", "user"]


def test_empty_texts_are_not_sent() -> None:
    turns = sent(Request(messages=(Message("user", " "), Message("assistant", ""), Message("user", "Hello?"))))
    assert [block["text"] for block in turns["messages"][0]["content"]] == ["Hello?"]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("data:image/webp;base64,cG5n", {"type": "base64", "media_type": "image/webp", "data": "cG5n"}),
        ("data:;base64,cG5n", {"type": "base64", "media_type": "image/png", "data": "cG5n"}),
        (
            "data:image/svg+xml;charset=utf-8,%3Csvg%2F%3E",
            {"type": "base64", "media_type": "image/svg+xml", "data": "PHN2Zy8+"},
        ),
        ("https://example.org/cat.jpg", {"type": "url", "url": "https://example.org/cat.jpg"}),
    ],
)
def test_images_are_sent_as_bytes_or_by_their_address(url: str, source: Any) -> None:
    looking = Message("user", "What?", images=(Image(url),))
    content = sent(Request(messages=(looking,), use_cache=False))["messages"][0]["content"]
    assert content == [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (ToolChoice(), True, {"type": "auto"}),
        (ToolChoice("none"), False, {"type": "none"}),
        (ToolChoice("required"), True, {"type": "any"}),
        (ToolChoice("named", "weather"), True, {"type": "tool", "name": "weather"}),
        (ToolChoice(), False, {"type": "auto", "disable_parallel_tool_use": True}),
    ],
)
def test_which_tools_may_be_called_is_said(choice: ToolChoice, parallel: bool, expected: Any) -> None:
    request = replace(HELLO, tools=(WEATHER,), tool_choice=choice, parallel_tool_calls=parallel)
    body = sent(replace(request, use_cache=False))
    assert body["tool_choice"] == expected
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    assert body["tools"] == [{"name": "weather", "description": "Of a place.", "input_schema": schema}]


def test_a_schema_is_kept_to() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sent_format = sent(replace(HELLO, format=JsonFormat(schema)))["output_config"]["format"]
    assert (sent_format["type"], sent_format["schema"]["properties"]) == ("json_schema", schema["properties"])
    assert "JSON" in sent(replace(HELLO, format=JsonFormat()))["system"][0]["text"]
    with pytest.raises(InvalidField, match="response_format"):
        sent(replace(HELLO, format=JsonFormat({"properties": {}})))


def marked(body: Any) -> list[Any]:
    blocks = [*body.get("tools", ()), *body.get("system", ())]
    blocks += [block for turn in body["messages"] for block in turn["content"]]
    return [block["cache_control"] for block in blocks if "cache_control" in block]


def test_tools_system_and_the_last_two_turns_of_the_user_are_cached() -> None:
    said_before = [Message("user" if turn % 2 == 0 else "assistant", str(turn)) for turn in range(7)]
    long = Request(messages=(Message("system", "Be kind."), *said_before), tools=(WEATHER,))
    body = sent(long)
    assert marked(body) == [{"type": "ephemeral"}] * 4
    assert ["cache_control" in turn["content"][-1] for turn in body["messages"]] == [False] * 4 + [
        True,
        False,
        True,
    ]
    assert marked(sent(replace(long, ttl=Ttl.LONG))) == [{"type": "ephemeral", "ttl": "1h"}] * 4
    assert marked(sent(replace(long, use_cache=False))) == []


def test_users_are_told_apart_and_not_named() -> None:
    body = sent(replace(HELLO, user="alice@example.org"))
    assert "alice" not in str(body)
    assert body["metadata"]["user_id"] != sent(replace(HELLO, user="bob"))["metadata"]["user_id"]
