"""Anthropic's provider: its real SDK against a server that speaks its wire format."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from emberkeep.backend.remote.anthropic import AnthropicProvider, open_anthropic
from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.errors import (
    EmberkeepError,
    InvalidField,
    RemoteDown,
    RemoteError,
    RemoteFull,
    RemoteRefused,
    RequestError,
)
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Marked,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Image, JsonFormat, Message, Request, Sampling, Tool, ToolCall, ToolChoice, Ttl
from helpers.vendors.anthropic_server import (
    KEY,
    MODELS,
    AnthropicServer,
    answer,
    begun,
    ended,
    event,
    failed,
    redacted_block,
    said,
    text_block,
    thinking_block,
    tool_block,
)
from helpers.vendors.driving import HELLO, about, ask_when_it_is_gone, asking, drive, leave_early
from helpers.vendors.loopback import Reply, Stream

pytestmark = pytest.mark.slow

REMOTE = RemoteModel("claude", "anthropic", MODELS[0], api_key_env="ANTHROPIC_API_KEY")
WEATHER = Tool("weather", "Of a place.", {"properties": {"place": {"type": "string"}}})
CALLED = Message("assistant", tool_calls=(ToolCall("toolu_1", "weather", '{"place": "Lyon"}'),))
ANSWERED = Message("tool", "rain", tool_call_id="toolu_1")


def with_provider(
    server: AnthropicServer, use: Callable[[AnthropicProvider, AnthropicServer], Awaitable[Any]], key: str = KEY
) -> Any:
    return drive(lambda: server, lambda url: AnthropicProvider(replace(REMOTE, base_url=url), key), use)


def ask(server: AnthropicServer, *requests: Request, key: str = KEY) -> list[Event]:
    """The events of the last of them."""
    return with_provider(server, asking(*requests), key)  # type: ignore[no-any-return]


def sent(request: Request) -> Any:
    server = AnthropicServer()
    ask(server, request)
    return server.asked[-1].body


def error_of(*replies: Reply | Stream, key: str = KEY) -> EmberkeepError:
    with pytest.raises(EmberkeepError) as caught:
        ask(AnthropicServer(*replies), HELLO, key=key)
    return caught.value


def test_text_comes_in_pieces_and_ends_with_what_it_took() -> None:
    events = ask(AnthropicServer(Stream(answer(text_block(0, "Hel", "lo!")))), HELLO)
    assert events[:3] == [TextDelta(0, "Hel"), TextDelta(0, "lo!"), Finished(0, FinishReason.STOP)]
    assert isinstance(events[3], Completed)
    assert events[3].usage == Usage(10, 7)


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


def test_an_answer_that_was_cut_says_so() -> None:
    events = ask(AnthropicServer(Stream(answer(text_block(0, "x"), stop="max_tokens"))), HELLO)
    assert events[-2] == Finished(0, FinishReason.LENGTH)


def test_the_stop_sequence_that_ended_an_answer_is_passed_on() -> None:
    stopped = [*begun(), *text_block(0, "x"), *ended(stop="stop_sequence", stop_sequence="END")]
    events = ask(AnthropicServer(Stream(stopped)), HELLO)
    assert Finished(0, FinishReason.STOP, "END") in events


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


def test_thinking_that_was_not_signed_here_is_left_out() -> None:
    called = replace(CALLED, reasoning="Where?")
    content = sent(replace(HELLO, messages=(*HELLO.messages, called, ANSWERED)))["messages"][1]["content"]
    assert [block["type"] for block in content] == ["tool_use"]


def test_thinking_is_shown_while_it_happens() -> None:
    stream = Stream(answer(thinking_block(0, "Hm.", "s"), text_block(1, "Yes.")))
    assert ask(AnthropicServer(stream), HELLO)[:2] == [ReasoningDelta(0, "Hm."), TextDelta(0, "Yes.")]


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


def test_a_conversation_whose_beginning_has_left_still_begins_with_the_user() -> None:
    turns = sent(Request(messages=(Message("assistant", "As I said."), Message("user", "What?"))))["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]


def test_empty_texts_are_not_sent() -> None:
    turns = sent(Request(messages=(Message("user", " "), Message("assistant", ""), Message("user", "Hello?"))))
    assert [block["text"] for block in turns["messages"][0]["content"]] == ["Hello?"]


def test_images_are_sent_as_bytes_or_by_their_address() -> None:
    data = base64.b64encode(b"png").decode()
    images = (Image(f"data:image/png;base64,{data}"), Image("https://example.org/cat.jpg"))
    content = sent(Request(messages=(Message("user", "What?", images=images),), use_cache=False))["messages"][0]
    assert [block["source"] for block in content["content"][1:]] == [
        {"type": "base64", "media_type": "image/png", "data": data},
        {"type": "url", "url": "https://example.org/cat.jpg"},
    ]


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
    request = replace(HELLO, tools=(WEATHER,), tool_choice=choice, parallel_tool_calls=parallel, use_cache=False)
    body = sent(request)
    assert body["tool_choice"] == expected
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    assert body["tools"] == [{"name": "weather", "description": "Of a place.", "input_schema": schema}]


def test_a_schema_is_kept_to() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = sent(replace(HELLO, format=JsonFormat(schema)))["output_config"]["format"]
    assert made["type"] == "json_schema"
    assert made["schema"]["properties"] == {"a": {"type": "integer"}}
    assert "JSON" in sent(replace(HELLO, format=JsonFormat()))["system"][0]["text"]


def test_a_schema_that_cannot_be_kept_to_is_the_fault_of_the_request() -> None:
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


def test_a_service_that_has_too_much_to_do_says_when_to_come_back() -> None:
    error = error_of(failed(429, "rate_limit_error", "Slow down.", {"retry-after": "7"}))
    assert isinstance(error, RemoteDown) and error.retry_after == 7
    assert f"{MODELS[0]} at 127.0.0.1" in str(error)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (failed(529, "overloaded_error", "Overloaded"), RemoteDown),
        (failed(500, "api_error", "Internal server error"), RemoteDown),
        (failed(403, "permission_error", "Not yours."), RemoteRefused),
        (failed(402, "billing_error", "Credit balance is too low."), RemoteRefused),
        (failed(400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"), RemoteFull),
        (failed(413, "request_too_large", "Request exceeds the maximum size"), RemoteFull),
        (failed(400, "invalid_request_error", "messages.0: nonsense"), RequestError),
        (failed(404, "not_found_error", "model: nothing"), RemoteError),
        (Reply("<html>Bad gateway</html>", 502), RemoteDown),
        (Stream([*begun(), event("error", error={"type": "overloaded_error", "message": "Busy"})]), RemoteDown),
        (Stream([*begun(), *text_block(0, "Hel")]), RemoteDown),
        (Stream([*begun(), *text_block(0, "Hel")], end="broken"), RemoteDown),
        (Stream([*begun(), "event: message_delta\ndata: {not json\n\n"]), RemoteError),
        (Stream([*begun(), *ended(stop="refusal")]), RequestError),
    ],
)
def test_what_goes_wrong_is_said_in_our_words(reply: Reply | Stream, expected: type[EmberkeepError]) -> None:
    error = error_of(reply)
    assert type(error) is expected
    assert MODELS[0] in str(error) and "\n" not in str(error)


def test_a_request_is_sent_once_whatever_happens() -> None:
    server = AnthropicServer(failed(500, "api_error", "x"))
    with pytest.raises(RemoteDown):
        ask(server, HELLO)
    assert len(server.asked) == 1


def test_a_service_that_is_not_there_is_down() -> None:
    with pytest.raises(RemoteDown, match="cannot be reached"):
        with_provider(AnthropicServer(), ask_when_it_is_gone)


def test_an_event_is_there_before_the_next_one_is_written_and_leaving_closes_the_connection() -> None:
    server = AnthropicServer(Stream([*begun(), *text_block(0, "Hel")], end="never"))
    assert with_provider(server, leave_early) == TextDelta(0, "Hel")


def test_a_wrong_key_is_refused_and_shown_nowhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "sk-ant-wrong-canary-55"
    caplog.set_level(logging.DEBUG)
    error = error_of(key=wrong)
    assert isinstance(error, RemoteRefused)
    assert "ANTHROPIC_API_KEY" in str(error)
    printed = capfd.readouterr()
    shown = [str(error), repr(error), str(error.__cause__), caplog.text, printed.out, printed.err]
    shown += [repr(AnthropicProvider(REMOTE, wrong)), repr(vars(AnthropicProvider(REMOTE, wrong)))]
    assert not [text for text in shown if "canary" in text]


def test_without_a_key_nothing_is_opened() -> None:
    with pytest.raises(RemoteRefused, match="ANTHROPIC_API_KEY"):
        open_anthropic(REMOTE, None)


def test_it_says_what_it_has() -> None:
    assert with_provider(AnthropicServer(), about) == RemoteAbout(MODELS, 200_000)
